"""The datasets of a run, opened as its configuration names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megnorm.config import Config
from megnorm.config.run import Source
from megnorm.data.blend import Blend, SampleSource
from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset
from megnorm.data.meta import DatasetMeta, read_meta
from megnorm.data.samples import GPTDataset
from megnorm.data.splits import split_documents


@dataclass(frozen=True)
class Datasets:
    """Streams of samples by split; None where the configuration names no data. The samples of ``train`` are
    shuffled in each epoch, those of the others stand in the order of their documents."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None


def open_datasets(config: Config) -> Datasets:
    """Open and check everything that the configuration names. Raises DataError."""
    data = config.data
    if data.sources is None:
        given = {"train": data.train, "valid": data.valid, "test": data.test}
        return Datasets(
            **{
                split: _blend(config, sources, split, None) if sources else None
                for split, sources in given.items()
            }
        )
    fractions = ",".join(str(fraction) for fraction in data.split)
    return Datasets(
        **{
            split: _blend(config, data.sources, split, (fractions, number)) if data.split[number] else None
            for number, split in enumerate(("train", "valid", "test"))
        }
    )


def tokenizer_meta(config: Config) -> DatasetMeta | None:
    """What the sidecar of the first training source says of its tokenizer and sizes."""
    return read_meta((config.data.train or config.data.sources)[0][1])


def _blend(
    config: Config, sources: tuple[Source, ...], split: str, cut: tuple[str, int] | None
) -> SampleSource:
    datasets = [_open(config, prefix, split, cut) for _, prefix in sources]
    return datasets[0] if len(datasets) == 1 else Blend(datasets, [weight for weight, _ in sources])


def _open(config: Config, prefix: str, split: str, cut: tuple[str, int] | None) -> GPTDataset:
    indexed = IndexedDataset(prefix)
    if config.model.vocab_size is not None:
        largest = indexed.largest_id()
        if largest >= config.model.vocab_size:
            raise DataError(
                f"{prefix}.bin holds token id {largest}, but model.vocab_size={config.model.vocab_size}: "
                f"it must be at least {largest + 1}; was another tokenizer used?"
            )
    documents = split_documents(indexed.num_documents, cut[0])[cut[1]] if cut else None
    # The order of a source doesn't depend on where its files lie, nor on the other sources.
    return GPTDataset(
        indexed,
        documents,
        config.data.sequence_length,
        config.seed,
        f"{split}/{Path(prefix).name}",
        shuffle=split == "train",
        vocab_size=config.model.vocab_size,
    )
