"""The report of a run on small fakes: which samples are fitted, bits per byte, verdict, files, messages."""

import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from megnorm.config import Config, dump_config, parse_config
from megnorm.data.meta import DatasetMeta, TokenizerMeta, meta_path
from megnorm.observe.baselines import fit_baselines
from megnorm.observe.metrics import STEP_FIELDS, MetricsWriter
from tools import demo_report

STEPS, BATCH, VALID = 6, 4, 5


class Stream:
    """Endless samples that remember which were asked for."""

    def __init__(self, seed: int) -> None:
        self.seed, self.asked = seed, set()

    def __getitem__(self, n: int) -> np.ndarray:
        self.asked.add(n)
        return np.random.default_rng([self.seed, n]).zipf(1.5, 9) % 10


def make(tmp_path: Path) -> Config:
    config = parse_config({
        "run_dir": str(tmp_path / "run"),
        "model": {"layers": 2, "hidden": 16, "heads": 2, "vocab_size": 10, "norm": "hybrid_star"},
        "data": {"sequence_length": 8, "train": "t", "valid": str(tmp_path / "valid")},
        "train": {"steps": STEPS, "micro_batch": 2, "global_batch": BATCH, "eval_samples": VALID},
        "optimizer": {"lr": 1e-3}})
    writer = MetricsWriter(config.run_dir)
    for step in range(1, STEPS + 1):
        row = {"step": step, "tokens": step * BATCH * 8, "loss": 2.5 - 0.2 * step}
        writer.step({**dict.fromkeys(STEP_FIELDS, 0.5), **row})
    writer.evaluation(3, "valid", 9.0)
    writer.evaluation(STEPS, "valid", 1.25)
    writer.close()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    meta = DatasetMeta(TokenizerMeta("ByteTokenizer", None, None, 10, None), documents=1, skipped=0,
                       tokens=100, eod_tokens=1, text_bytes=310, dtype="uint16", bin_sha256="")
    meta_path(tmp_path / "valid").write_bytes(meta.to_json())
    return config


def test_numbers_are_of_exactly_the_samples_seen(tmp_path) -> None:
    config, train, valid = make(tmp_path), Stream(0), Stream(1)
    assert demo_report.last_evaluation(Path(config.run_dir)) == (STEPS, 1.25)
    report = demo_report.make_report(config, STEPS, 1.25, train, valid)
    assert train.asked == set(range(STEPS * BATCH)) and valid.asked == set(range(VALID))
    seen, held_out = np.stack([train[n] for n in range(24)]), np.stack([valid[n] for n in range(5)])
    expected = fit_baselines(seen, held_out, 10)
    assert report["baselines"]["bigram"] == expected.bigram
    assert report["baselines"]["train_tokens"] == STEPS * config.tokens_per_step == report["tokens"]
    assert report["bits_per_byte"] == pytest.approx(1.25 / math.log(2) / 3.1)
    assert report["below_bigram"] == (1.25 < expected.bigram)


def test_a_small_validation_set_is_seen_once(tmp_path) -> None:
    config, valid = make(tmp_path), Stream(1)
    valid.samples_per_epoch = 3
    assert demo_report.make_report(config, 1, 1.25, Stream(0), valid)["baselines"]["valid_tokens"] == 3 * 8


def test_verdict_follows_the_numbers() -> None:
    report = {"step": 3, "tokens": 96, "validation_loss": 4.38, "bytes_per_token": None,
              "baselines": {"unigram": 6.24, "bigram": 4.47}}
    assert "0.090 nats below the bigram" in demo_report.table(report)[-1]
    assert "0.030 nats above the bigram" in demo_report.table({**report, "validation_loss": 4.5})[-1]


def test_the_whole_report(tmp_path, monkeypatch, capsys) -> None:
    config = make(tmp_path)
    streams = types.SimpleNamespace(train=Stream(0), valid=Stream(1))
    monkeypatch.setattr(demo_report, "open_datasets", lambda config: streams)
    monkeypatch.setitem(sys.modules, "megnorm.sample", types.SimpleNamespace(
        continuation=lambda run_dir, prompt, tokens, temperature: f"f({tokens})\n    return 1"))
    assert demo_report.main([config.run_dir, "--prompt", "def ", "--sample-tokens", "7"]) == 0
    out = capsys.readouterr().out
    for words in ("after 6 steps, 192 tokens", "this model, validation", "  | def f(7)\n  |     return 1",
                  f"model.norm=peri run_dir={config.run_dir}-peri", "parallel.tp=2", "train.steps=12"):
        assert words in out, words
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["sample"]["continuation"].startswith("f(7)") and report["validation_loss"] == 1.25
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_validation_is_told(tmp_path) -> None:
    MetricsWriter(tmp_path).close()
    with pytest.raises(ValueError, match="no validation loss"):
        demo_report.last_evaluation(tmp_path)
