"""The folder of checkpoints: at any moment of a kill there is one complete checkpoint, and it is found.

    <run_dir>/checkpoints/step-00000020/     manifest.json and part-*.safetensors; complete by construction
                          .tmp-step-...      being written, or left by a kill: removed by the next save
                          .old-step-...      a checkpoint that the next rename replaces: still counts
                          latest             name of the last one saved, for people and scripts

A save writes and syncs every file in a temporary folder, the manifest last, then renames it. No torch.
"""

import hashlib
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megnorm.checkpoint import manifest as manifests
from megnorm.checkpoint.manifest import Manifest, Unreadable

POINTER = "latest"
_STEP = re.compile(r"(\.old-)?step-\d{8,}")


class Found(NamedTuple):
    """The newest complete checkpoint, or None, and each folder passed over with the reason."""

    path: Path | None
    skipped: list[tuple[Path, str]]


def checkpoints_dir(run_dir: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def candidates(run_dir: str | Path) -> list[Path]:
    """Every folder that may be a checkpoint, the highest step first."""
    folder = checkpoints_dir(run_dir)
    if not folder.is_dir():
        return []
    names = [entry for entry in os.listdir(folder) if _STEP.fullmatch(entry)]
    return [folder / name for name in sorted(names, key=lambda n: (int(n.split("-")[-1]), n), reverse=True)]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises Unreadable."""
    try:
        return manifests.decode((path / manifests.FILE_NAME).read_bytes())
    except OSError as error:
        raise Unreadable(f"no readable {manifests.FILE_NAME}: {error.strerror}") from None


def verify(path: Path, checksums: bool = True) -> Manifest:
    """Check that all files are there with their sizes, and by default their SHA-256. Raises Unreadable."""
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        try:
            size = os.stat(path / name).st_size
        except OSError as error:
            raise Unreadable(f"file {name}: {error.strerror}") from None
        if size != file.size:
            raise Unreadable(f"file {name} has {size} bytes, not {file.size}")
    if checksums:  # in threads: hashing lets go of the interpreter lock
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_checksum, [path / name for name in manifest.files]))
        for (name, file), digest in zip(manifest.files.items(), digests, strict=True):
            if digest != file.sha256:
                raise Unreadable(f"file {name} doesn't have the checksum that it was written with")
    return manifest


def find_newest(run_dir: str | Path, checksums: bool = True) -> Found:
    """The checkpoint saved last among the complete ones; this process reads all its files to verify them."""
    readable, skipped = [], []
    for path in candidates(run_dir):
        try:
            readable.append((read_manifest(path).serial, path))
        except Unreadable as reason:
            skipped.append((path, str(reason)))
    for _, path in sorted(readable, key=lambda item: item[0], reverse=True):
        try:
            verify(path, checksums)
        except Unreadable as reason:
            skipped.append((path, str(reason)))
        else:
            return Found(path, skipped)
    return Found(None, skipped)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it to the device."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary(run_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is published."""
    return checkpoints_dir(run_dir) / f".tmp-{step_name(step)}"


def prepare(run_dir: str | Path, step: int) -> int:
    """Clean up what a kill left, create the temporary folder; returns the serial of the new checkpoint."""
    folder = checkpoints_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _settle_replaced(folder)
    temporary(run_dir, step).mkdir()
    return 1 + max((manifest.serial for _, manifest in _readable(run_dir)), default=0)


def publish(run_dir: str | Path, step: int, data: bytes) -> Path:
    """Write the manifest, sync, and rename the temporary folder; replaces an older save of this step."""
    folder, source = checkpoints_dir(run_dir), temporary(run_dir, step)
    final, old = folder / step_name(step), folder / f".old-{step_name(step)}"
    write_file(source / manifests.FILE_NAME, data)
    sync_folder(source)
    if final.exists():
        os.rename(final, old)
    os.rename(source, final)
    sync_folder(folder)
    return final


def point(run_dir: str | Path, step: int) -> None:
    """Let the pointer name this step."""
    folder = checkpoints_dir(run_dir)
    source = folder / f".tmp-{POINTER}"
    source.unlink(missing_ok=True)
    write_file(source, f"{step_name(step)}\n".encode())
    os.replace(source, folder / POINTER)
    sync_folder(folder)


def prune(run_dir: str | Path, keep_last: int, keep_every: int) -> list[Path]:
    """Remove checkpoints but the ``keep_last`` saved last and each with step % keep_every == 0 (0: none).

    Counted are complete ones only, by manifest and sizes; folders that are not complete are left alone.
    Returns the removed. A removal starts with a rename: it never leaves half a checkpoint under its name.
    """
    _settle_replaced(checkpoints_dir(run_dir))
    complete = []
    for path, manifest in _readable(run_dir):
        try:
            verify(path, checksums=False)
        except Unreadable:
            continue
        complete.append((manifest.serial, manifest.step, path))
    removed = []
    for _, step, path in sorted(complete, reverse=True)[keep_last:]:
        if keep_every and step % keep_every == 0:
            continue
        doomed = path.parent / f".tmp-removed-{path.name}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)
        removed.append(path)
    return removed


def _settle_replaced(folder: Path) -> None:
    """End a replacement: drop the old folder, or name it back when a kill came between the renames."""
    for path in folder.glob(".old-step-*"):
        final = folder / path.name.removeprefix(".old-")
        shutil.rmtree(path) if final.exists() else os.rename(path, final)


def _readable(run_dir: str | Path) -> list[tuple[Path, Manifest]]:
    found = []
    for path in candidates(run_dir):
        try:
            found.append((path, read_manifest(path)))
        except Unreadable:
            continue
    return found


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise Unreadable(f"file {path.name}: {error.strerror}") from None
    return digest.hexdigest()
