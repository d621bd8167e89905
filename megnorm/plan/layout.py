"""Which rank stands where: pipeline stage, data-parallel replica, tensor-parallel shard (ranks fastest last)."""

from dataclasses import dataclass
from typing import NamedTuple

from megnorm.config import Config, ConfigError


class Coordinates(NamedTuple):
    """Position of one rank in the layout."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """A world of pp * dp * tp ranks; rank = (pp_index * dp + dp_index) * tp + tp_index, as in DeepSpeed.

    dp: ranks over which gradients are averaged: ``replicas`` times cp neighbours that share their sequences
    (context parallelism). sp: Megatron's sequence parallelism, the hidden stream cut over the
    tensor-parallel ranks. ep: data-parallel neighbours over which the experts of an MoE layer are cut.
    """

    pp: int
    dp: int
    tp: int
    sp: bool = False
    cp: int = 1
    ep: int = 1

    @property
    def replicas(self) -> int:
        """How many different micro batches there are at a time."""
        return self.dp // self.cp

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Where a global rank stands."""
        return Coordinates(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks that differ only in their index along ``axis`` ("pp", "dp" or "tp")."""
        others = [name for name in Coordinates._fields if name != axis]
        members: dict[tuple, list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            members.setdefault(tuple(getattr(at, name) for name in others), []).append(rank)
        return list(members.values())

    def neighbours(self, size: int) -> list[list[int]]:
        """The data-parallel groups cut into runs of ``size`` adjacent ranks: cp or ep."""
        return [ranks[i:i + size] for ranks in self.groups("dp") for i in range(0, self.dp, size)]

    def expert_replicas(self) -> list[list[int]]:
        """The data-parallel ranks that hold the same experts."""
        return [ranks[i::self.ep] for ranks in self.groups("dp") for i in range(self.ep)]

    def whole_models(self) -> list[list[int]]:
        """The ranks that hold one whole model between them: all stages, shards and experts."""
        return [[rank for rank in range(self.world) if self.coordinates(rank).dp // self.ep == part]
                for part in range(self.dp // self.ep)]

    def __str__(self) -> str:
        return (f"TP={self.tp}{' with SP' if self.sp else ''} PP={self.pp} DP={self.replicas}"
                f"{f' CP={self.cp}' if self.cp > 1 else ''}{f' EP={self.ep}' if self.ep > 1 else ''}")


def make_layout(config: Config, world: int) -> Layout:
    """The layout of a run on ``world`` ranks. Raises ConfigError when they don't fit, with what would."""
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    factors = f"parallel.tp={parallel.tp} x pp={parallel.pp}" + (f" x cp={parallel.cp}" if parallel.cp > 1 else "")
    if world % model_ranks:
        fits = [model_ranks, 2 * model_ranks, 3 * model_ranks]
        raise ConfigError(f"a world of {world} processes doesn't fit {factors}: it must be a multiple of "
                          f"{model_ranks}, such as {fits}")
    replicas = world // model_ranks
    if parallel.dp not in (None, replicas):
        raise ConfigError(f"parallel.dp={parallel.dp} doesn't fit: {world} processes / ({factors}) = {replicas}; "
                          f"leave dp out, or start {model_ranks * parallel.dp} processes")
    return Layout(pp=parallel.pp, dp=replicas * parallel.cp, tp=parallel.tp, sp=parallel.sp, cp=parallel.cp,
                  ep=parallel.ep)


def check_layout(config: Config, layout: Layout) -> None:
    """Raise ConfigError when the model, the batch or the engine can't take this layout."""
    model, train, parallel = config.model, config.train, config.parallel
    for name, size in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden),
                       ("padded vocabulary", model.padded_vocab)):
        if size % layout.tp:
            fits = [n for n in range(1, size + 1) if size % n == 0][:8]
            raise ConfigError(f"model.{name}={size} is not divisible by parallel.tp={layout.tp}; "
                              f"tp could be one of {fits}")
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        fits = [n for n in range(1, model.heads + 1) if model.heads % n == 0
                and (model.kv_heads % n == 0 or n % model.kv_heads == 0)]
        raise ConfigError(f"model.kv_heads={model.kv_heads} and parallel.tp={layout.tp}: one must divide the other; "
                          f"tp could be one of {fits}")
    if layout.sp and layout.tp == 1:
        raise ConfigError("parallel.sp=true needs parallel.tp > 1: it cuts the sequence over the "
                          "tensor-parallel ranks")
    pieces = layout.cp * (layout.tp if layout.sp else 1)
    if config.data.sequence_length % pieces:
        raise ConfigError(f"data.sequence_length={config.data.sequence_length} is not divisible by {pieces}, the "
                          f"pieces into which parallel.cp={layout.cp} and sp={str(layout.sp).lower()} cut it")
    for name, heads in (("heads", model.heads), ("kv_heads", max(model.kv_heads, layout.tp))):
        if heads // layout.tp % layout.cp:
            raise ConfigError(f"model.{name}: {heads // layout.tp} on each tensor-parallel rank are not divisible by "
                              f"parallel.cp={layout.cp}, which exchanges tokens for heads")
    if parallel.stages is not None and (len(parallel.stages) != layout.pp or sum(parallel.stages) != model.layers
                                        or min(parallel.stages) < 1):
        raise ConfigError(f"parallel.stages={list(parallel.stages)} must be {layout.pp} numbers (parallel.pp) of at "
                          f"least 1 that sum to model.layers={model.layers}")
    if layout.pp > 1 and parallel.zero_stage > 1:
        raise ConfigError(f"parallel.zero_stage={parallel.zero_stage} doesn't go with parallel.pp={layout.pp}: "
                          "the pipeline engine shards optimizer states only (zero_stage 0 or 1)")
    if layout.pp > model.layers:
        raise ConfigError(f"parallel.pp={layout.pp} is more than model.layers={model.layers}: "
                          "each stage needs at least one layer")
    _check_experts(config, layout)
    per_step = train.micro_batch * layout.replicas
    if train.global_batch % per_step:
        near = max(per_step, round(train.global_batch / per_step) * per_step)
        raise ConfigError(f"train.global_batch={train.global_batch} is not divisible by micro_batch="
                          f"{train.micro_batch} x dp={layout.replicas} = {per_step}; the nearest that is: {near}")


