"""Build the part of every rank of a layout on the meta device: shapes without memory, no process started."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from megnorm.config import Config
from megnorm.model.decoder import Layer, decoder_layers
from megnorm.norms import placement_of
from megnorm.parallel.context import WholeContext
from megnorm.parallel.expert import AllExperts
from megnorm.parallel.sharding import sharding_of
from megnorm.parallel.tensor import Alone
from megnorm.plan.layout import Layout, check_layout, make_layout
from megnorm.plan.memory import Memory, Shape, stage_memory, stage_parameters
from megnorm.plan.page import size_text
from megnorm.plan.stages import block_bounds


class Imagined(Alone):
    """A rank of a tensor-parallel group that does not exist: parameters are cut for it, nothing is exchanged."""

    def __init__(self, rank: int, size: int, sliced: bool):
        self.rank, self.size, self.sliced = rank, size, sliced


class ImaginedContext(WholeContext):
    """The same of a context-parallel group."""

    def __init__(self, size: int):
        self.size = size


class ImaginedExperts(AllExperts):
    """The same of an expert-parallel group."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@dataclass(frozen=True)
class StageReport:
    """A pipeline stage. parameters: of one rank. whole: of the stage, each tensor once. by_role: of one rank."""

    stage: int
    layers: list[str]
    ranks: int
    parameters: int
    whole: int
    by_role: dict[str, int]
    memory: Memory


def run_dry(config: Config, world: int, device: str = "cuda") -> tuple[Layout, list[StageReport]]:
    """Build what each of ``world`` ranks would hold. Raises ConfigError when the layout can't be; AssertionError
    when the ranks' parts don't make up the whole model or the plan counts otherwise."""
    layout = make_layout(config, world)
    check_layout(config, layout)
    shape = Shape(config)
    reports = [_stage(config, layout, stage, device, shape) for stage in range(layout.pp)]
    return layout, reports


def _stage(config: Config, layout: Layout, stage: int, device: str, shape: Shape) -> StageReport:
    sizes, whole, names, roles = set(), 0, [], {}
    for rank, ep in product(range(layout.tp), range(layout.ep)):
        parts = list(_parts(config, layout, stage, rank, ep))
        names = [layer.name for layer, _ in parts]
        parameters = _distinct([parameter for _, module in parts for parameter in module.parameters()])
        sizes.add(sum(parameter.numel() for parameter in parameters))
        whole += sum(p.numel() for p in parameters if sharding_of(p).first and (sharding_of(p).experts or ep == 0))
        roles = {role: sum(p.numel() for p in parameters if sharding_of(p).role == role)
                 for role in ("embedding", "matrix", "norm", "bias")}
    planned = stage_parameters(config, layout, stage, shape).total
    assert sizes == {planned}, f"stage {stage}: built {sizes}, planned {planned} parameters a rank"
    return StageReport(stage, names, layout.dp * layout.tp, planned, whole, roles,
                       stage_memory(config, layout, stage, device, shape))


def _parts(config: Config, layout: Layout, stage: int, rank: int, ep: int) -> Iterator[tuple[Layer, nn.Module]]:
    """The layers of a stage, as a tensor- and expert-parallel rank would build them."""
    layers = decoder_layers(config.model, placement_of(config.model), config.parallel.recompute,
                            Imagined(rank, layout.tp, layout.sp), ImaginedContext(layout.cp),
                            ep=ImaginedExperts(ep, layout.ep))
    names = [layer.name for layer in layers]
    blocks = block_bounds(config, layout.pp)
    bounds = [0, *(names.index(f"layers.{block}") for block in blocks[1:-1]), len(layers)]
    with torch.device("meta"):
        for layer in layers[bounds[stage]:bounds[stage + 1]]:
            yield layer, layer.build()


def _distinct(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Each logical tensor once: a tied output on the embedding's own stage is the same tensor."""
    return list({sharding_of(parameter).name: parameter for parameter in parameters}.values())


def report_lines(config: Config, layout: Layout, reports: list[StageReport]) -> list[str]:
    """A table of the stages."""
    parts = len(reports) * layout.tp * layout.ep
    lines = [f"{layout.world:,} ranks, {layout}: {parts:,} different parts, built on the meta device"]
    rows = [("stage", "layers", "ranks", "parameters a rank", "matrices", "embedding", "norms", "biases",
             "whole stage", "peak memory")]
    for report in reports:
        roles = report.by_role
        ends = report.layers[0] if len(report.layers) == 1 else f"{report.layers[0]} .. {report.layers[-1]}"
        rows.append((str(report.stage), ends, f"{report.ranks:,}", f"{report.parameters:,}",
                     *(f"{roles[role]:,}" for role in ("matrix", "embedding", "norm", "bias")), f"{report.whole:,}",
                     size_text(report.memory.total)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    total = sum(report.whole for report in reports)
    copy = config.model.padded_vocab * config.model.hidden if config.model.tie_embeddings and layout.pp > 1 else 0
    note = f", and {copy:,} in the last stage's copy of the tied embedding" if copy else ""
    return [*lines, f"all stages: {total - copy:,} parameters{note}"]
