"""An estimate of the seconds of a step: a sum of parts, none of which overlaps another.

Enough to rank layouts, not to promise a speed: kernels, overlap of communication with computation and the network's
topology are left out. Letters: H bytes of a micro batch's hidden stream inside the region, n ranks of a group, P
parameters of a rank, w bytes of a weight, D data-parallel ranks, m micro batches, S stages.

compute    FLOPs of the slowest stage / (peak x efficiency), a third more of what is computed again; and 4 times the
           kept activations through memory.
tensor     4 all-reduces of H a block (6 with full recomputation), 2 at each end; with sequence parallelism
           as many bytes (arXiv:2205.05198).
context    q, k, v and the context exchanged forward and backward (arXiv:2309.14509).
expert     the routed copies of the tokens to their experts and back, forward and backward (arXiv:2006.16668), where the
           load is even.
pipeline   H sent on and its gradient back, for each micro batch.
bubble     (S - 1) / m of all the above (1F1B).
data       as DeepSpeed 0.19.8 does it: stage 0, 1 all-reduce of the fp32 gradients once a step, stage 1 also an
           all-gather of weights; stage 2 an all-reduce for each micro batch; stage 3 also two all-gathers. Experts
           among the ranks that hold the same ones.
update     20 bytes a parameter that the rank updates, through memory.
"""

from dataclasses import dataclass

