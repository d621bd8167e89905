"""Several token budgets from one stable run: warm-up and plateau are computed once, each adds its decay.

With schedule.kind ``wsd`` the rate up to the decay does not depend on the duration, and the order of samples
never does: the longer run passes exactly through the states that the shorter ones decay from. For budgets
T1 < T2 < ... < TK the trunk runs to T1 - decay, then on to T2 - decay, and so on; each stop is a cell of its
own with a checkpoint at its end. The longest budget goes on from the last stop without one of its own.
"""

import json
from dataclasses import replace
from math import floor
from pathlib import Path

from megnorm.config import Config
from megnorm.plan.schedule import decay_steps, warmup_steps
from megnorm.scaling.cells import Cell
from megnorm.scaling.errors import ScalingError

Planned = list[tuple[Cell, Config]]


def with_trunks(planned: Planned, origin: str) -> Planned:
    """The cells with their trunks before them. Raises ScalingError when there is nothing to share."""
    families: dict[str, Planned] = {}
    for cell, config in planned:
        families.setdefault(_family(config), []).append((cell, config))
    if all(len(family) == 1 for family in families.values()):
        raise ScalingError(
            f"{origin}: share_trunk finds no two cells that differ only in train.tokens (or steps) and "
            "the decay; give warmup_steps, not a share, and an axis over the duration"
        )
    out = []
    for family in families.values():
        out += _family_with_trunk(sorted(family, key=lambda item: item[0].steps), origin)
    return out


def _family(config: Config) -> str:
    """What cells of one trunk have in common: all but the duration, the decay and the folder."""
    if config.schedule.kind != "wsd":
        raise ScalingError(
            f"share_trunk needs schedule.kind=wsd, not {config.schedule.kind}: only its rate does not "
            "depend on the duration"
        )
    raw = config.model_dump(mode="json")
    raw["run_dir"] = raw["train"]["steps"] = raw["train"]["tokens"] = None
    raw["schedule"]["decay_steps"] = raw["schedule"]["decay_tokens"] = None
    return json.dumps(raw, sort_keys=True)


def _family_with_trunk(family: Planned, origin: str) -> Planned:
    out: Planned = []
    parent: Cell | None = None
    for number, (cell, config) in enumerate(family):
        stop = floor(cell.steps - decay_steps(config))
        if parent is not None and stop < parent.steps:
            raise ScalingError(
                f"{origin}: cell {cell.name} decays from step {stop}, before step {parent.steps} where a "
                "shorter one does: shorten its decay"
            )
        if number < len(family) - 1 and (parent is None or stop > parent.steps):
            if stop <= warmup_steps(config):
                raise ScalingError(
                    f"{origin}: cell {cell.name} decays from step {stop}, in its warm-up of "
                    f"{warmup_steps(config):g}: there is no trunk to share"
                )
            out.append(_stop(cell, config, stop, parent))
            parent = out[-1][0]
        first = parent.steps if parent else 0
        out.append((replace(cell, parent=parent.folder if parent else None, first_step=first), config))
    return out


def _stop(cell: Cell, config: Config, steps: int, parent: Cell | None) -> tuple[Cell, Config]:
    """The trunk up to ``steps``: the same run at a constant rate, saved at its end."""
    folder = str(Path(cell.folder).with_name(f"{cell.name}.trunk"))
    schedule = config.schedule.model_copy(update={"kind": "constant", "decay_steps": None, "decay_tokens": None})
    trunk = config.model_copy(
        update={
            "run_dir": folder,
            "schedule": schedule,
            "train": config.train.model_copy(update={"steps": steps, "tokens": None}),
            "checkpoint": config.checkpoint.model_copy(update={"save_at_end": True}),
        }
    )
    tokens = steps * config.tokens_per_step
    return replace(
        cell,
        folder=folder,
        steps=steps,
        tokens=tokens,
        trunk=True,
        first_step=parent.steps if parent else 0,
        parent=parent.folder if parent else None,
    ), trunk
