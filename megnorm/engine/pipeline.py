"""A pipeline stage for DeepSpeed's 1F1B engine, cut where the plan says."""

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megnorm.engine.start import quiet
from megnorm.plan.layout import Layout


class Stage(PipelineModule):
    """This rank's stage of a list of layers; ``bounds[k] .. bounds[k+1]`` are the layers of stage k."""

    def __init__(self, specs: list, bounds: Sequence[int], layout: Layout, loss: Callable):
        self.bounds = list(bounds)
        topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
        super().__init__(specs, topology=topology, loss_fn=loss)

    def _partition_layers(self, method: str = "given") -> None:
        self.parts = self.bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.bounds[stage], stop=self.bounds[stage + 1])


def make_stage(layers: Sequence[Any], bounds: Sequence[int], tied_forward: Callable, layout: Layout,
               loss: Callable) -> Stage:
    """Build this rank's layers. A layer has ``build`` and ``tied``; the last tied one runs ``tied_forward``
    (module, x) on a copy of the first one's module, whose gradients the engine sums."""
    specs = [_spec(layer, tied_forward if number else None) for number, layer in enumerate(layers)]
    with quiet():
        return Stage(specs, bounds, layout, loss)


def _spec(layer: Any, tied_forward: Callable | None) -> LayerSpec:
    """DeepSpeed's description of a layer, built by the layer's own function."""
    spec = (TiedLayerSpec("embedding", nn.Module, forward_fn=tied_forward) if layer.tied else LayerSpec(nn.Module))
    spec.build = layer.build
    return spec