from megnorm.config import Config, ModelConfig
from megnorm.plan.activations import Activations
from megnorm.plan.hardware import Hardware
from megnorm.plan.layout import Layout, accumulation_steps
from megnorm.plan.memory import Held, Shape, stage_parameters
from megnorm.plan.parameters import attention_matrices
from megnorm.plan.stages import PlannedBlock


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; tokens a second of the whole world; share of the peak FLOPs that is useful."""

    compute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    update: float
    tokens_per_second: float
    mfu: float

    PARTS = ("compute", "tensor", "context", "expert", "pipeline", "bubble", "data", "update")

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(getattr(self, part) for part in self.PARTS)


def step_time(config: Config, layout: Layout, hardware: Hardware, shape: Shape | None = None) -> StepTime:
    """The estimate for one optimizer step."""
    shape = shape or Shape(config)
    acts, micro_batches = Activations(config, layout, hardware.device), accumulation_steps(config, layout)
    compute = micro_batches * max(_compute(shape, layout, stage, acts, hardware, config)
                                  for stage in {0, layout.pp - 1, layout.pp // 2})
    blocks = max(len(shape.blocks(layout.pp, stage)) for stage in range(layout.pp))
    tensor = micro_batches * _tensor(blocks, acts, hardware, config.parallel.recompute == "full")
    context = micro_batches * _context(blocks, acts, hardware, config.parallel.recompute == "full")
    expert = micro_batches * max(_expert(shape.blocks(layout.pp, stage), acts, hardware)
                                 for stage in range(layout.pp))
    pipeline = micro_batches * _pipeline(acts, hardware)
    bubble = (layout.pp - 1) / micro_batches * (compute + tensor + context + expert + pipeline)
    held = max((stage_parameters(config, layout, stage, shape) for stage in {0, layout.pp - 1}), key=lambda held: held.total)
    data = _data(config, layout, held, micro_batches, hardware)
    sharded = config.parallel.zero_stage or config.train.dtype == "bf16"
    updated = held.common / layout.dp + held.experts * layout.ep / layout.dp if sharded else held.total
    update = 20 * updated / (hardware.bandwidth * 1e9)
    total = compute + tensor + context + expert + pipeline + bubble + data + update
    useful = shape.flops_per_token * config.tokens_per_step
    return StepTime(compute, tensor, context, expert, pipeline, bubble, data, update, config.tokens_per_step / total,
                    useful / total / layout.world / hardware.flops(config.train.dtype))


def _compute(shape: Shape, layout: Layout, stage: int, acts: Activations, hardware: Hardware,
             config: Config) -> float:
    """Seconds of one micro batch, forward and backward. A kernel skips the masked half of the attention."""
    model, blocks = config.model, shape.blocks(layout.pp, stage)
    weights = len(blocks) * attention_matrices(model) + sum(shape.ffn(block).met for block in blocks)
    attention = 6 * len(blocks) * model.heads * model.head_size * config.data.sequence_length
    again = {"none": (1, 1), "selective": (1, 4 / 3), "full": (4 / 3, 4 / 3)}[config.parallel.recompute]
    output = 6 * model.padded_vocab * model.hidden if stage == layout.pp - 1 else 0
    flops = acts.region / layout.tp * (again[0] * 6 * weights + again[1] * attention + output)
    narrowest = min(acts.region, model.hidden, *(_narrowest(model, block, acts) for block in set(blocks)))
    rate = hardware.flops(config.train.dtype) * hardware.efficiency * narrowest / (narrowest + 128)
    dropped = acts.core if config.parallel.recompute == "selective" else 0
    traffic = 4 * len(blocks) * (again[0] * acts.block(blocks[-1]) + again[1] * dropped)
    return flops / rate + traffic / (hardware.bandwidth * 1e9)


def _narrowest(model: ModelConfig, block: PlannedBlock, acts: Activations) -> int:
    """The smallest dimension of the products of a block's FFN; the tokens of one expert are one."""
    if block.moe is None:
        return model.ffn_hidden // acts.layout.tp
    rows = acts.region * block.moe.top_k * acts.layout.ep // block.moe.experts
    return max(1, min(rows, block.moe.ffn_hidden // acts.layout.tp))


def _tensor(blocks: int, acts: Activations, hardware: Hardware, again: bool) -> float:
    ranks = acts.layout.tp
    if ranks == 1:
        return 0.0
    each = 2 * (ranks - 1) / ranks * acts.entered / hardware.link(ranks, 1) + hardware.latency
    return ((6 if again else 4) * blocks + 2) * each


def _context(blocks: int, acts: Activations, hardware: Hardware, again: bool) -> float:
    ranks, stride = acts.layout.cp, acts.layout.tp
    if ranks == 1:
        return 0.0
    sent = (ranks - 1) / ranks * (2 * acts.queries + 2 * acts.keys)
    each = sent / hardware.link(ranks, stride) + 4 * hardware.latency
    return (3 if again else 2) * blocks * each


def _expert(blocks: list[PlannedBlock], acts: Activations, hardware: Hardware) -> float:
    """Four exchanges a block, six with full recomputation, and one of counts."""
    ranks = acts.layout.ep
    if ranks == 1:
        return 0.0
    again = acts.config.parallel.recompute == "full"
    link, each = hardware.link(ranks, acts.layout.tp), (ranks - 1) / ranks
    exchanges = (6 if again else 4) + 1
    return sum((6 if again else 4) * each * acts.routed(block) / link + exchanges * hardware.latency
               for block in blocks if block.moe)


def _pipeline(acts: Activations, hardware: Hardware) -> float:
    layout = acts.layout
    if layout.pp == 1:
        return 0.0
    sent = acts.hidden // (1 if layout.sp else layout.tp)
    return 2 * (sent / hardware.link(2, layout.dp * layout.tp) + hardware.latency)


def _data(config: Config, layout: Layout, held: Held, micro_batches: int, hardware: Hardware) -> float:
    if layout.dp == 1:
        return 0.0
    weight = 2 if config.train.dtype == "bf16" else 4
    stage = max(config.parallel.zero_stage, 1) if weight == 2 else config.parallel.zero_stage
    # Bytes of an element that are gathered or scattered.
    moved = {0: 2 * 4, 1: 2 * 4 + weight, 2: micro_batches * 2 * 4 + weight, 3: micro_batches * (2 * 4 + 2 * weight)}
    seconds = 0.0
    for parameters, ranks, stride in ((held.common, layout.dp, layout.tp),
                                      (held.experts, layout.dp // layout.ep, layout.tp * layout.ep)):
        seconds += (ranks - 1) / ranks * parameters * moved[stage] / hardware.link(ranks, stride)
    calls = micro_batches * (3 * config.model.layers if stage == 3 else 1 if stage == 2 else 0) + 4
    return seconds + calls * hardware.latency
