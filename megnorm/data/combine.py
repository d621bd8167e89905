"""Datasets joined one behind the other, and cut into parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, IndexedWriter
from megnorm.data.inspect import dataset_tokenizer
from megnorm.data.meta import META_SUFFIX, DatasetMeta, TokenizerMeta, read_meta, relative_to_sidecar
from megnorm.data.splits import split_documents
from megnorm.data.tokenizers import Tokenizer

_BLOCK_DOCUMENTS, _BLOCK_TOKENS = 1 << 16, 1 << 22


def merge(prefixes: Sequence[str], output: str) -> int:
    """Writes the documents of all datasets, in the order given, to `output`; how many there are.

    The shares of several machines, in the order of their ranks, give the bytes of one machine. Raises
    DataError for datasets of different tokenizers, dtypes or shares that don't fit together.
    """
    datasets = [_open(prefix) for prefix in prefixes]
    dtypes = sorted({dataset.dtype.name for dataset in datasets})
    if len(dtypes) > 1:
        raise DataError(f"the datasets have tokens of {' and '.join(dtypes)}, must be one dtype")
    if output in prefixes:
        raise DataError(f"{output}: is one of the inputs")
    metas = [read_meta(prefix) for prefix in prefixes]
    with IndexedWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            _copy(dataset, 0, dataset.num_documents, writer)
        meta = _merged_meta(prefixes, metas, output)
        if meta is not None:
            _add_meta(writer, meta)
        return writer.num_documents


def split(prefix: str, output: str, fractions: str) -> dict[str, int]:
    """Cuts a dataset by whole documents into `<output>_train`, `_valid`, `_test`; documents of each part.

    The parts are those that a run with data.split would read. Parts of fraction 0 are not written. Raises
    DataError.
    """
    dataset, meta = _open(prefix), read_meta(prefix)
    tokenizer = dataset_tokenizer(prefix) if meta else None
    parts = {}
    ranges = split_documents(dataset.num_documents, fractions)
    for name, (first, last) in zip(("train", "valid", "test"), ranges, strict=True):
        if first == last:
            continue
        target = f"{output}_{name}"
        with IndexedWriter(target, dataset.dtype) as writer:
            _copy(dataset, first, last, writer)
            if meta is not None and tokenizer is not None:
                _add_meta(writer, _part_meta(dataset, meta, tokenizer, (first, last), target))
        parts[target] = last - first
    return parts


def _open(prefix: str) -> IndexedDataset:
    dataset = IndexedDataset(prefix)
    blocks = range(0, dataset.num_documents, _BLOCK_DOCUMENTS)
    if dataset.has_modes or any(
        (np.diff(dataset.documents[a : a + _BLOCK_DOCUMENTS + 1]) > 1).any() for a in blocks
    ):
        raise DataError(f"{prefix}: has modes, or documents of several sequences, which would be lost")
    return dataset


def _copy(dataset: IndexedDataset, first: int, last: int, writer: IndexedWriter) -> None:
    for a in range(first, last, _BLOCK_DOCUMENTS):
        lengths = dataset.document_lengths(a, min(a + _BLOCK_DOCUMENTS, last))
        ends = np.cumsum(lengths, dtype=np.int64)
        start = int(dataset.offsets[dataset.documents[a]]) // dataset.dtype.itemsize if ends[-1] else 0
        done = 0
        while done < len(lengths):  # a block of long documents is written in several goes
            before = int(ends[done - 1]) if done else 0
            stop = max(done + 1, int(np.searchsorted(ends, before + _BLOCK_TOKENS)))
            stop = min(stop, len(lengths))
            writer.add_documents(
                dataset.tokens[start + before : start + int(ends[stop - 1])], lengths[done:stop]
            )
            done = stop


def _add_meta(writer: IndexedWriter, meta: DatasetMeta) -> None:
    whole = dataclasses.replace(meta, bin_sha256=writer.bin_sha256, idx_sha256=writer.seal())
    writer.add_sidecar(META_SUFFIX, whole.to_json())


def _merged_meta(
    prefixes: Sequence[str], metas: Sequence[DatasetMeta | None], output: str
) -> DatasetMeta | None:
    """The sidecar of the whole; None where no part has one."""
    missing = [prefix for prefix, meta in zip(prefixes, metas, strict=True) if meta is None]
    known = [meta for meta in metas if meta is not None]
    if not known:
        return None
    if missing:
        raise DataError(
            f"{missing[0]}: has no sidecar, the others have; give it one by preprocessing it again"
        )
    for prefix, meta in zip(prefixes, known, strict=True):
        if _identity(meta.tokenizer) != _identity(known[0].tokenizer):
            raise DataError(f"{prefix}: was made with another tokenizer than {prefixes[0]}")
    shards = [meta.options.get("shard") for meta in known]
    if any(shards) and shards != [[rank, len(known)] for rank in range(len(known))]:
        raise DataError(
            f"the shares are {shards}, must be [0, {len(known)}] to [{len(known) - 1}, {len(known)}] in order"
        )
    path = known[0].tokenizer_path(prefixes[0])
    return dataclasses.replace(
        known[0],
        tokenizer=_tokenizer_at(known[0].tokenizer, path, output),
        **{
            name: sum(getattr(meta, name) for meta in known)
            for name in ("documents", "skipped", "tokens", "eod_tokens", "text_bytes")
        },
        sources=_sources([source for meta in known for source in meta.sources]),
        options=_common_options([meta.options for meta in known]),
    )


def _identity(tokenizer: TokenizerMeta) -> tuple[Any, ...]:
    return (tokenizer.type, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod_id)


def _tokenizer_at(tokenizer: TokenizerMeta, path: Path | None, prefix: str) -> TokenizerMeta:
    return dataclasses.replace(tokenizer, path=relative_to_sidecar(path, prefix) if path else None)


def _sources(sources: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each source once; shares of one file meet, of which one knows its digest."""
    out: dict[str, dict[str, Any]] = {}
    for source in sources:
        kept = out.setdefault(source["path"], dict(source))
        kept["sha256"] = kept.get("sha256") or source.get("sha256")
    return list(out.values())


def _common_options(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: value
        for name, value in options[0].items()
        if name != "shard" and all(other.get(name) == value for other in options)
    }


def _part_meta(
    dataset: IndexedDataset, meta: DatasetMeta, tokenizer: Tokenizer, part: tuple[int, int], target: str
) -> DatasetMeta:
    """The sidecar of the documents [first, last); the size of their texts is found by decoding them."""
    tokens = ends = size = 0
    for k in range(*part):
        ids = dataset.read_document(k)
        tokens += len(ids)
        ends += (
            int(np.count_nonzero(ids == meta.tokenizer.eod_id)) if meta.tokenizer.eod_id is not None else 0
        )
        size += len(tokenizer.decode(ids.tolist()).encode())
    return dataclasses.replace(
        meta,
        tokenizer=_tokenizer_at(meta.tokenizer, meta.tokenizer_path(dataset.prefix), target),
        documents=part[1] - part[0],
        skipped=0,
        tokens=tokens,
        eod_tokens=ends,
        text_bytes=size,
        options={**meta.options, "documents": list(part)},
    )
