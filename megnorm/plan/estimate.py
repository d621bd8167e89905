"""An estimate of the seconds of a step: a sum of parts, none of which overlaps another.

Enough to rank layouts, not to promise a speed: kernels, overlap of communication with computation and the network's
topology are left out. Letters: H bytes of a micro batch's hidden stream inside the region, n ranks of a group, P
parameters of a rank, w bytes of a weight, D data-parallel ranks, m micro batches, S stages.

compute    FLOPs of the slowest stage / (peak x efficiency), a third more of what is computed again; and 4 times the
           kept activations through memory.
tensor     4 all-reduces of H a block (6 with full recomputation), 2 at each end; with sequence parallelism
           as many bytes (arXiv:2205.05198).
context    q, k, v and the context exchanged forward and backward (arXiv:2309.14509).
pipeline   H sent on and its gradient back, for each micro batch.
bubble     (S - 1) / m of all the above (1F1B).
data       as DeepSpeed 0.19.8 does it: stage 0, 1 all-reduce of the fp32 gradients once a step, stage 1 also an
           all-gather of weights; stage 2 an all-reduce for each micro batch; stage 3 also two all-gathers.
update     20 bytes a parameter that the rank updates, through memory.
"""

from dataclasses import dataclass

from megnorm.config import Config
from megnorm.plan.activations import Activations
from megnorm.plan.hardware import Hardware
from megnorm.plan.layout import Layout, accumulation_steps
from megnorm.plan.memory import Shape, stage_parameters
from megnorm.plan.parameters import attention_matrices, ffn_matrices


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; tokens a second of the whole world; share of the peak FLOPs that is useful."""

    compute: float
    tensor: float
    context: float
    pipeline: float
    bubble: float
    data: float
    update: float
    tokens_per_second: float
    mfu: float

    PARTS = ("compute", "tensor", "context", "pipeline", "bubble", "data", "update")

    @property
    def total(self) -> float:
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
    pipeline = micro_batches * _pipeline(acts, hardware)
    bubble = (layout.pp - 1) / micro_batches * (compute + tensor + context + pipeline)
    parameters = max(stage_parameters(config, layout, stage, shape) for stage in {0, layout.pp - 1})
    data = _data(config, layout, parameters, micro_batches, hardware)
    shards = layout.dp if config.parallel.zero_stage or config.train.dtype == "bf16" else 1
    update = 20 * parameters / shards / (hardware.bandwidth * 1e9)
    total = compute + tensor + context + pipeline + bubble + data + update
    useful = shape.flops_per_token * config.tokens_per_step
    return StepTime(compute, tensor, context, pipeline, bubble, data, update, config.tokens_per_step / total,
                    useful / total / layout.world / hardware.flops(config.train.dtype))


def _compute(shape: Shape, layout: Layout, stage: int, acts: Activations, hardware: Hardware,
             config: Config) -> float:
    """Seconds of one micro batch, forward and backward. A kernel skips the masked half of the attention."""
    model, blocks = config.model, shape.blocks(layout.pp, stage)
    weights = len(blocks) * (attention_matrices(model) + ffn_matrices(model))
    attention = 6 * len(blocks) * model.heads * model.head_size * config.data.sequence_length
    again = {"none": (1, 1), "selective": (1, 4 / 3), "full": (4 / 3, 4 / 3)}[config.parallel.recompute]
    output = 6 * model.padded_vocab * model.hidden if stage == layout.pp - 1 else 0
    flops = acts.region / layout.tp * (again[0] * 6 * weights + again[1] * attention + output)
    narrowest = min(acts.region, model.ffn_hidden // layout.tp, model.hidden)
    rate = hardware.flops(config.train.dtype) * hardware.efficiency * narrowest / (narrowest + 128)
    dropped = acts.core if config.parallel.recompute == "selective" else 0
    traffic = 4 * len(blocks) * (again[0] * acts.block(blocks[-1]) + again[1] * dropped)
    return flops / rate + traffic / (hardware.bandwidth * 1e9)


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


def _pipeline(acts: Activations, hardware: Hardware) -> float:
    layout = acts.layout
    if layout.pp == 1:
        return 0.0
    sent = acts.hidden // (1 if layout.sp else layout.tp)
    return 2 * (sent / hardware.link(2, layout.dp * layout.tp) + hardware.latency)


def _data(config: Config, layout: Layout, parameters: int, micro_batches: int, hardware: Hardware) -> float:
    ranks = layout.dp
    if ranks == 1:
        return 0.0
    weight = 2 if config.train.dtype == "bf16" else 4
    stage = max(config.parallel.zero_stage, 1) if weight == 2 else config.parallel.zero_stage
    once = (ranks - 1) / ranks * parameters  # elements that a gather or a scatter sends
    sent = {0: 2 * 4 * once, 1: (2 * 4 + weight) * once, 2: micro_batches * 2 * 4 * once + weight * once,
            3: micro_batches * (2 * 4 + 2 * weight) * once}[stage]
    calls = micro_batches * (3 * config.model.layers if stage == 3 else 1 if stage == 2 else 0) + 4
    return sent / hardware.link(ranks, layout.tp) + calls * hardware.latency
