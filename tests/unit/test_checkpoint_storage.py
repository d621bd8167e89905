"""The folder of checkpoints: what counts as complete, what is kept, from where a run resumes."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from megnorm.checkpoint import storage
from megnorm.checkpoint.manifest import FILE_NAME, Entry, File, Manifest, Part, Unreadable, decode, encode
from megnorm.checkpoint.resume import CheckpointError, choose, compare_configs
from megnorm.config import parse_config

DATA = {"part-00-00-000.safetensors": b"a" * 1000, "part-00-01-000.safetensors": b"b" * 2000}


def make(run_dir, step):
    """A complete checkpoint, saved as the real one is."""
    serial = storage.prepare(run_dir, step)
    files = {name: File(size=len(data), sha256=hashlib.sha256(data).hexdigest())
             for name, data in DATA.items()}
    parts = tuple(Part(file=name, start=4 * i, stop=4 * i + 4) for i, name in enumerate(DATA))
    for name, data in DATA.items():
        storage.write_file(storage.temporary(run_dir, step) / name, data)
    manifest = Manifest(serial=serial, step=step, optimizer_step=step, layout={"tp": 2}, files=files,
                        trainer={"step": step, "loss": 1.25, "run": "r"}, config={"model": {"layers": 2}},
                        tensors={"w": Entry(shape=(8, 3), dim=0, keys=("master",), parts=parts)})
    path = storage.publish(run_dir, step, encode(manifest))
    storage.point(run_dir, step)
    return path


def steps(run_dir):
    return sorted(int(path.name.removeprefix("step-")) for path in storage.candidates(run_dir))


def test_a_manifest_reads_back_equal_and_notices_a_changed_digit(tmp_path):
    path = make(tmp_path, 7)
    manifest = storage.verify(path)
    assert manifest.trainer == {"step": 7, "loss": 1.25, "run": "r"} and manifest.serial == 1
    text = (path / FILE_NAME).read_text()
    assert json.loads(text)["complete"] is True
    with pytest.raises(Unreadable, match="checksum"):
        decode(text.replace("1.25", "1.26").encode())
    assert (storage.checkpoints_dir(tmp_path) / "latest").read_text() == "step-00000007\n"


@pytest.mark.parametrize("change, message", [
    (lambda m: m["tensors"]["w"]["parts"].pop(), "slices end at 4 of 8"),
    (lambda m: m["tensors"]["w"]["parts"].reverse(), "slice 4:8 follows"),
    (lambda m: m["tensors"]["w"].update(dim=2), "cut along dimension 2"),
    (lambda m: m["tensors"]["w"].update(dim=None), "2 parts of a tensor that is not cut"),
    (lambda m: m["files"].pop("part-00-01-000.safetensors"), "not a listed file"),
    (lambda m: m["files"].update({"../x": {"size": 1, "sha256": ""}}), "not the name of a file"),
    (lambda m: m.update(version=2), "version"),
    (lambda m: m.update(complete=False), "complete"),
    (lambda m: m.pop("trainer"), "trainer"),
    (lambda m: m.update(step="7"), "step"),
])
def test_a_manifest_that_is_not_valid_says_why(tmp_path, change, message):
    content = json.loads((make(tmp_path, 7) / FILE_NAME).read_text())
    change(content)
    with pytest.raises(Unreadable, match=message):
        decode(json.dumps(content).encode())


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


FAULTS = {
    "truncated": (lambda p: os.truncate(p / "part-00-01-000.safetensors", 1999), "1999 bytes, not 2000"),
    "one bit": (lambda p: flip(p / "part-00-01-000.safetensors", 1234), "checksum"),
    "missing": (lambda p: (p / "part-00-00-000.safetensors").unlink(), "No such file"),
    "no manifest": (lambda p: (p / FILE_NAME).unlink(), "json: No such file"),
    "half a manifest": (lambda p: os.truncate(p / FILE_NAME, 300), "not valid"),
    "empty manifest": (lambda p: (p / FILE_NAME).write_text(""), "not valid"),
    "a bit of the manifest": (lambda p: flip(p / FILE_NAME, -3), "manifest.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, fault):
    damage, reason = FAULTS[fault]
    make(tmp_path, 10)
    newest = make(tmp_path, 20)
    damage(newest)
    found = storage.find_newest(tmp_path)
    assert found.path.name == "step-00000010"
    [(path, why)] = found.skipped
    assert path == newest and reason in why
    assert choose(tmp_path, "auto") == found
    with pytest.raises(CheckpointError, match="step-00000020 is not a complete checkpoint"):
        choose(tmp_path, str(newest))


def test_none_complete_is_an_error_not_a_start_at_zero(tmp_path):
    (make(tmp_path, 10) / FILE_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints .*\(step-00000010: no readable"):
        choose(tmp_path, "auto")
    with pytest.raises(CheckpointError, match="beside the checkpoints"):
        choose(tmp_path, "none")


def test_an_empty_folder_and_what_a_kill_leaves_start_at_zero(tmp_path):
    for wanted in ("auto", "none"):
        assert choose(tmp_path / "new", wanted).path is None
    storage.prepare(tmp_path, 5)
    for wanted in ("auto", "none"):
        assert choose(tmp_path, wanted).path is None
    storage.prepare(tmp_path, 6)
    assert [p.name for p in storage.checkpoints_dir(tmp_path).iterdir()] == [".tmp-step-00000006"]


def test_a_path_may_be_a_step_or_a_run(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    first, second = make(run, 10), make(run, 20)
    assert choose(run, str(first)).path == first  # back to an older step of the same run
    for place in (run, run / "checkpoints"):
        assert choose(other, str(place)).path == second
    with pytest.raises(CheckpointError, match="no such folder"):
        choose(other, str(run / "checkpoints" / "step-00000030"))
    other.mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        choose(tmp_path / "new", str(other))


def test_a_path_elsewhere_does_not_overwrite_the_run(tmp_path):
    make(tmp_path / "run", 10)
    theirs = make(tmp_path / "other", 5)
    with pytest.raises(CheckpointError, match="would overwrite the checkpoints"):
        choose(tmp_path / "run", str(theirs))


def test_the_last_k_and_every_mth_are_kept(tmp_path):
    for step in range(5, 45, 5):
        make(tmp_path, step)
        storage.prune(tmp_path, keep_last=2, keep_every=15)
    assert steps(tmp_path) == [15, 30, 35, 40]
    make(tmp_path, 45)
    removed = storage.prune(tmp_path, keep_last=1, keep_every=0)
    assert removed == [tmp_path / "checkpoints" / f"step-{step:08d}" for step in (40, 35, 30, 15)]


@pytest.mark.parametrize("fault", ["missing", "no manifest", "half a manifest", "truncated"])
def test_what_is_not_complete_does_not_count_as_kept(tmp_path, fault):
    make(tmp_path, 10)
    FAULTS[fault][0](make(tmp_path, 20))
    storage.prune(tmp_path, keep_last=1, keep_every=0)
    assert storage.find_newest(tmp_path).path.name == "step-00000010"


def test_newest_is_the_last_saved_also_after_a_return_to_an_older_step(tmp_path):
    """A run that went back from step 30 to 10 and has saved 20 since then goes on from 20."""
    for step in (10, 20, 30, 20):
        make(tmp_path, step)
    assert storage.find_newest(tmp_path).path.name == "step-00000020"
    storage.prune(tmp_path, keep_last=2, keep_every=0)
    assert steps(tmp_path) == [20, 30]
    make(tmp_path, 25)
    storage.prune(tmp_path, keep_last=2, keep_every=0)
    assert steps(tmp_path) == [20, 25]


def test_a_step_saved_again_is_replaced(tmp_path):
    make(tmp_path, 10)
    make(tmp_path, 10)
    storage.prune(tmp_path, keep_last=3, keep_every=0)
    names = sorted(path.name for path in storage.checkpoints_dir(tmp_path).iterdir())
    assert names == ["latest", "step-00000010"]
    assert storage.read_manifest(storage.candidates(tmp_path)[0]).serial == 2


CONFIG = {
    "run_dir": "runs/a",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab_size": 512, "norm": "hybrid_star"},
    "data": {"sequence_length": 64, "train": [[1.0, "data/code"], [2.0, "data/text"]], "valid": "data/valid"},
    "train": {"steps": 10, "micro_batch": 1, "global_batch": 4},
    "optimizer": {"lr": 0.001},
}


def config_with(*changes):
    raw = json.loads(json.dumps(CONFIG))
    for key, value in changes:
        *sections, name = key.split(".")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return parse_config(raw).model_dump(mode="json")


def test_equal_configs_have_no_difference():
    saved = json.loads(json.dumps(config_with()))
    assert compare_configs(saved, config_with()) == ([], [])


@pytest.mark.parametrize("key, value", [
    ("model.layers", 4), ("model.hidden", 128), ("model.heads", 8), ("model.kv_heads", 2),
    ("model.head_size", 32), ("model.ffn_hidden", 512), ("model.vocab_size", 700), ("model.pad_vocab_to", 64),
    ("model.tie_embeddings", False), ("model.activation", "gelu"), ("model.bias", True),
    ("model.norm", "pre"),
    ("model.norm", {"scheme": "hybrid_star", "overrides": {"1": {"attention": {"in_norm": "default"}}}}),
    ("data.sequence_length", 128), ("seed", 1), ("data.train", [[1.0, "data/code"], [3.0, "data/text"]]),
    ("data.train", "data/code"), ("data.order", "megatron"), ("data.packing", "best_fit"), ("train.global_batch", 16),
])
def test_what_cannot_be_resumed_is_fatal_with_the_reason(key, value):
    changes, fatal = compare_configs(config_with(), config_with((key, value)))
    assert len(fatal) >= 1 and len(changes) >= len(fatal)
    assert any(line.startswith(key) and " -> " in line and line.endswith(")") for line in fatal)


def test_other_changes_are_shown():
    changes, fatal = compare_configs(config_with(), config_with(
        ("optimizer.lr", 0.002), ("train.steps", 20), ("parallel.tp", 2), ("train.dtype", "bf16"),
        ("data.valid", "elsewhere/valid"), ("data.train", [[1.0, "moved/code"], [2.0, "moved/text"]]),
        ("model.rope_theta", 5e5), ("train.eval_samples", 128), ("run_dir", "runs/b")))
    assert fatal == []
    assert "optimizer.lr: 0.001 -> 0.002" in changes and "train.steps: 10 -> 20" in changes
    assert [line.split(":")[0] for line in changes] == [
        "data.train", "data.valid", "model.rope_theta", "optimizer.lr", "parallel.tp", "run_dir",
        "train.dtype", "train.eval_samples", "train.steps"]
    _, fatal = compare_configs(config_with(), config_with(("train.steps", None), ("train.tokens", 10**6)))
    assert fatal == []


def test_the_mixture_may_change_where_nothing_was_seen_yet():
    later = config_with(("data.changes", [{"at_sample": 100, "sources": [[1.0, "data/code"], [1.0, "data/text"]]}]))
    assert compare_configs(config_with(), later, 100)[1] == []
    (fatal,) = compare_configs(config_with(), later, 101)[1]
    assert "from sample 100 on, of which 101 are seen" in fatal


def test_megatrons_order_depends_on_the_length():
    short, long = (config_with(("data.order", "megatron"), ("train.steps", steps)) for steps in (10, 20))
    assert [line.split(":")[0] for line in compare_configs(short, long)[1]] == ["train.steps"]


def test_another_kernel_of_the_norms_is_no_other_model():
    other = config_with(("model.norm", {"scheme": config_with()["model"]["norm"]["scheme"], "backend": "torch"}))
    changes, fatal = compare_configs(config_with(), other)
    assert changes == ["model.norm.backend: auto -> torch"] and fatal == []


def test_looking_for_a_checkpoint_loads_no_torch():
    code = ("import sys, megnorm.checkpoint.storage, megnorm.checkpoint.resume; "
            "sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
