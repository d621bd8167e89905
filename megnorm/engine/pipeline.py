"""A pipeline stage for DeepSpeed's 1F1B engine, cut where the plan says."""

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megnorm.engine.start import quiet
from megnorm.plan.layout import Layout


class Stage(PipelineModule):
    """This rank's stage of a list of layers; ``bounds[k] .. bounds[k+1]`` are the layers of stage k.

    ``through`` (layers, inputs) gives the stream after the layers. Inputs are the stream, or a tuple of it and of
    integers about the rows, which every stage but the last hands on.
    """

    def __init__(self, specs: list, bounds: Sequence[int], through: Callable, layout: Layout, loss: Callable):
        self.bounds, self.through = list(bounds), through
        topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
        super().__init__(specs, topology=topology, loss_fn=loss)

    def _partition_layers(self, method: str = "given") -> None:
        self.parts = self.bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.bounds[stage], stop=self.bounds[stage + 1])

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        x = self.through(self.forward_funcs, inputs)
        is_last = self.stage_id == self.num_stages - 1
        return (x, *inputs[1:]) if isinstance(inputs, tuple) and not is_last else x


def make_stage(layers: Sequence[Any], bounds: Sequence[int], through: Callable, tied_forward: Callable, layout: Layout,
               loss: Callable) -> Stage:
    """Build this rank's layers. A layer has ``build`` and ``tied``; the last tied one runs ``tied_forward``
    (module, x) on a copy of the first one's module, whose gradients the engine sums."""
    specs = [_spec(layer, tied_forward if number else None) for number, layer in enumerate(layers)]
    with quiet():
        return Stage(specs, bounds, through, layout, loss)


def _spec(layer: Any, tied_forward: Callable | None) -> LayerSpec:
    """DeepSpeed's description of a layer, built by the layer's own function."""
    spec = (TiedLayerSpec("embedding", nn.Module, forward_fn=tied_forward) if layer.tied else LayerSpec(nn.Module))
    spec.build = layer.build
    return spec
