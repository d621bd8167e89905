"""What a checkpoint says about itself: files with checksums, tensors with their slices, trainer state.

Version 1. Every tensor is fp32 and whole over data parallelism; it is known by the parameter's global name
and a key ("master", "exp_avg", ...; "state" for what no optimizer moves), and cut along at most one dimension.
Each expert of a parameter that holds several is a tensor of its own, NAME.NUMBER. Nothing in it depends on the
layout that wrote it but the cut, which any reader can join. No torch: a command may look for checkpoints quickly.
"""

import hashlib
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from megnorm.config.base import Section

FILE_NAME = "manifest.json"
# The key of a tensor that no optimizer moves.
STATE = "state"


class Unreadable(ValueError):
    """A folder that is not a complete checkpoint; the message is the reason."""


class File(Section):
    """One file of the checkpoint: bytes, and their SHA-256 in hex."""

    size: int = Field(ge=0)
    sha256: str


class Part(Section):
    """A slice of a tensor, [start, stop) along the tensor's ``dim``, and the file that holds it."""

    file: str
    start: int = 0
    stop: int = 0


class Entry(Section):
    """All tensors of one parameter: in each part's file, one under "<name>/<key>" for each of the keys.

    shape: of the whole tensor. dim: where it is cut; None: one part holds the whole.
    """

    shape: tuple[int, ...]
    dim: int | None
    keys: tuple[str, ...]
    parts: tuple[Part, ...]

    @model_validator(mode="after")
    def _whole(self) -> "Entry":
        if self.dim is None:
            if len(self.parts) != 1:
                raise ValueError(f"{len(self.parts)} parts of a tensor that is not cut")
            return self
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"cut along dimension {self.dim} of shape {self.shape}")
        end = 0
        for part in self.parts:
            if part.start != end or part.stop <= part.start:
                raise ValueError(f"slice {part.start}:{part.stop} follows one that ends at {end}")
            end = part.stop
        if end != self.shape[self.dim]:
            raise ValueError(f"the slices end at {end} of {self.shape[self.dim]}")
        return self


class Manifest(Section):
    """The content of manifest.json, written last.

    serial: counts the saves of a run directory: a run that went back to an older step and on from there has
        its newest checkpoint at the highest serial, not at the highest step.
    optimizer_step: updates made; differs from the step when updates were skipped.
    layout: sizes that wrote it, for information. trainer, config: JSON values.
    sha256: of this manifest without the field itself.
    """

    format: Literal["megnorm-checkpoint"] = "megnorm-checkpoint"
    version: Literal[1] = 1
    complete: Literal[True] = True
    serial: int = Field(ge=1)
    step: int = Field(ge=0)
    optimizer_step: int = Field(ge=0)
    layout: dict[str, int]
    trainer: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Entry]
    sha256: str = ""

    @model_validator(mode="after")
    def _files_are_listed(self) -> "Manifest":
        for name in self.files:
            if name in ("", ".", "..") or "/" in name or "\\" in name:
                raise ValueError(f"{name!r} is not the name of a file in the folder")
        for name, entry in self.tensors.items():
            for part in entry.parts:
                if part.file not in self.files:
                    raise ValueError(f"tensor {name} is in {part.file!r}, which is not a listed file")
        return self

    def digest(self) -> str:
        """SHA-256 of everything but the digest."""
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    return manifest.model_copy(update={"sha256": manifest.digest()}).model_dump_json(indent=1).encode()


def decode(data: bytes) -> Manifest:
    """Parse manifest.json. Raises Unreadable with the first thing that is wrong."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        item = error.errors()[0]
        where = ".".join(str(part) for part in item["loc"])
        raise Unreadable(f"{FILE_NAME} is not valid: {where + ': ' if where else ''}{item['msg']}") from None
    if manifest.sha256 != manifest.digest():
        raise Unreadable(f"{FILE_NAME} doesn't have the checksum that it was written with")
    return manifest
