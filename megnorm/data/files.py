"""Files that survive a crash of the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO


def sync_file(file: IO) -> None:
    """Makes what was written to a file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
