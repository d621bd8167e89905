"""What autograd keeps of a forward pass on one rank, module by module, in bytes of one micro batch.

Each line follows what the module's operations save for their backward pass (megnorm.model): a linear its input, a
norm its input and one number in fp32 per row, attention's core what ``core.py`` chooses for the device.
"""

from dataclasses import dataclass
from functools import cached_property

from megnorm.config import Config
from megnorm.config.placement import AttentionSlots, FFNSlots, HeadNorm, Norm, Scale, Sublayer
from megnorm.plan.layout import Layout
from megnorm.plan.stages import PlannedBlock

BLOCK, LONGEST = 64, 1024  # of megnorm.model.block_causal
FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Activations:
    """Sizes of one rank: region: tokens inside the tensor-parallel region; stream: tokens of the hidden stream.

    device: "cpu" or "cuda", which run different attention cores and cross entropies.
    """

    config: Config
    layout: Layout
    device: str

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an activation's number."""
        return 2 if self.config.train.dtype == "bf16" else FP32

    @cached_property
    def region(self) -> int:
        """Tokens of a micro batch inside attention and FFN, whole over the tensor-parallel ranks."""
        return self.config.train.micro_batch * self.config.data.sequence_length // self.layout.cp

    @cached_property
    def stream(self) -> int:
        """Tokens of a micro batch in the stream between them."""
        return self.region // (self.layout.tp if self.layout.sp else 1)

    @cached_property
    def hidden(self) -> int:
        """Bytes of the hidden stream [b, s, d] of this rank."""
        return self.stream * self.config.model.hidden * self.itemsize

    @cached_property
    def entered(self) -> int:
        """Bytes of the same inside the region, where it is whole."""
        return self.region * self.config.model.hidden * self.itemsize

    @cached_property
    def queries(self) -> int:
        """Bytes of the queries [b, s, H / tp, e]."""
        model = self.config.model
        return self.region * model.heads // self.layout.tp * model.head_size * self.itemsize

    @cached_property
    def keys(self) -> int:
        """Of keys, and as many of values; with fewer heads than ranks each rank holds one."""
        model = self.config.model
        return self.region * max(1, model.kv_heads // self.layout.tp) * model.head_size * self.itemsize

    def inner(self, block: PlannedBlock) -> int:
        """Of the inner activation of a dense FFN, or of all copies of the tokens in the routed experts."""
        model, moe = self.config.model, block.moe
        width = model.ffn_hidden if moe is None else moe.top_k * moe.ffn_hidden
        return self.region * width // self.layout.tp * self.itemsize

    def routed(self, block: PlannedBlock) -> int:
        """Of the copies of the tokens that go to experts, as many as a rank's own where the load is even."""
        return 0 if block.moe is None else self.entered * block.moe.top_k

    @cached_property
    def scores(self) -> int:
        """Bytes of the kept softmax of block-causal attention; 0 where the core doesn't keep it."""
        length = self.config.data.sequence_length
        if not self._blocks:
            return 0
        whole, rest = divmod(length, BLOCK)
        pairs = BLOCK * BLOCK * whole * (whole + 1) // 2 + rest * length
        heads = self.config.model.heads // self.layout.tp // self.layout.cp
        return self.config.train.micro_batch * heads * pairs * self.itemsize

    @cached_property
    def _blocks(self) -> bool:
        return self.device == "cpu" and self.config.data.sequence_length <= LONGEST

    @cached_property
    def core(self) -> int:
        """What the attention core keeps beside q, k, v: its softmax, or its output and one number per row."""
        heads = self.config.model.heads // self.layout.tp
        return self.scores if self._blocks else self.queries + self.region * heads * FP32

    def block(self, block: PlannedBlock) -> int:
        """All that one block keeps."""
        ffn = self._ffn(block.slots.ffn, self.inner(block)) if block.moe is None else self._moe(block)
        return self._attention(block.slots.attention) + self._sublayer(block.slots.ffn) + ffn

    def block_transient(self, block: PlannedBlock) -> int:
        """What the backward pass of a block holds at most beside what the forward pass kept."""
        ffn = 2 * self.inner(block) + 2 * self.hidden + self.routed(block)
        attention = 3 * self.queries + 2 * self.keys * FP32 // self.itemsize + 2 * self.hidden
        if self.config.parallel.recompute == "selective":
            attention += self.core
        return max(ffn, attention)

    def final(self, norm: Norm | None) -> int:
        """Of the final norm and the output's input."""
        return self._norm(norm, self.hidden, self.stream) + self.entered

    def embedding(self, norm: Norm | None) -> int:
        """Of the embedding: ids, which of them are elsewhere; and of its norm."""
        return 18 * self.region + self._norm(norm, self.hidden, self.stream)

    def _attention(self, slots: AttentionSlots) -> int:
        model, tp = self.config.model, self.layout.tp
        heads, kv = model.heads // tp, max(1, model.kv_heads // tp)
        kept = self._sublayer(slots)
        kept += self._head_norm(slots.q_norm, self.queries, heads)
        kept += self._head_norm(slots.k_norm, self.keys, kv) + self._head_norm(slots.v_norm, self.keys, kv)
        kept += self._head_norm(slots.ctx_norm, self.queries, heads)
        kept += self.queries + 2 * self.keys + self.queries
        if self.config.parallel.recompute != "selective":
            kept += self.core
        if slots.gate != "none":
            gates = self.region * heads * self.itemsize * (model.head_size if slots.gate == "element" else 1)
            kept += self.queries + gates
        if slots.head_scale != "none":
            kept += self.queries if slots.head_scale == "before" else self.hidden
        return kept

    def _ffn(self, slots: FFNSlots, inner: int, copies: int = 1) -> int:
        """inner: bytes of the inner activation; copies: of each token."""
        kept = inner * (4 if self.config.model.activation == "swiglu" else 2)
        return kept + self._spanning_norm(slots.mid_norm, inner, copies * self.region)

    def _moe(self, block: PlannedBlock) -> int:
        """The copies that experts take and give, and what is inside; the router, in fp32: its input where that is
        not the stream itself, four values for each expert, one factor and two numbers for each choice."""
        moe, slots = block.moe, block.slots.ffn
        wide = self.config.model.hidden if self.itemsize < FP32 else 0
        router = self.stream * FP32 * (wide + 4 * moe.experts) + self.region * moe.top_k * (FP32 + 2 * INT64)
        shared = self.region * moe.shared_experts * moe.ffn_hidden // self.layout.tp * self.itemsize
        return (router + 2 * self.routed(block) + self._ffn(slots, self.inner(block), moe.top_k)
                + (self._ffn(slots, shared) if shared else 0))

    def _sublayer(self, slots: Sublayer) -> int:
        """Norms on the stream, learned factors, and the input of the first linears."""
        kept = self.entered
        for norm in (slots.in_norm, slots.out_norm, slots.post_norm):
            kept += self._norm(norm, self.hidden, self.stream)
        return kept + sum(self._scale(scale) for scale in (slots.residual_scale, slots.branch_scale))

    def _scale(self, scale: Scale) -> int:
        return self.hidden if scale.learned != "no" else 0

    def _norm(self, norm: Norm | None, size: int, rows: int) -> int:
        """A norm within one rank over ``rows`` rows of together ``size`` bytes."""
        if norm is None:
            return 0
        statistics = {"rms": 1, "l2": 1, "layer": 2, "dyt": 0}[norm.kind] * FP32 * rows
        wide = size * FP32 // self.itemsize
        if norm.kind == "dyt":
            return size + 2 * wide
        plain = norm.rounding == "gain_then_cast" and not norm.zero_centred and norm.scale == 1.0 and not (
            norm.bias and norm.kind == "rms") and norm.kind != "l2"
        return statistics + (size if plain else 2 * wide)

    def _head_norm(self, norm: HeadNorm | None, size: int, heads: int) -> int:
        if norm is None:
            return 0
        if norm.scope == "all_heads":
            return self._spanning_norm(norm, size, self.region)
        return self._norm(norm, size, self.region * heads)

    def _spanning_norm(self, norm: Norm | None, size: int, rows: int) -> int:
        """A norm over an axis that is cut over tensor ranks: plain tensor code in fp32."""
        if norm is None or self.layout.tp == 1:
            return self._norm(norm, size, rows)
        return (2 if norm.gain == "none" else 3) * size * FP32 // self.itemsize
