"""Records that give no document."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from megnorm.data.errors import DataError
from megnorm.data.files import sync_file, sync_folder
from megnorm.data.readers import BadLine

_SHOWN = 10


class RejectedRecords:
    """The first bad record ends the run, or all are kept in `<prefix>.rejected.jsonl`. A context manager."""

    def __init__(self, prefix: str, skip: bool) -> None:
        self.path = f"{prefix}.rejected.jsonl"
        self._temporary = Path(f"{self.path}.part")
        self._skip = skip
        self._shown = 0
        self._file = open(self._temporary, "ab")

    @property
    def size(self) -> int:
        """Bytes kept so far."""
        return self._file.tell()

    def restore(self, size: int) -> bool:
        """Goes back to a state of an interrupted run; False where it isn't there."""
        if os.fstat(self._file.fileno()).st_size < size:
            return False
        self._file.truncate(size)
        self._file.seek(size)
        return True

    def sync(self) -> None:
        """Makes durable what was added so far."""
        sync_file(self._file)

    def add(self, bad: Sequence[BadLine]) -> None:
        """Takes the bad records of a chunk. Raises DataError where none is to be skipped."""
        if bad and not self._skip:
            raise DataError(f"{bad[0]}; --on-error skip leaves such records out")
        for line in bad:
            self._file.write(line.data + b"\n")
            if self._shown < _SHOWN:
                print(f"skipped {line}", file=sys.stderr)
            self._shown += 1

    def __enter__(self) -> RejectedRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.sync()
            Path(self.path).unlink(missing_ok=True)  # of an earlier run
            if self._file.tell():
                os.replace(self._temporary, self.path)
                sync_folder(Path(self.path).parent)
        self._file.close()
        if kind is None or issubclass(kind, DataError):
            self._temporary.unlink(missing_ok=True)
