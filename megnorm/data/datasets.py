"""The datasets of a run, opened as its configuration names them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megnorm.config import Config
from megnorm.config.run import Source
from megnorm.data.batches import RowRules
from megnorm.data.blend import Blend, Phase, SampleSource
from megnorm.data.errors import DataError
from megnorm.data.index_cache import IndexCache
from megnorm.data.indexed import IndexedDataset
from megnorm.data.megatron_order import MegatronMap
from megnorm.data.meta import DatasetMeta, read_meta
from megnorm.data.packing import PackedMap
from megnorm.data.plan import SourcePlan, check_plan, epoch_shares, plan_lines
from megnorm.data.samples import GPTDataset, SampleMap, SampleOrder
from megnorm.data.splits import split_documents

_SPLITS = ("train", "valid", "test")
# Megatron's mid_level_dataset_surplus: each source of a blend is built for so much more than its share.
_MEGATRON_SURPLUS = 0.005


@dataclass(frozen=True)
class Datasets:
    """Streams of samples by split; None where the configuration names no data. The samples of ``train`` are
    shuffled in each epoch, those of the others stand in the order of their documents. ``rules``: what counts
    as a target. ``plan``: what the run takes from each source, as lines for the user."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None
    rules: RowRules = RowRules()
    plan: tuple[str, ...] = ()


def open_datasets(config: Config) -> Datasets:
    """Open and check everything that the configuration names. Raises DataError."""
    data = config.data
    train, plan = _train(config)
    others = {}
    for number, split in enumerate(_SPLITS[1:], 1):
        if data.sources is None:
            sources, named = getattr(data, split), True
        else:
            sources, named = data.sources, data.split[number] > 0
        others[split] = _still(config, sources, split) if sources and named else None
    rules = RowRules(mask_ends=data.mask_document_ends, mask_documents=data.mask_documents,
                     reset_positions=data.reset_positions, mark_padding=config.model.moe is not None and train.padded)
    return Datasets(train, **others, rules=rules, plan=tuple(plan))


def tokenizer_meta(config: Config) -> DatasetMeta | None:
    """What the sidecar of the first training source says of its tokenizer and sizes."""
    return read_meta((config.data.train or config.data.sources)[0][1])


def _train(config: Config) -> tuple[SampleSource, list[str]]:
    """The training stream over all phases of its blend, and its plan."""
    data, samples = config.data, config.total_steps * config.train.global_batch
    first = data.train or data.sources
    phases = [(0, first), *((change.at_sample, change.sources) for change in data.changes)]
    prefixes = list(dict.fromkeys(prefix for _, sources in phases for _, prefix in sources))
    given = [
        [sum(w for w, name in sources if name == prefix) for prefix in prefixes] for _, sources in phases
    ]
    whole = sum(given[0])
    datasets = [
        _open(config, prefix, "train", math.ceil(samples * weight / whole))
        for prefix, weight in zip(prefixes, given[0], strict=True)
    ]
    per_epoch = [dataset.samples_per_epoch for dataset in datasets]
    weights = given
    if data.blend == "epochs":
        weights = [epoch_shares(prefixes, given[0], per_epoch, samples)]
    stream: SampleSource = datasets[0]
    counts = [samples]
    if len(datasets) > 1:
        firsts = (at for at, _ in phases)
        stream = Blend(datasets, *(Phase(at, tuple(w)) for at, w in zip(firsts, weights, strict=True)))
        counts = [round(count) for count in stream.expected(samples)]
    plans = [SourcePlan(*row) for row in zip(prefixes, given[-1], counts, per_epoch, strict=True)]
    check_plan(plans, data.max_epochs)
    return stream, plan_lines("train", plans, data.sequence_length)


def _still(config: Config, sources: Sequence[Source], split: str) -> SampleSource:
    """The stream of a split whose samples stand in the order of the documents."""
    datasets = [_open(config, prefix, split, 0) for _, prefix in sources]
    if len(datasets) == 1:
        return datasets[0]
    return Blend(datasets, Phase(0, tuple(weight for weight, _ in sources)))


def _open(config: Config, prefix: str, split: str, samples: int) -> GPTDataset:
    """A source of a split, from which `samples` will be drawn."""
    indexed = IndexedDataset(prefix)
    if config.model.vocab_size is not None:
        largest = indexed.largest_id()
        if largest >= config.model.vocab_size:
            raise DataError(
                f"{prefix}.bin holds token id {largest}, but model.vocab_size={config.model.vocab_size}: "
                f"it must be at least {largest + 1}; was another tokenizer used?"
            )
    return GPTDataset(indexed, _order(config, indexed, split, samples), config.model.vocab_size)


def _order(config: Config, indexed: IndexedDataset, split: str, samples: int) -> SampleOrder:
    """The order of a source's samples. It depends on neither where its files lie nor the other sources."""
    data, length = config.data, config.data.sequence_length
    # Data options of a split written as Megatron's names: its --split counts sequences.
    by_sequence = data.order == "megatron" and split == "train"
    units = len(indexed) if by_sequence else indexed.num_documents
    share = (0, units)
    if data.sources is not None:
        fractions = ",".join(str(fraction) for fraction in data.split)
        share = split_documents(units, fractions)[_SPLITS.index(split)]
    name = f"{split}/{Path(indexed.prefix).name}"
    cache = IndexCache(data.cache)
    if by_sequence:
        several = len(data.train or data.sources) > 1
        samples = math.ceil(samples * (1 + _MEGATRON_SURPLUS)) if several else samples
        return MegatronMap(indexed.lengths, share, length, samples, config.seed, name, cache)
    shuffle = split == "train"
    if data.packing == "best_fit":
        return PackedMap(indexed.lengths, indexed.documents, share, length, config.seed, name, shuffle)
    return SampleMap(indexed.lengths, indexed.documents, share, length, config.seed, name, shuffle, cache)
