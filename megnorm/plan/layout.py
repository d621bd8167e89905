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

    sp: Megatron's sequence parallelism, the hidden stream cut over the tensor-parallel ranks.
    """

    pp: int
    dp: int
    tp: int
    sp: bool = False

    @property
    def world(self) -> int:
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

    def __str__(self) -> str:
        return f"TP={self.tp}{' with SP' if self.sp else ''} PP={self.pp} DP={self.dp}"


def make_layout(config: Config, world: int) -> Layout:
    """The layout of a run on ``world`` ranks. Raises ConfigError when they don't fit, with what would."""
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.pp
    if world % model_ranks:
        fits = [n for n in range(model_ranks, 4 * world + model_ranks, model_ranks)][:3]
        raise ConfigError(f"a world of {world} processes doesn't fit parallel.tp={parallel.tp} x "
                          f"parallel.pp={parallel.pp}: it must be a multiple of {model_ranks}, such as {fits}")
    dp = world // model_ranks
    if parallel.dp not in (None, dp):
        raise ConfigError(f"parallel.dp={parallel.dp} doesn't fit: {world} processes / (tp={parallel.tp} x "
                          f"pp={parallel.pp}) = {dp}; leave dp out, or start "
                          f"{model_ranks * parallel.dp} processes")
    return Layout(pp=parallel.pp, dp=dp, tp=parallel.tp, sp=parallel.sp)


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
    if layout.sp and config.data.sequence_length % layout.tp:
        raise ConfigError(f"data.sequence_length={config.data.sequence_length} is not divisible by parallel.tp="
                          f"{layout.tp}, over which parallel.sp=true cuts it")
    if layout.pp > 1 and parallel.zero_stage > 1:
        raise ConfigError(f"parallel.zero_stage={parallel.zero_stage} doesn't go with parallel.pp={layout.pp}: "
                          "the pipeline engine shards optimizer states only (zero_stage 0 or 1)")
    if layout.pp > model.layers:
        raise ConfigError(f"parallel.pp={layout.pp} is more than model.layers={model.layers}: "
                          "each stage needs at least one layer")
    per_step = train.micro_batch * layout.dp
    if train.global_batch % per_step:
        near = max(per_step, round(train.global_batch / per_step) * per_step)
        raise ConfigError(f"train.global_batch={train.global_batch} is not divisible by micro_batch="
                          f"{train.micro_batch} x dp={layout.dp} = {per_step}; the nearest that is: {near}")


def accumulation_steps(config: Config, layout: Layout) -> int:
    """Micro batches that each replica works through per step."""
    return config.train.global_batch // (config.train.micro_batch * layout.dp)


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
