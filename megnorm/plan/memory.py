"""Tensor memory of one rank in a training step, by part, from sizes alone.

Weights, gradients and optimizer state are what DeepSpeed 0.19.8 allocates (P: parameters of the rank, D: ranks
of data parallelism, m and v: AdamW's moments):

    fp32, stage 0         weights 4 P               gradients 4 P     m, v 8 P (also stage 1 where D = 1)
    fp32, stage 1, 2      weights 4 P               gradients 4 P, stage 2: 4 P / D
                                                                      masters and m, v 12 P / D
    fp32, stage 3         weights 4 P / D           gradients 4 P / D masters and m, v 12 P / D
    bf16, stage 1         weights 2 P               gradients 4 P     masters and m, v 12 P / D
    bf16, stage 2         weights 2 P               gradients 4 P / D masters and m, v 12 P / D
    bf16, stage 3         weights 2 P / D           gradients 4 P / D masters and m, v 12 P / D

(ZeRO: arXiv:1910.02054.) Of routed experts, each of which D / ep ranks hold, D is that number. The peak is the
largest of a few moments of the step: see ``_moments``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from megnorm.config import Config
from megnorm.config.placement import Sublayer
from megnorm.norms import placement_of
from megnorm.plan.activations import Activations
from megnorm.plan.flops import flops_per_token
from megnorm.plan.layout import Layout, accumulation_steps
from megnorm.plan.parameters import FFNParts, ffn_parts, ffn_size, head_norm_size, norm_size, scale_size
from megnorm.plan.stages import PlannedBlock, block_bounds, planned_blocks

FP32 = 4
BUCKET = 500_000_000  # elements, DeepSpeed's reduce_bucket_size
GATHERED = 1_000_000_000  # elements, DeepSpeed's stage3_max_live_parameters
PREFETCH = 50_000_000  # elements, DeepSpeed's stage3_prefetch_bucket_size: gathered at once, then taken apart
CHUNK = 2**19 * FP32  # bytes that the cross entropy works on at once on a CPU


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step, by part; moment: when that is.

    logits: with all that the cross entropy holds. gathered: weights that ZeRO 3 has put together. bucket: the
    buffer in which DeepSpeed reduces gradients, allocated whole however small the model is.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    bucket: int
    moment: str
    stage: int

    PARTS: ClassVar = ("weights", "gradients", "optimizer", "activations", "logits", "gathered", "bucket")

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, part) for part in self.PARTS)


class Shape:
    """A model's blocks by stage, and its FLOPs: what the estimates of many layouts have in common."""

    def __init__(self, config: Config):
        self.config, self.placement = config, placement_of(config.model)
        self._blocks = planned_blocks(config.model)
        self._ffns = {id(block): ffn_parts(config.model, layer) for layer, block in enumerate(self._blocks)}
        self.flops_per_token = flops_per_token(config).total
        self._stages: dict[int, list[list[PlannedBlock]]] = {}

    def blocks(self, stages: int, stage: int) -> list[PlannedBlock]:
        """The blocks of a pipeline stage; equal ones are one object."""
        if stages not in self._stages:
            bounds = block_bounds(self.config, stages)
            self._stages[stages] = [self._blocks[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        return self._stages[stages][stage]

    def ffn(self, block: PlannedBlock) -> FFNParts:
        """Of one of these blocks."""
        return self._ffns[id(block)]


class Held(NamedTuple):
    """Parameters of a rank, replicated ones included. experts: of the routed experts, which fewer data-parallel ranks
    hold than the ``common`` rest."""

    common: int
    experts: int

    @property
    def total(self) -> int:
        """Parameters of both kinds."""
        return sum(self)


def worst_rank(config: Config, layout: Layout, device: str = "cuda", shape: Shape | None = None) -> Memory:
    """The stage that needs most memory; tensor and data ranks of a stage are alike."""
    shape = shape or Shape(config)
    stages = (stage_memory(config, layout, stage, device, shape) for stage in range(layout.pp))
    return max(stages, key=lambda memory: memory.total)


def stage_memory(config: Config, layout: Layout, stage: int, device: str = "cuda",
                 shape: Shape | None = None) -> Memory:
    """The peak of a rank on a pipeline stage. ``device``: "cpu" or "cuda"."""
    shape = shape or Shape(config)
    parameters = stage_parameters(config, layout, stage, shape)
    static = _static(config, layout, parameters)
    found = _moments(config, layout, stage, device, shape, parameters)
    return max((_add(static, moment) for moment in found), key=lambda memory: memory.total)


def stage_parameters(config: Config, layout: Layout, stage: int, shape: Shape | None = None) -> Held:
    """Parameters that one rank of the stage holds."""
    model, shape = config.model, shape or Shape(config)
    blocks = shape.blocks(layout.pp, stage)
    common = _over(blocks, lambda block: common_parameters(config, block, layout.tp))
    experts = _over(blocks, lambda block: expert_parameters(config, block, layout))
    matrix = model.padded_vocab // layout.tp * model.hidden
    ends = shape.placement
    if stage == 0:
        common += matrix + scale_size(ends.embed_scale, model.hidden) + norm_size(ends.embed_norm, model.hidden)
    if stage == layout.pp - 1:
        common += norm_size(ends.final_norm, model.hidden)
        common += 0 if model.tie_embeddings and layout.pp == 1 else matrix
    return Held(common, experts)


def _over(blocks: list[PlannedBlock], size: Callable[[PlannedBlock], int]) -> int:
    """Sum of a size over blocks, most of which are one object."""
    kinds = {id(block): block for block in blocks}
    return sum(number * size(kinds[kind]) for kind, number in Counter(map(id, blocks)).items())


def common_parameters(config: Config, block: PlannedBlock, tp: int) -> int:
    """Of one block on one tensor rank, its routed experts left out."""
    model, slots = config.model, block.slots
    d, e, heads, kv = model.hidden, model.head_size, model.heads // tp, model.kv_heads // min(tp, model.kv_heads)
    count = 2 * (heads + kv) * e * d + ((heads + 2 * kv) * e + d) * model.bias
    attention = slots.attention
    if attention.gate != "none":
        width = heads * (e if attention.gate == "element" else 1)
        count += width * (d + (1 if model.bias else 0))
    if attention.head_scale != "none":
        count += heads if attention.head_scale == "before" else model.heads
    count += sum(head_norm_size(norm, own, e) for norm, own in (
        (attention.q_norm, heads), (attention.k_norm, kv), (attention.v_norm, kv), (attention.ctx_norm, heads)))
    count += sum(_sublayer(s, d) for s in (attention, slots.ffn))
    if block.moe is None:
        return count + ffn_size(model, slots.ffn, model.ffn_hidden // tp)
    shared = block.moe.shared_experts * block.moe.ffn_hidden // tp
    return count + block.moe.experts * d + (ffn_size(model, slots.ffn, shared) if shared else 0)


def expert_parameters(config: Config, block: PlannedBlock, layout: Layout) -> int:
    """Of the routed experts that one rank holds of a block."""
    if block.moe is None:
        return 0
    one = ffn_size(config.model, block.slots.ffn, block.moe.ffn_hidden // layout.tp)
    return block.moe.experts // layout.ep * one


def _sublayer(slots: Sublayer, width: int) -> int:
    norms = sum(norm_size(norm, width) for norm in (slots.in_norm, slots.out_norm, slots.post_norm))
    return norms + scale_size(slots.residual_scale, width) + scale_size(slots.branch_scale, width)


@dataclass(frozen=True)
class _Engine:
    """What a way to run DeepSpeed holds. itemsize: bytes of a weight; stage: of ZeRO, as it really runs; shards:
    ranks over which it cuts common parameters, expert_shards: experts."""

    itemsize: int
    stage: int
    shards: int
    expert_shards: int
    accumulates: bool

    def shard(self, parameters: Held) -> int:
        """Of how many of its parameters a rank has its own share under ZeRO."""
        return parameters.common // self.shards + parameters.experts // self.expert_shards

    def gradients(self, parameters: Held, micro_batch_done: bool) -> int:
        """Bytes of gradients before or after the backward pass of the step's last micro batch."""
        some = self.accumulates or micro_batch_done
        if self.stage >= 2:
            return FP32 * self.shard(parameters) if some or self.stage == 3 else 0
        return FP32 * parameters.total if some or self.itemsize == 2 else 0

    @property
    def bucket(self) -> int:
        """Bytes of the buffer in which gradients are reduced; bf16 stage 1 reduces them where they are, stage 3
        always in fp32."""
        if self.stage == 3:
            return BUCKET * FP32
        return BUCKET * self.itemsize if self.stage == 2 or (self.stage == 1 and self.itemsize == FP32) else 0

    def loose(self, largest: int) -> int:
        """Bytes of a gradient of ``largest`` elements on its way to where it is added up."""
        converted = FP32 if self.itemsize == 2 and self.stage == 1 else 0
        return largest * (self.itemsize + converted)


def _engine(config: Config, layout: Layout) -> _Engine:
    bf16, stage = config.train.dtype == "bf16", config.parallel.zero_stage
    stage = max(stage, 1) if bf16 else 0 if stage == 1 and layout.dp == 1 else stage  # as engine.settings has it
    return _Engine(2 if bf16 else FP32, stage, layout.dp, layout.dp // layout.ep, accumulation_steps(config, layout) > 1)


def _static(config: Config, layout: Layout, parameters: Held) -> Memory:
    """What is there between two steps, gradients excepted."""
    engine = _engine(config, layout)
    weights, own, gathered = parameters.total, engine.shard(parameters) if engine.stage else parameters.total, 0
    if engine.stage == 3:
        weights, gathered = own, engine.itemsize * min(parameters.total, GATHERED)
    optimizer = (3 if engine.stage else 2) * FP32 * own
    return Memory(engine.itemsize * weights, 0, optimizer, 0, 0, gathered, engine.bucket, "", 0)


def _add(static: Memory, moment: Memory) -> Memory:
    sums = {part: getattr(static, part) + getattr(moment, part) for part in Memory.PARTS}
    return replace(moment, **sums)


def _moments(config: Config, layout: Layout, stage: int, device: str, shape: Shape,
             parameters: Held) -> list[Memory]:
    """What is held beside the static part at each moment that may be the peak.

    All activations are there when the backward pass of the last layer begins; all gradients when that of the
    first layer ends; masters are updated after that.
    """
    acts, engine, model = Activations(config, layout, device), _engine(config, layout), config.model
    blocks, final = shape.blocks(layout.pp, stage), stage == layout.pp - 1
    again = config.parallel.recompute == "full"
    stream = acts.hidden * (2 if shape.placement.streams == "residual" else 1)
    head = acts.final(shape.placement.final_norm) if final else 0
    body = stream * len(blocks) if again else _over(blocks, acts.block)
    foot = acts.embedding(shape.placement.embed_norm) if stage == 0 else 0
    one = body + head + foot + _pipe_buffers(acts, layout, stage, final)
    batches = _batches(config, layout)
    every = min(layout.pp - stage, accumulation_steps(config, layout)) * one + batches
    left = every - head - body + (stream if again else acts.block(blocks[0]))
    matrix = model.padded_vocab // layout.tp * model.hidden
    slope = acts.region * model.padded_vocab // layout.tp * acts.itemsize
    tied = matrix * engine.itemsize if model.tie_embeddings and layout.pp == 1 else 0
    before, after = engine.gradients(parameters, False), engine.gradients(parameters, True)

    def moment(name: str, activations: int, gradients: int, logits: int = 0) -> Memory:
        return Memory(0, gradients, 0, activations, logits, 0, 0, name, stage)

    def transient(block: PlannedBlock) -> int:
        return (acts.block(block) if again else 0) + acts.block_transient(block)

    found = [moment("backward pass of the last block", every + transient(blocks[-1]), before + tied),
             moment("backward pass of the first block", left + transient(blocks[0]), after + tied),
             moment("update", batches, after + _update(engine, parameters))]
    found += [moment("reduction of gradients", batches, held)
              for held in _reduction(engine, parameters, before, after, engine.loose(matrix))]
    if engine.stage == 3:
        found.append(moment("gathering of weights", every + engine.itemsize * min(parameters.total, PREFETCH), before))
    if final:
        found += [moment("cross entropy", every, before, _cross_entropy(acts, layout)),
                  moment("gradient of the output", every + acts.entered, before + engine.loose(matrix), slope)]
    if stage == 0:
        found.append(moment("gradient of the embedding", acts.hidden + batches, after + tied + engine.loose(matrix)))
    return found


def _reduction(engine: _Engine, parameters: Held, before: int, after: int, loose: int) -> list[int]:
    """Bytes of gradients while the bucket is reduced, as measured; none where it is no moment of its own."""
    part = min(parameters.total, BUCKET)
    if engine.stage == 3 and engine.itemsize == 2:  # in fp32, flat and once more; weights are no longer gathered
        return [before + 2 * FP32 * part - engine.itemsize * min(parameters.total, GATHERED) + loose]
    if engine.stage == 2 and engine.itemsize == 2:  # flat in fp32; this rank's share of the sums, and a copy of it
        return [after + FP32 * part + FP32 * engine.shard(parameters)]
    if engine.stage in (1, 2) and engine.bucket:  # flat; at stage 1 pieces of it too
        return [engine.itemsize * part * 7 // 4 if engine.stage == 1 else engine.itemsize * part]
    return []


def _update(engine: _Engine, parameters: Held) -> int:
    """Gradients copied for the optimizer or, at stage 0 and with bf16 at stage 1, for their all-reduce: flat, as
    far as a bucket goes."""
    if engine.stage == 0 or (engine.stage == 1 and engine.itemsize == 2):
        whole = parameters.total
        flat = FP32 * whole if whole <= BUCKET else FP32 * BUCKET * (engine.stage == 0)
        return flat if engine.shards > 1 else 0
    return FP32 * engine.shard(parameters)


def _pipe_buffers(acts: Activations, layout: Layout, stage: int, final: bool) -> int:
    """What DeepSpeed's pipeline keeps for each micro batch in flight beside what autograd keeps."""
    if layout.pp == 1:
        return 0
    received = 0 if stage == 0 else acts.hidden
    sent = 0 if final else acts.hidden // (1 if layout.sp else layout.tp)
    return received + sent


def _batches(config: Config, layout: Layout) -> int:
    """Token ids, targets and weights of the step's micro batches, and the kept sums."""
    tokens = config.train.micro_batch * config.data.sequence_length // layout.cp
    return 20 * tokens * accumulation_steps(config, layout)


def _cross_entropy(acts: Activations, layout: Layout) -> int:
    """Logits or their gradient, and the softmax in fp32; the pipeline also keeps the logits before."""
    scores = acts.region * acts.config.model.padded_vocab // layout.tp
    logits, kept = scores * acts.itemsize, scores * FP32
    working = min(CHUNK, kept) if acts.device == "cpu" else kept
    return logits * (3 if layout.pp > 1 else 1) + kept + working
