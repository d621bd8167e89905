"""A dataset in words."""

from __future__ import annotations

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset
from megnorm.data.meta import DatasetMeta, file_sha256, read_meta
from megnorm.data.tokenizers import Tokenizer, load_tokenizer

_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


def describe(prefix: str) -> str:
    """Header, counts, quantiles of the documents' lengths, and the sidecar where there is one."""
    dataset, meta = IndexedDataset(prefix), read_meta(prefix)
    lines = [
        f"{prefix}: {dataset.num_documents:,} documents, {len(dataset):,} sequences, "
        f"{dataset.num_tokens:,} tokens of {dataset.dtype.name}"
    ]
    lengths = dataset.document_lengths()
    if len(lengths):
        values = np.quantile(lengths, _QUANTILES, method="nearest")
        parts = [f"{q:.0%}: {int(v):,}" for q, v in zip(_QUANTILES, values, strict=True)]
        lines.append(f"tokens a document, quantiles   {'   '.join(parts)}   mean: {lengths.mean():,.1f}")
        lines.append(f"empty documents                {int(np.count_nonzero(lengths == 0)):,}")
    lines += _describe_meta(prefix, meta)
    return "\n".join(lines)


def _describe_meta(prefix: str, meta: DatasetMeta | None) -> list[str]:
    if meta is None:
        return [f"no {prefix}.meta.json: tokenizer and sources are unknown"]
    tokenizer = meta.tokenizer
    out = [
        f"tokenizer                      {tokenizer.type} {meta.tokenizer_path(prefix) or ''}, "
        f"{tokenizer.vocab_size:,} entries, end of document {tokenizer.eod_id}",
        f"text                           {meta.text_bytes:,} bytes, "
        f"{meta.text_bytes / max(meta.tokens, 1):.3f} a token",
        f"end-of-document tokens         {meta.eod_tokens:,}",
        f"skipped lines                  {meta.skipped:,}",
    ]
    return out + [f"source                         {s['path']}, {s['bytes']:,} bytes" for s in meta.sources]


def dataset_tokenizer(prefix: str) -> Tokenizer:
    """The tokenizer that made a dataset, by its sidecar. Raises DataError when it is unknown or changed."""
    meta = read_meta(prefix)
    if meta is None:
        raise DataError(f"{prefix}.meta.json: no such file, so the tokenizer of the dataset is unknown")
    path = meta.tokenizer_path(prefix)
    tokenizer = load_tokenizer(meta.tokenizer.type, path)
    if path is not None and file_sha256(tokenizer.path or path) != meta.tokenizer.sha256:
        raise DataError(f"{path}: isn't the file that {prefix} was made with (other sha256)")
    return tokenizer


def show_document(prefix: str, document: int, max_tokens: int) -> str:
    """A document decoded, its first `max_tokens` tokens; the ids where the tokenizer is unknown."""
    dataset = IndexedDataset(prefix)
    if not 0 <= document < dataset.num_documents:
        raise DataError(f"document {document}: {prefix} has 0 to {dataset.num_documents - 1}")
    ids = dataset.read_document(document)
    head = f"document {document}: {len(ids)} tokens"
    if len(ids) > max_tokens:
        head += f", the first {max_tokens}"
    ids = ids[:max_tokens]
    if read_meta(prefix) is None:
        return f"{head} (no sidecar, so as ids)\n{ids.tolist()}"
    tokenizer = dataset_tokenizer(prefix)
    if tokenizer.eod is not None and len(ids) and ids[-1] == tokenizer.eod:
        head += ", the last is the end of the document"
    return f"{head}\n{tokenizer.decode(ids.tolist())}"
