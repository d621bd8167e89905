"""What to read: paths, patterns and folders to files, files to pieces, pieces to machines."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megnorm.data.errors import DataError

FORMATS = ("auto", "jsonl", "text", "parquet", "arrow")
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED = (".gz", ".zst")


@dataclass(frozen=True)
class Piece:
    """A file or a part of one, read in one go.

    `start` and `stop` count bytes for JSONL (the lines that begin in between), row groups for Parquet; `stop`
    None is the end. `disk_bytes` is what the piece stands for in the progress.
    """

    path: str
    format: str
    start: int = 0
    stop: int | None = None
    disk_bytes: int = 0


def expand_inputs(inputs: Sequence[str], format: str = "auto") -> list[Path]:
    """Files of paths, glob patterns and folders, in the order given, matches and folders sorted.

    A folder stands for all files below it, a folder of Hugging Face datasets (`save_to_disk`) for its arrow
    files. Raises DataError for what doesn't exist or matches nothing, a foreign file in a folder, a file
    named twice.
    """
    files: list[Path] = []
    for entry in inputs:
        if os.path.exists(entry):
            found = [entry]
        else:
            found = sorted(glob.glob(entry, recursive=True))
            if not found:
                raise DataError(f"{entry}: no such file, and nothing matches it as a pattern")
        for name in found:
            files += _folder_files(Path(name), format) if os.path.isdir(name) else [Path(name)]
    seen: set[Path] = set()
    for path in files:
        if path in seen:
            raise DataError(f"{path}: given twice")
        seen.add(path)
    return files


def _folder_files(folder: Path, format: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        parts = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(f"{folder}: holds the datasets {', '.join(parts)}; name one, as {folder}/{parts[0]}")
    if (folder / "state.json").is_file():
        return _datasets_files(folder)
    files = []
    for parent, names, entries in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        files += [Path(parent) / entry for entry in sorted(entries) if not entry.startswith(".")]
    if not files:
        raise DataError(f"{folder}: is a folder without files")
    for path in files:
        if format == "auto" and _suffix_format(path) is None:
            raise DataError(
                f"{path}: the suffix says no format; give the files of {folder} as a pattern, or "
                f"--input-format text to take every file as a document"
            )
    return files


def _datasets_files(folder: Path) -> list[Path]:
    """The arrow files of a dataset that Hugging Face's datasets saved, in its order."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        chosen = state.get("_indices_files")
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{folder}/state.json: not written by datasets' save_to_disk") from None
    if chosen:
        raise DataError(f"{folder}: an index chooses its rows; call flatten_indices() and save it again")
    if any(os.path.basename(name) != name for name in names):
        raise DataError(f"{folder}/state.json: names a file outside of its folder")
    return [folder / name for name in names]


def _suffix_format(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def file_format(path: Path, format: str = "auto") -> str:
    """The format asked for, or by the suffix; JSONL where the suffix says nothing."""
    return format if format != "auto" else _suffix_format(path) or "jsonl"


def plan_pieces(files: Sequence[Path], format: str = "auto", rank: int = 0, world: int = 1) -> list[Piece]:
    """The pieces that machine `rank` of `world` reads: a contiguous share of the inputs by bytes on disk.

    The pieces of rank 0, 1, ... one behind the other are all documents in their order. JSONL files are cut
    between lines, Parquet files between row groups, others not at all.
    """
    if not 0 <= rank < world:
        raise DataError(f"--rank {rank} of --world-size {world}, must be 0 to {world - 1}")
    sizes = [file.stat().st_size for file in files]
    total, at = sum(sizes), 0
    first, last = total * rank // world, total * (rank + 1) // world
    if rank == world - 1:
        last += 1  # empty files at the end
    pieces: list[Piece] = []
    for file, size in zip(files, sizes, strict=True):
        kind = file_format(file, format)
        if world == 1:
            pieces.append(Piece(str(file), kind, disk_bytes=size))
        elif kind == "jsonl" and file.suffix not in _PACKED:
            a, b = max(first - at, 0), min(last - at, size)
            if a < b or (size == 0 and first <= at < last):
                pieces.append(Piece(str(file), kind, a, b, b - a))
        elif kind == "parquet":
            pieces += _row_groups(file, size, first - at, last - at)
        elif first <= at < last:
            pieces.append(Piece(str(file), kind, disk_bytes=size))
        at += size
    return pieces


def _row_groups(file: Path, size: int, first: int, last: int) -> list[Piece]:
    """The row groups of a file whose share of its bytes begins in [first, last)."""
    from megnorm.data.readers import open_parquet

    count = open_parquet(file).num_row_groups
    mine = [group for group in range(count) if first <= size * group // count < last]
    if not mine:
        return []
    return [Piece(str(file), "parquet", mine[0], mine[-1] + 1, size * len(mine) // count)]
