"""A dataset in words."""

from __future__ import annotations

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset
from megnorm.data.lengths import LengthSummary, describe_quantiles, summarize_lengths
from megnorm.data.meta import DatasetMeta, file_sha256, read_meta
from megnorm.data.tokenizers import Tokenizer, load_tokenizer

_BLOCK = 1 << 20
_BAR = 50


def describe(prefix: str) -> str:
    """Header, counts, quantiles of the documents' lengths, and the sidecar where there is one."""
    dataset, meta = IndexedDataset(prefix), read_meta(prefix)
    lines = [
        f"{prefix}: {dataset.num_documents:,} documents, {len(dataset):,} sequences, "
        f"{dataset.num_tokens:,} tokens of {dataset.dtype.name}"
    ]
    summary = dataset_lengths(dataset)
    if summary.documents:
        lines.append(f"tokens a document, quantiles   {describe_quantiles(summary)}")
        lines.append(f"empty documents                {summary.empty:,}")
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


def dataset_lengths(dataset: IndexedDataset) -> LengthSummary:
    """The lengths of a dataset's documents, counted block by block."""
    count = dataset.num_documents
    return summarize_lengths(
        dataset.document_lengths(a, min(a + _BLOCK, count)) for a in range(0, count, _BLOCK)
    )


def histogram(prefix: str) -> str:
    """Documents by length, as bars over powers of two."""
    rows = dataset_lengths(IndexedDataset(prefix)).histogram()
    most = max((count for _, _, count in rows), default=0)
    names = [f"{a:,}" if a == b else f"{a:,} - {b:,}" for a, b, _ in rows]
    width = max(map(len, names), default=0)
    lines = [f"{'tokens':>{width}}  documents"]
    for name, (_, _, count) in zip(names, rows, strict=True):
        bar = "#" * -(-count * _BAR // max(most, 1))
        lines.append(f"{name:>{width}}  {count:>11,}  {bar}".rstrip())
    return "\n".join(lines)


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
