"""The same rows as in metrics.jsonl, as TensorBoard curves over steps."""

from pathlib import Path

from megnorm.config import Config
from megnorm.observe.metrics import NullSink

TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens_per_second": "perf/tokens_per_second",
    "mfu": "perf/mfu",
    "z_loss": "train/z_loss",
}


class TensorBoard:
    """Event files under ``<run_dir>/tensorboard``; points of earlier attempts beyond ``start_step`` go."""

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = start_step + 1 if start_step else 0
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)

    def step(self, row: dict) -> None:
        for name, tag in TAGS.items():
            if row.get(name) is None:  # no MFU on a device whose peak is unknown, no z-loss without its weight
                continue
            self._writer.add_scalar(tag, row[name], row["step"])

    def evaluation(self, step: int, split: str, loss: float) -> None:
        self._writer.add_scalar(f"{split}/loss", loss, step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_tensorboard(config: Config, start_step: int = 0) -> TensorBoard | NullSink:
    """The run's TensorBoard, or nothing where ``observe.tensorboard`` is false."""
    return TensorBoard(config.run_dir, start_step) if config.observe.tensorboard else NullSink()
