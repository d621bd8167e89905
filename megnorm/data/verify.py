"""Whether a dataset is what its files and its sidecar say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, bin_path
from megnorm.data.meta import DatasetMeta, file_sha256, read_meta

_BLOCK = 1 << 20


def verify(prefix: str, vocab_size: int | None = None) -> tuple[list[str], list[str]]:
    """(checks that hold, faults) of a dataset; both are lines for the user.

    `vocab_size` stands in for the sidecar's, where there is none. Files are untrusted: what the index says is
    compared with the sizes of the files before anything is allocated. Memory doesn't grow with the dataset.
    """
    try:
        dataset, meta = IndexedDataset(prefix), read_meta(prefix)
    except DataError as error:
        return [], [str(error)]
    held = [
        f"index: sizes, offsets, bounds; {len(dataset):,} sequences in {dataset.num_documents:,} documents"
    ]
    faults: list[str] = []
    limit = vocab_size or (meta.tokenizer.vocab_size if meta else None)
    end = meta.tokenizer.eod_id if meta and meta.options.get("append_eod") else None
    for name, found in (
        ("digests", _digests(dataset, meta)),
        ("counts", _counts(dataset, meta)),
        (f"token ids from 0 to {(limit or 0) - 1:,}", _ids(dataset, limit)),
        (f"every document ends with {end}, and only there", _ends(dataset, meta, end)),
    ):
        if found is None:
            continue
        faults += found
        if not found:
            held.append(name)
    return held, faults


def _digests(dataset: IndexedDataset, meta: DatasetMeta | None) -> list[str] | None:
    if meta is None:
        return None
    faults = []
    try:
        dataset.check_digest()
    except DataError as error:
        faults.append(str(error))
    path = bin_path(dataset.prefix)
    if file_sha256(path) != meta.bin_sha256:
        faults.append(f"{path}: isn't the file that the sidecar describes (other sha256)")
    return faults


def _counts(dataset: IndexedDataset, meta: DatasetMeta | None) -> list[str] | None:
    if meta is None:
        return None
    pairs = (
        ("documents", dataset.num_documents, meta.documents),
        ("tokens", dataset.num_tokens, meta.tokens),
    )
    return [
        f"{dataset.prefix}: {found:,} {name}, but the sidecar says {said:,}"
        for name, found, said in pairs
        if found != said
    ]


def _ids(dataset: IndexedDataset, limit: int | None) -> list[str] | None:
    if limit is None:
        return None
    for start, block in dataset.token_blocks():
        wrong = (block < 0) | (block >= limit)
        if wrong.any():
            at = int(np.argmax(wrong))
            place = _document_of(dataset, start + at)
            return [
                f"{dataset.prefix}.bin: token id {block[at]} at token {start + at:,} (document {place:,}), must"
                f" be 0 to {limit - 1}"
            ]
    return []


def _document_of(dataset: IndexedDataset, token: int) -> int:
    """The document that holds a token."""
    sequence = int(np.searchsorted(dataset.offsets, token * dataset.dtype.itemsize, side="right")) - 1
    return int(np.searchsorted(dataset.documents, sequence, side="right")) - 1


def _document_ends(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    """Last tokens, by their number in .bin, of the documents that have any; in blocks."""
    for a in range(0, dataset.num_documents, _BLOCK):
        edges = np.asarray(dataset.documents[a : a + _BLOCK + 1])
        last = edges[1:][np.diff(edges) > 0] - 1
        yield dataset.offsets[last] // dataset.dtype.itemsize + dataset.lengths[last] - 1


def _ends(dataset: IndexedDataset, meta: DatasetMeta | None, end: int | None) -> list[str] | None:
    if meta is None or end is None:
        return None
    tokens, filled = dataset.tokens, 0
    for places in _document_ends(dataset):
        wrong = tokens[places] != end
        filled += len(places)
        if wrong.any():
            place = _document_of(dataset, int(places[int(np.argmax(wrong))]))
            return [f"{dataset.prefix}: document {place:,} doesn't end with the end-of-document token {end}"]
    found = sum(int(np.count_nonzero(block == end)) for _, block in dataset.token_blocks())
    if found != filled or found != meta.eod_tokens:
        return [
            f"{dataset.prefix}: {found:,} end-of-document tokens, but {filled:,} documents with tokens "
            f"and {meta.eod_tokens:,} in the sidecar"
        ]
    return []
