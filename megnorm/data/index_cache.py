"""Arrays kept on disk under the digest of what they were computed from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 1 << 22


def array_digest(*arrays: np.ndarray) -> str:
    """Hex digest of the contents of arrays."""
    out = hashlib.blake2b(digest_size=20)
    for array in arrays:
        out.update(f"{array.dtype.str}{array.shape}".encode())
        for a in range(0, len(array), _BLOCK):
            out.update(np.ascontiguousarray(array[a : a + _BLOCK]).data)
    return out.hexdigest()


class IndexCache:
    """A folder of arrays; without one, arrays are computed and stay in memory.

    A file's name is the digest of its key, which must say everything that the array depends on, so a file is
    never stale and two jobs never disagree. Files appear complete or not at all. Processes of one machine
    wait for each other so that one of them computes; others, of machines that share the folder or don't, at
    worst compute the same array again. A folder that can't be written is read all the same.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = Path(folder) if folder else None
        self.keeps = self._folder is not None

    def get(self, key: dict[str, Any], build: Callable[[], np.ndarray]) -> np.ndarray:
        """The array of a key, read-only: mapped from its file, or computed by `build` and written."""
        if self._folder is None:
            return build()
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = self._folder / f"{name}.npy"
        found = _map(path)
        if found is not None:
            return found
        with _lock(path.with_suffix(".lock")):
            found = _map(path)  # another process was faster
            if found is not None:
                return found
            array = build()
            with contextlib.suppress(OSError):  # full, or read-only: the run goes on without
                _write(path, array)
                return _map(path, array)
        return array


def _map(path: Path, default: np.ndarray | None = None) -> np.ndarray | None:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # absent, or not written by us
        return default


def _write(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of this machine, where the file system can; the system frees it at a death."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")
    except (ImportError, OSError):
        yield
        return
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)
