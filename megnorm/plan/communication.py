"""What the ranks of a stage send each other in a step, by axis and kind: bytes handed to the collectives.

Counted are the tensors that one rank passes in, whatever the network makes of them (an all-reduce of n ranks moves
2 (n - 1) / n of that). H: bytes of a micro batch's hidden stream inside the tensor-parallel region; t: its tokens.

tp         a block 2 all-reduces of H forward (the ends of attention and FFN) and 2 backward (their beginnings), the
           embedding 1 forward, the output 1 backward; under sp each is an all-gather or a reduce-scatter, in both
           directions. Cross entropy: 4 t for the maximum, 8 t for sum and target score (fp32). A norm over a sharded
           axis: 4 t, for LayerNorm twice, forward and backward. A gain that acts on a rank's heads or tokens alone:
           its own size, backward.
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
from megnorm.plan.stages import block_bounds, planned_blocks

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
            sent |= self._region(acts, len(blocks), first, last)
            partial = sum(self._gains(block) for block in blocks)
            if layout.sp:
                partial += sum(self._stream_norms(block) for block in blocks)
                partial += self._size(placement.embed_norm) * first + self._size(placement.final_norm) * last
            statistics = sum(self._statistics(block) for block in blocks) * 2 * FP32 * acts.region
            loss = 3 * FP32 * acts.region * last
            sent["tp", "all_reduce"] = sent.get(("tp", "all_reduce"), 0) + partial * acts.itemsize + statistics + loss
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

    def _region(self, acts: Activations, blocks: int, first: bool, last: bool) -> Volumes:
        whole = acts.entered
        if not self.layout.sp:
            return {("tp", "all_reduce"): whole * (4 * blocks + first + last)}
        slices = whole // self.layout.tp
        gathers = 4 * blocks + first + last  # forward at each beginning, backward at each end
        return {("tp", "all_gather"): slices * gathers, ("tp", "reduce_scatter"): whole * gathers}

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

    def _statistics(self, block: Block) -> int:
        """Sums over the ranks of norms over a sharded axis, in one direction."""
        slots = block.attention
        norms: list[Norm | HeadNorm | None] = [
            norm for norm in (slots.q_norm, slots.k_norm, slots.v_norm, slots.ctx_norm)
            if norm is not None and norm.scope == "all_heads"]
        norms.append(block.ffn.mid_norm)
        return sum({"layer": 2, "dyt": 0}.get(norm.kind, 1) for norm in norms if norm is not None)