def _check_experts(config: Config, layout: Layout) -> None:
    """The part of ``check_layout`` about ``model.moe``."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        if layout.ep > 1:
            raise ConfigError(f"parallel.ep={layout.ep} cuts the experts of model.moe, which is not set: leave ep out")
        return
    if moe.ffn_hidden % layout.tp:
        fits = [n for n in range(1, moe.ffn_hidden + 1) if moe.ffn_hidden % n == 0][:8]
        raise ConfigError(f"model.moe.ffn_hidden={moe.ffn_hidden} is not divisible by parallel.tp={layout.tp}; "
                          f"tp could be one of {fits}")
    if layout.dp % layout.ep or moe.experts % layout.ep:
        fits = [n for n in range(1, layout.dp + 1) if layout.dp % n == 0 and moe.experts % n == 0]
        raise ConfigError(f"parallel.ep={layout.ep} must divide both the {layout.dp} data-parallel ranks "
                          f"(dp={layout.replicas} x cp={layout.cp}) and model.moe.experts={moe.experts}; "
                          f"ep could be one of {fits}")
    if layout.ep > 1 and parallel.zero_stage == 3:
        raise ConfigError(f"parallel.zero_stage=3 doesn't go with parallel.ep={layout.ep}: the engine shards weights "
                          "only of layers that all data-parallel ranks hold; take zero_stage 1 or 2, or ep=1")


def accumulation_steps(config: Config, layout: Layout) -> int:
    """Micro batches that each replica works through per step."""
    return config.train.global_batch // (config.train.micro_batch * layout.replicas)


def stage_bounds(weights: list[int], stages: int) -> list[int]:
    """Cut ``len(weights)`` layers into contiguous stages with the smallest largest sum.

    Returns stages + 1 bounds: stage k holds layers bounds[k] .. bounds[k+1] - 1, at least one each.
    """
    n = len(weights)
    assert stages <= n
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    best = [[prefix[i] for i in range(n + 1)]]
    cuts = []
    for stage in range(1, stages):
        row, cut = [float("inf")] * (n + 1), [0] * (n + 1)
        for i in range(stage + 1, n + 1):
            for j in range(stage, i):
                cost = max(best[-1][j], prefix[i] - prefix[j])
                if cost < row[i]:
                    row[i], cut[i] = cost, j
        best.append(row)
        cuts.append(cut)
    bounds = [n]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return [0, *reversed(bounds)]
