"""Probes of single steps: the gradient's norm by layer and part, the residual stream's size by depth.

The same on every layout: norms of the whole gradient, each logical element once, mean over the global batch,
before clipping; root mean squares over all tokens of the global batch.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megnorm.parallel.groups import Groups

PART = re.compile(r"layers\.\d+\.(attention|ffn)|[^.]+")
INPUT = "input"


def part_of_model(name: str) -> str:
    """"layers.3.attention.q_norm.gain" -> "layers.3.attention"; outside of blocks the first word."""
    return PART.match(name)[0]


def in_order(parts: Iterable[str]) -> list[str]:
    """As they follow in the model: what stands before the blocks, the blocks by number, what comes after."""
    def place(part: str) -> tuple[int, int, str]:
        if part.startswith("layers."):
            return 1, int(part.split(".")[1]), part
        return (0 if part.startswith("embed") or part == INPUT else 2), 0, part

    return sorted(set(parts), key=place)


class Probes:
    """Looks into the first step, and into each whose number ``every`` divides; 0: into none.

    streams: in a block's output [b, s, streams * d]. blocks: this rank's, by global number from 0. names: of this
    rank's parameters. shares: this rank's shares of the squared norms of the gradients
    by parameter, valid when ``gradients_are_whole`` is called. Made by all ranks together.
    """

    def __init__(self, every: int, streams: int, blocks: Mapping[int, nn.Module], names: Iterable[str],
                 shares: Callable[[], dict[str, Tensor]], groups: Groups):
        self.every, self.streams, self.blocks, self.shares = every, streams, blocks, shares
        self.device, self.active, self.hooks = groups.device, False, []
        self.gradients: dict[str, Tensor] = {}
        self.squares: dict[str, list[Tensor]] = {}
        self.parts = _of_all_ranks({part_of_model(name) for name in names}) if every else []
        self.depths = _of_all_ranks({INPUT, *(f"layers.{number}" for number in blocks)}) if every else []

    def begin(self, step: int) -> None:
        """Before training step ``step``, from 1."""
        self.active = self.every > 0 and (step == 1 or step % self.every == 0)
        if not self.active:
            return
        for number, block in self.blocks.items():
            self.hooks.append(block.register_forward_hook(
                lambda _block, _args, output, depth=f"layers.{number}": self._see(depth, output)))
        if 0 in self.blocks:
            self.hooks.append(self.blocks[0].register_forward_pre_hook(
                lambda _block, args: self._see(INPUT, args[0])))

    def gradients_are_whole(self) -> None:
        """Within a step: accumulated over micro batches, reduced over replicas, not yet clipped."""
        if self.active:
            self.gradients = self.shares()

    def end(self) -> dict[str, dict] | None:
        """What was seen in the step, on every rank; None where no probe was due. A collective call.

        grad_norm: by part ("embedding", "layers.0.attention", "layers.0.ffn", ...). residual_rms: of the stream
        that enters block 0 ("input") and that leaves each ("layers.0", ...); of two streams a list. A number that
        is not finite is None.
        """
        if not self.active:
            return None
        self.active = False
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        found = {"grad_norm": self._grad_norms(), "residual_rms": self._stream_sizes()}
        self.gradients, self.squares = {}, {}
        return found

    def _see(self, depth: str, output: Tensor) -> None:
        """Add a micro batch's squares; a block that is recomputed may come twice, in sum and count alike.
        What passes without gradients is an evaluation."""
        if not torch.is_grad_enabled():
            return
        with torch.no_grad():
            streams = output.detach().unflatten(-1, (self.streams, -1))
            sizes = torch.linalg.vector_norm(streams, dim=(0, 1, 3), dtype=torch.float32).double().square()
            count = sizes.new_tensor([streams.numel() // self.streams])
            self.squares.setdefault(depth, []).append(torch.cat((sizes, count)))

    def _grad_norms(self) -> dict[str, float | None]:
        sums = torch.zeros(len(self.parts), dtype=torch.float64, device=self.device)
        for name, square in self.gradients.items():
            sums[self.parts.index(part_of_model(name))] += square
        dist.all_reduce(sums)
        return dict(zip(self.parts, map(_number, sums.sqrt().tolist()), strict=True))

    def _stream_sizes(self) -> dict[str, float | list[float | None] | None]:
        sums = torch.zeros(len(self.depths), self.streams + 1, dtype=torch.float64, device=self.device)
        for depth, seen in self.squares.items():
            sums[self.depths.index(depth)] += torch.stack(seen).sum(0)
        dist.all_reduce(sums)
        sizes = [[_number(size) for size in row] for row in (sums[:, :-1] / sums[:, -1:]).sqrt().tolist()]
        return {depth: row[0] if self.streams == 1 else row for depth, row in zip(self.depths, sizes, strict=True)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _of_all_ranks(parts: set[str]) -> list[str]:
    """The same list everywhere; pipeline stages know other parts."""
    everywhere: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, parts)
    return in_order(set().union(*everywhere))
