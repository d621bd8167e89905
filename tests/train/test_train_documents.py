"""The command with rows of several documents: trained on one layout, evaluated alike on another."""

from pathlib import Path

import numpy as np
import pytest
from small_run import VOCAB, raw_config, rows, run, write_config
from test_train_evaluation import validation_loss

from megnorm.checkpoint.storage import checkpoints_dir, step_name
from megnorm.data.indexed import IndexedWriter, best_dtype
from megnorm.testing.ranks import run_ranks

STEPS = 4
ASKED = {"data__mask_documents": True, "data__reset_positions": True, "data__mask_document_ends": True}


@pytest.fixture
def short_documents(tmp_path: Path) -> Path:
    """Each document repeats a few ids of its own, and about four make a row."""
    stream = np.random.Generator(np.random.Philox(key=3))
    for split, documents in (("train", 200), ("valid", 40)):
        with IndexedWriter(tmp_path / split, best_dtype(VOCAB)) as writer:
            for _ in range(documents):
                own = stream.integers(0, VOCAB, 3)
                writer.add_document(own[stream.integers(0, 3, stream.integers(2, 14))].tolist())
    return tmp_path


def test_documents_from_the_command(short_documents: Path) -> None:
    """The loss differs from that of the same weights without the mask, so it was honoured."""
    run_dir, path = short_documents / "run", short_documents / "config.yaml"
    changes = {"train__steps": STEPS, "train__eval_every": STEPS, "train__micro_batch": 2,
               "schedule__warmup_steps": 1, "observe__tensorboard": False}
    write_config(path, raw_config(short_documents, run_dir, parallel__pp=2, **changes, **ASKED))
    command = run(path, nproc=2)
    assert command.code == 0, command.errors
    (trained,) = [row["loss"] for row in rows(run_dir) if "split" in row]
    checkpoint = str(checkpoints_dir(run_dir) / step_name(STEPS))

    def loss(world: int, name: str, **others: object) -> list[float]:
        raw = raw_config(short_documents, short_documents / name, **{**changes, "train__micro_batch": 1, **others})
        return run_ranks(validation_loss, world, str(write_config(short_documents / f"{name}.yaml", raw)), checkpoint)

    assert loss(2, "parts", parallel__cp=2, **ASKED) == pytest.approx([trained] * 2, abs=1e-6)
    (ignored,) = loss(1, "ignored", data__mask_document_ends=True)
    assert abs(ignored - trained) > 1e-4
