"""The same rows as in metrics.jsonl, as TensorBoard curves over steps.

Written here rather than by torch's SummaryWriter, whose thread loses a full device's error in a traceback.
"""

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from megnorm.config import Config
from megnorm.observe.metrics import NullSink, append

TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens_per_second": "perf/tokens_per_second",
    "mfu": "perf/mfu",
    "z_loss": "train/z_loss",
    "router_aux_loss": "train/router_aux_loss",
    "router_z_loss": "train/router_z_loss",
}


class TensorBoard:
    """Event files under ``<run_dir>/tensorboard``; points of earlier attempts beyond ``start_step`` go."""

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        folder = Path(run_dir) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, and wants "tfevents" in them.
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb", buffering=0)
        self._write(file_version="brain.Event:2")
        self._write(step=start_step + 1 if start_step else 0, session_log=SessionLog(status=SessionLog.START))

    def step(self, row: dict) -> None:
        for name, tag in TAGS.items():
            if row.get(name) is None:  # no MFU on a device whose peak is unknown, no z-loss without its weight
                continue
            self._scalar(tag, row[name], row["step"])
        for section in ("probe", "routers"):
            for name, values in row.get(section, {}).items():
                for part, value in values.items():
                    for tag, number in _one_by_one(f"{section}/{name}/{part}", value):
                        self._scalar(tag, number, row["step"])

    def evaluation(self, step: int, split: str, loss: float) -> None:
        self._scalar(f"{split}/loss", loss, step)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _scalar(self, tag: str, value: float, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def _write(self, **content: Any) -> None:
        """One event as a record: length and content, each with a checksum."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
        append(self._file, record.getvalue())


def _one_by_one(tag: str, value: float | list[float] | None) -> list[tuple[str, float]]:
    """A number, or numbers where there are several; what is not finite has no point."""
    several = {f"{tag}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {tag: value}
    return [(tag, number) for tag, number in several.items() if number is not None]


def open_tensorboard(config: Config, start_step: int = 0) -> TensorBoard | NullSink:
    """The run's TensorBoard, or nothing where ``observe.tensorboard`` is false."""
    return TensorBoard(config.run_dir, start_step) if config.observe.tensorboard else NullSink()
