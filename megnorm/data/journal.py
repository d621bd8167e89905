"""The record of an unfinished run, by which the next one continues: JSON lines, the last whole one counts."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from megnorm.data.errors import DataError
from megnorm.data.files import sync_file

# Worker processes hold the file with their parent, and look for it every second.
_WAIT_SECONDS = 3.0


class Journal:
    """`path` holds the identity of a run, then its states. A context manager; only one process may hold it.

    `states` are those of an interrupted run with the same identity, oldest first; of a run with another
    identity nothing is kept, and `foreign` says so. The file is removed by `remove`, or when the block ends
    with a DataError; else it stays for the next run.
    """

    def __init__(self, path: str | Path, identity: dict[str, Any]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "ab+")
        try:
            _lock(self._file)
        except OSError:
            self._file.close()
            raise DataError(
                f"{path} is held by another run with the same output; wait for it or end it"
            ) from None
        self._file.seek(0)
        lines = _whole_lines(self._file.read())
        self.states: list[dict[str, Any]] = lines[1:] if lines[:1] == [identity] else []
        self.foreign = bool(lines) and lines[0] != identity
        self._file.truncate(0)
        for line in (identity, *self.states):
            self._append(line)

    def add(self, state: dict[str, Any]) -> None:
        """Makes a state durable. What it describes must be durable already."""
        self._append(state)

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        sync_file(self._file)

    def remove(self) -> None:
        """The run is finished."""
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, DataError):
            self.remove()
        self._file.close()


def _whole_lines(data: bytes) -> list[Any]:
    out = []
    for line in data.split(b"\n")[:-1]:
        try:
            out.append(json.loads(line))
        except ValueError:
            break
    return out


def _lock(file: Any) -> None:
    """Raises OSError when another process holds the file for longer than the workers of a killed run live."""
    with contextlib.suppress(ImportError):  # Windows has no fcntl
        import fcntl

        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
