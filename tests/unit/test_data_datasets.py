"""The datasets that a configuration names: orders, blends by tokens and epochs, changes, the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megnorm.config import ConfigError
from megnorm.config.config import parse_config
from megnorm.data.batches import batch_digest
from megnorm.data.blend import Blend, Phase
from megnorm.data.datasets import open_datasets
from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedWriter
from megnorm.data.megatron_order import MegatronMap
from megnorm.data.packing import PackedMap
from megnorm.data.samples import SampleMap

S = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources a, b, c of 100, 50 and 20 samples an epoch; tokens say where they are from."""
    random = np.random.default_rng(0)
    for k, (name, samples) in enumerate({"a": 100, "b": 50, "c": 20}.items()):
        left, at = samples * S + 1, 0
        with IndexedWriter(tmp_path / name, "i4") as writer:
            while left:
                n = min(left, int(random.integers(1, 30)))
                writer.add_document(k * 1000 + np.arange(at, at + n))
                at, left = at + n, left - n
    return tmp_path


def opened(folder: Path, steps: int = 10, moe: dict | None = None, **data: Any):
    def prefix(value: Any) -> Any:
        if isinstance(value, list):
            return [prefix(item) for item in value]
        if isinstance(value, dict):
            return {key: prefix(item) for key, item in value.items()}
        return str(folder / value) if value in ("a", "b", "c") else value

    raw = {
        "run_dir": str(folder / "run"),
        "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": 4000, "norm": {"scheme": "pre"},
                  "moe": moe},
        "data": {"sequence_length": S, **{key: prefix(value) for key, value in data.items()}},
        "train": {"steps": steps, "micro_batch": 1, "global_batch": 4},
        "optimizer": {"lr": 0.1},
    }
    return open_datasets(parse_config(raw))


