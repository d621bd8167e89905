"""What the ranks of a stage send each other in a step, by axis and kind: bytes handed to the collectives.

Counted are the tensors that one rank passes in, whatever the network makes of them (an all-reduce of n ranks moves
2 (n - 1) / n of that). H: bytes of a micro batch's hidden stream inside the tensor-parallel region; t: its tokens.

tp         a block 2 all-reduces of H forward (the ends of attention and FFN) and 2 backward (their beginnings), the
           embedding 1 forward, the output 1 backward; under sp each is an all-gather or a reduce-scatter, in both
           directions. Cross entropy: 4 t for the maximum, 8 t for sum and target score (fp32). A norm over a sharded
           axis: 4 t, for LayerNorm twice, forward and backward. A gain that acts on a rank's heads or tokens alone:
           its own size, backward. A router's choices: their factors (fp32), under sp also their numbers; under sp
           the loads of the experts, summed, and the router's gradient. Shared experts enter and leave once more.
ep         the copies of the tokens to their experts and back, forward, and their gradients backward, by all-to-all, where
           every rank gets as many as it sends; before, the numbers of copies for each expert.
cp         q, k, v and the context forward, their gradients backward, by all-to-all.
pp         H on, its gradient back (what of it a rank sends: 1 / tp of it, since the ranks hold copies; all under sp).
"""

from dataclasses import dataclass

from megnorm.config import Config
from megnorm.config.placement import Block, HeadNorm, Norm
from megnorm.norms import placement_of
from megnorm.plan.activations import INT64, Activations
from megnorm.plan.layout import Layout, accumulation_steps
from megnorm.plan.stages import PlannedBlock, block_bounds, planned_blocks

FP32 = 4
Volumes = dict[tuple[str, str], int]


def volumes(config: Config, layout: Layout, stage: int) -> Volumes:
    """Bytes per step of one rank of a stage, by (axis, kind); without recomputation, DeepSpeed's data-parallel
    part left out."""
    return _Counter(config, layout, stage).count()


@dataclass
class _Counter:
    config: Config
    layout: Layout
    stage: int

    def count(self) -> Volumes:
        layout, model = self.layout, self.config.model
        acts = Activations(self.config, layout, "cpu")
        bounds = block_bounds(self.config, layout.pp)
        placement = placement_of(model)
        planned = planned_blocks(model)[bounds[self.stage]:bounds[self.stage + 1]]
        blocks = [block.slots for block in planned]
        first, last = self.stage == 0, self.stage == layout.pp - 1
        sent: Volumes = {}
        if layout.tp > 1:
            routed = [block for block in planned if block.moe]
            bodies = 2 * len(blocks) + sum(block.moe.shared_experts > 0 for block in routed)
            sent |= self._region(acts, bodies, sum(block.moe.top_k for block in routed), first, last)
            partial = sum(self._gains(block) for block in blocks) + sum(self._expert_vectors(block) for block in routed)
            if layout.sp:
                partial += sum(self._stream_norms(block) for block in blocks)
                partial += self._size(placement.embed_norm) * first + self._size(placement.final_norm) * last
                partial += sum(block.moe.experts * model.hidden for block in routed)
            statistics = sum(self._statistics(block) for block in planned) * 2 * FP32 * acts.region
            loss = 3 * FP32 * acts.region * last
            loads = sum(self._loads(block) for block in routed) if layout.sp else 0
            sent["tp", "all_reduce"] = (sent.get(("tp", "all_reduce"), 0) + partial * acts.itemsize + statistics + loss
                                        + loads)
        if layout.cp > 1:
            sent["cp", "all_to_all"] = 2 * len(blocks) * (2 * acts.queries + 2 * acts.keys)
        if layout.ep > 1:
            sent["ep", "all_to_all"] = sum(4 * acts.routed(block) + block.moe.experts * INT64
                                           for block in planned if block.moe)
        if layout.pp > 1:
            part = acts.hidden // (1 if layout.sp else layout.tp)
            sent["pp", "send"] = part * ((not last) + (not first))
        steps = accumulation_steps(self.config, layout)
        return {key: steps * size for key, size in sent.items() if size}

    def _region(self, acts: Activations, bodies: int, choices: int, first: bool, last: bool) -> Volumes:
        """bodies: how often the stream enters and leaves; choices: of a token in all blocks with experts."""
        whole, made = acts.entered, acts.region * choices
        passes = 2 * bodies + first + last
        if not self.layout.sp:
            return {("tp", "all_reduce"): whole * passes + made * FP32}
        gathered = whole * passes + made * (FP32 + INT64)  # forward at each beginning, backward at each end
        return {("tp", "all_gather"): gathered // self.layout.tp,
                ("tp", "reduce_scatter"): whole * passes + made * FP32}

    def _expert_vectors(self, block: PlannedBlock) -> int:
        """Elements of the experts' vectors that are not cut: the bias of down, a DyT's alpha."""
        norm = block.slots.ffn.mid_norm
        each = self.config.model.hidden * self.config.model.bias + (norm is not None and norm.kind == "dyt")
        return block.moe.experts // self.layout.ep * each

    def _loads(self, block: PlannedBlock) -> int:
        """Bytes of the number of choices of each expert, of each sequence where its balance loss wants them."""
        sets = self.config.train.micro_batch if block.moe.by_sequence else 1
        return sets * block.moe.experts * INT64

    def _gains(self, block: Block) -> int:
        """Elements of gains and biases over one head that all of a rank's heads share."""
        slots = block.attention
        return sum(self.config.model.head_size * (1 + norm.bias)
                   for norm in (slots.q_norm, slots.k_norm, slots.v_norm, slots.ctx_norm)
                   if norm is not None and norm.scope == "head" and norm.gain == "vector")

    def _stream_norms(self, block: Block) -> int:
        return sum(self._size(norm) for slots in (block.attention, block.ffn)
                   for norm in (slots.in_norm, slots.out_norm, slots.post_norm))

    def _size(self, norm: Norm | None) -> int:
        return 0 if norm is None else self.config.model.hidden * ((norm.gain == "vector") + norm.bias)

    def _statistics(self, block: PlannedBlock) -> int:
        """Sums over the ranks of norms over a sharded axis, in one direction, for a token."""
        slots, moe = block.slots.attention, block.moe
        norms: list[Norm | HeadNorm | None] = [
            norm for norm in (slots.q_norm, slots.k_norm, slots.v_norm, slots.ctx_norm)
            if norm is not None and norm.scope == "all_heads"]
        norms += [block.slots.ffn.mid_norm] * (1 if moe is None else moe.top_k + (moe.shared_experts > 0))
        return sum({"layer": 2, "dyt": 0}.get(norm.kind, 1) for norm in norms if norm is not None)
