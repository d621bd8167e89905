"""The loss over the validation set: one number, whatever the layout and the micro batch."""

from pathlib import Path

import pytest
from small_run import SAVED, raw_config, rows, write_config

from megnorm.testing.ranks import run_ranks


def validation_loss(path: str, checkpoint: str) -> float:
    """On every rank: the loss of a checkpoint."""
    import torch
    import torch.distributed as dist

    from megnorm.engine.start import start
    from megnorm.loop import StopRequest, evaluate
    from megnorm.parallel.groups import make_groups
    from megnorm.prepare import prepare
    from megnorm.worker import open_run

    prepared = prepare(path, [], dist.get_world_size(), checkpoint)
    start(torch.device("cpu"), 60)
    groups = make_groups(prepared.layout, torch.device("cpu"))
    return evaluate(open_run(prepared, checkpoint, groups, StopRequest()), "valid")


@pytest.mark.parametrize(
    ("world", "micro_batch", "changes"),
    [
        (1, 1, {}),
        (1, 4, {}),
        (2, 1, {}),
        (2, 4, {}),
        (2, 2, {"parallel__tp": 2}),
        (2, 2, {"parallel__pp": 2}),
        (2, 1, {"parallel__zero_stage": 3}),
    ],
)
def test_it_is_the_same_on_every_layout(
    world: int, micro_batch: int, changes: dict, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Seven samples: no micro batch but 1 divides them, nor do two replicas."""
    raw = raw_config(
        data, tmp_path / "run", train__micro_batch=micro_batch, observe__tensorboard=False, **changes
    )
    path = str(write_config(tmp_path / "config.yaml", raw))
    checkpoint = str(undisturbed / "checkpoints" / f"step-{SAVED:08d}")
    (expected,) = [row["loss"] for row in rows(undisturbed) if row["step"] == SAVED and "split" in row]
    assert run_ranks(validation_loss, world, path, checkpoint) == pytest.approx([expected] * world, abs=1e-6)
    assert rows(tmp_path / "run") == [
        {"step": SAVED, "split": "valid", "loss": pytest.approx(expected, abs=1e-6)}
    ]