def sources(stream: Any, first: int, last: int) -> list[int]:
    return [int(stream[n][0]) // 1000 for n in range(first, last)]


def test_shares_of_tokens(folder: Path) -> None:
    datasets = opened(folder, train=[[0.7, "a"], [0.3, "b"]])
    assert np.bincount(sources(datasets.train, 0, 40)).tolist() == [28, 12]
    assert datasets.plan[0] == "data of train: 40 samples, 320 tokens"
    assert [line.split()[1:] for line in datasets.plan[1:]] == [
        ["70.0%", "224", "tokens", "0.28", "epochs", "of", "800"],
        ["30.0%", "96", "tokens", "0.24", "epochs", "of", "400"],
    ]


def test_epochs_of_each_source(folder: Path) -> None:
    """1 epoch of a and 2 of b are 200 samples, half of each; every sample comes so often."""
    datasets = opened(folder, 50, train=[[1, "a"], [2, "b"]], blend="epochs")
    assert np.bincount(sources(datasets.train, 0, 200)).tolist() == [100, 100]
    inputs = np.concatenate([datasets.train[n][:-1] for n in range(200)])
    _, often = np.unique(inputs[inputs < 1000], return_counts=True)
    assert (often == 1).all()
    _, often = np.unique(inputs[inputs >= 1000], return_counts=True)
    assert sorted(set(often.tolist())) in ([2], [1, 2]) and len(often) >= 50 * S
    with pytest.raises(
        DataError, match=r"takes 204 samples, but the epochs .* give 200 \(1 x 100 of .*, 2 x 50"
    ):
        opened(folder, 51, train=[[1, "a"], [2, "b"]], blend="epochs")
    assert sources(opened(folder, 5, train=[[1, "a"], [2, "b"]], blend="epochs").train, 0, 20).count(0) == 10


def test_a_plan_that_repeats_too_much_is_refused(folder: Path) -> None:
    opened(folder, 25, train=[[0.8, "a"], [0.2, "c"]], max_epochs=1)
    with pytest.raises(
        DataError, match=r"c: weight 0.2 takes 24 samples = 1.20 epochs of 20, above data.max_epochs=1"
    ):
        opened(folder, 30, train=[[0.8, "a"], [0.2, "c"]], max_epochs=1)


def test_the_mixture_changes_and_positions_stay(folder: Path) -> None:
    """A, B at 0.5, 0.5 for 10 steps, then A, B, C at 0.4, 0.4, 0.2, then A and C."""
    changes = [
        {"at_sample": 40, "sources": [[0.4, "a"], [0.4, "b"], [0.2, "c"]]},
        {"at_sample": 80, "sources": [[1, "a"], [1, "c"]]},
        {"at_sample": 100, "sources": [[1, "b"]]},
    ]
    datasets = opened(folder, 28, train=[[0.5, "a"], [0.5, "b"]], changes=changes)
    assert np.bincount(sources(datasets.train, 0, 40), minlength=3).tolist() == [20, 20, 0]
    assert np.bincount(sources(datasets.train, 40, 80), minlength=3).tolist() == [16, 16, 8]
    assert np.bincount(sources(datasets.train, 80, 100), minlength=3).tolist() == [10, 0, 10]
    assert np.bincount(sources(datasets.train, 100, 112), minlength=3).tolist() == [0, 12, 0]
    alone = {name: opened(folder, train=name).train for name in "abc"}
    for k, name in enumerate("abc"):
        own = [datasets.train[n].tolist() for n in range(112) if datasets.train.locate(n)[0] == k]
        assert own == [alone[name][n].tolist() for n in range(len(own))]
    unchanged = opened(folder, 28, train=[[0.5, "a"], [0.5, "b"]]).train
    assert all((datasets.train[n] == unchanged[n]).all() for n in range(40))
    assert datasets.train.expected(112).tolist() == datasets.train.counts(112).tolist() == [46, 48, 18]


def test_every_prefix_of_a_changed_blend_keeps_its_shares() -> None:
    class Any_:
        sequence_length = 1

    phases = (Phase(0, (0.3, 0.7, 0.0)), Phase(1111, (0.1, 0.2, 0.7)), Phase(5000, (0.0, 0.0, 1.0)))
    blend = Blend([Any_(), Any_(), Any_()], *phases)
    for n in range(0, 9000, 37):
        assert np.abs(blend.counts(n) - blend.expected(n)).max() <= 1 + sum(
            n > phase.first for phase in phases[1:]
        )
        source, k = blend.locate(n)
        assert k == blend.counts(n)[source]
    with pytest.raises(DataError, match="must be above 0 and rise"):
        Blend([Any_()], Phase(0, (1.0,)), Phase(5, (1.0,)), Phase(5, (1.0,)))


def test_splits_are_blended_each(folder: Path) -> None:
    datasets = opened(folder, sources=[[0.5, "a"], [0.5, "b"]], split=[0.8, 0.2, 0])
    assert datasets.test is None
    seen = {
        split: {int(t) for n in range(200) for t in stream[n]}
        for split, stream in (("train", datasets.train), ("valid", datasets.valid))
    }
    assert not seen["train"] & seen["valid"]
    datasets = opened(folder, train="a", valid=[[1, "b"], [1, "c"]])
    assert sources(datasets.valid, 0, 40).count(2) == 20 and set(sources(datasets.train, 0, 40)) == {0}


def test_orders_and_packing(folder: Path) -> None:
    kinds = {
        SampleMap: {},
        MegatronMap: {"order": "megatron"},
        PackedMap: {"packing": "best_fit"},
    }
    streams = {kind: opened(folder, train="a", **more).train for kind, more in kinds.items()}
    assert all(isinstance(stream.map, kind) for kind, stream in streams.items())
    assert len({batch_digest(stream, 0, 4) for stream in streams.values()}) == 3
    valid = opened(folder, train="a", valid="b", order="megatron").valid
    assert valid.map.shuffle is False
    assert opened(folder, train="a", mask_document_ends=True).rules.mask_ends
    assert not opened(folder, train="a").rules.mask_ends


def test_routers_are_told_of_padding(folder: Path) -> None:
    """Where there are any, and where it may occur: the others keep batches of tokens alone."""
    moe = {"experts": 2, "top_k": 1, "ffn_hidden": 8}
    for train in ("a", [[1, "a"], [1, "b"]]):
        rules = opened(folder, moe=moe, train=train, packing="best_fit").rules
        assert rules.mark_padding and rules.documents
    assert not opened(folder, moe=moe, train="a").rules.documents
    assert not opened(folder, train="a", packing="best_fit").rules.documents


def test_megatron_asks_each_source_for_its_share(folder: Path) -> None:
    train = opened(folder, 30, train=[[0.7, "a"], [0.3, "b"]], order="megatron").train
    lengths = train.datasets[1].dataset.lengths
    asked = MegatronMap(lengths, (0, len(lengths)), S, 37, 1234)  # ceil(ceil(120 * 0.3) * 1.005)
    seed = train.datasets[1].map
    assert seed.num_samples == asked.num_samples
    for n in range(120):
        train[n]


def test_a_cache_changes_nothing(folder: Path) -> None:
    plain = opened(folder, train=[[1, "a"], [1, "b"]]).train
    for _ in range(2):
        cached = opened(folder, train=[[1, "a"], [1, "b"]], cache=str(folder / "cache")).train
        assert batch_digest(cached, 0, 40) == batch_digest(plain, 0, 40)
    assert list((folder / "cache").glob("*.npy"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"order": "megatron", "packing": "best_fit"}, "order=megatron goes with"),
        ({"order": "megatron", "blend": "epochs"}, "order=megatron goes with"),
        ({"blend": "epochs", "changes": [{"at_sample": 4, "sources": "b"}]}, "can't have changes"),
        ({"changes": [{"at_sample": 4, "sources": "b"}, {"at_sample": 4, "sources": "a"}]}, "must rise"),
        ({"packing": "best_fit", "cache": "x"}, "cache=x goes with packing=none"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"order": "own"}, "order"),
    ],
)
def test_options_that_do_not_go_together(folder: Path, data: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder, train="a", **data)
