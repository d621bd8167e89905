"""A corpus that every machine has: the Python standard library's own sources."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megnorm.data.errors import DataError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class CorpusReport:
    """Files and UTF-8 bytes of text written to each part, and the files passed over."""

    files: dict[str, int] = field(default_factory=lambda: {"train": 0, "valid": 0})
    text_bytes: dict[str, int] = field(default_factory=lambda: {"train": 0, "valid": 0})
    undecodable: int = 0


def stdlib_files(root: Path) -> Iterator[Path]:
    """Python sources below `root` in sorted order, installed packages left out."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED_FOLDERS)
        for file in sorted(files):
            if file.endswith(".py"):
                yield Path(folder) / file


def is_validation(path: str, every: int) -> bool:
    """Whether a file belongs to the validation part: about one in `every`, by a hash of its path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % every == 0


def write_stdlib_corpus(output: Path, validation_every: int = 32, root: Path | None = None) -> CorpusReport:
    """Writes `train.jsonl` and `valid.jsonl` ({"text", "path"} a line) into the folder `output`.

    `root` defaults to the running interpreter's standard library. Files that aren't UTF-8 are counted and
    left out. The files appear under their names only when complete.
    """
    import orjson

    if validation_every < 2:
        raise DataError(f"--validation-every {validation_every}, must be at least 2")
    root = root or Path(sysconfig.get_paths()["stdlib"])
    output.mkdir(parents=True, exist_ok=True)
    report = CorpusReport()
    parts = {part: output / f"{part}.jsonl" for part in ("train", "valid")}
    temporary = {part: path.with_name(f"{path.name}.{os.getpid()}.tmp") for part, path in parts.items()}
    try:
        with open(temporary["train"], "wb") as train, open(temporary["valid"], "wb") as valid:
            for file in stdlib_files(root):
                raw = file.read_bytes()
                try:
                    text = raw.decode()
                except UnicodeDecodeError:
                    report.undecodable += 1
                    continue
                name = file.relative_to(root).as_posix()
                part, sink = ("valid", valid) if is_validation(name, validation_every) else ("train", train)
                sink.write(orjson.dumps({"text": text, "path": name}) + b"\n")
                report.files[part] += 1
                report.text_bytes[part] += len(raw)
        if not report.files["train"] or not report.files["valid"]:
            raise DataError(f"{root}: {sum(report.files.values())} Python files, too few for two parts")
        for part, path in parts.items():
            os.replace(temporary[part], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return report
