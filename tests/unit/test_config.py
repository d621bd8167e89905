"""Configuration: what is accepted, what a mistake is answered with, and that a dump reads back equal."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megnorm.config import ConfigError, dump_config, load_config, parse_config
from megnorm.config.config import read_yaml
from megnorm.norms import placement_of, resolve, select_layers

TEXT = """\
run_dir: runs/a
model:
  layers: 4
  hidden: 64
  heads: 4
  norm: hybrid_star
data:
  sequence_length: 32
  train: data/a
train:
  steps: 10
  micro_batch: 2
  global_batch: 8
optimizer:
  lr: 3e-4
"""


@pytest.fixture
def write(tmp_path):
    def writing(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path
    return writing


@pytest.fixture
def load(write):
    def loading(*overrides, text=TEXT):
        return load_config(write(text), list(overrides))
    return loading


def refusal(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# What is accepted


def test_a_small_file_is_filled_up(load):
    config = load()
    model = config.model
    assert (model.kv_heads, model.head_size, model.ffn_hidden) == (4, 16, 192)  # 8/3 64 = 170.7, up to 64s
    assert model.norm.scheme == "hybrid_star"
    assert config.optimizer.lr == 3e-4 and isinstance(config.optimizer.lr, float)
    assert config.data.train == ((1.0, "data/a"),)
    assert config.tokens_per_step == 256 and config.total_steps == 10
    assert load("model.activation=gelu").model.ffn_hidden == 256


@pytest.mark.parametrize(("vocab", "pad", "rows"), [(29, 8, 32), (32, 8, 32), (33, 8, 40), (1, 128, 128)])
def test_padded_vocabulary(load, vocab, pad, rows):
    assert load(f"model.vocab_size={vocab}", f"model.pad_vocab_to={pad}").model.padded_vocab == rows


@pytest.mark.parametrize(("tokens", "steps"), [(2560, 10), (2561, 11), (1, 1)])
def test_a_duration_in_tokens_is_rounded_up_to_steps(load, tokens, steps):
    assert load("train.steps=null", f"train.tokens={tokens}").total_steps == steps


def test_overrides_reach_every_section(load):
    config = load("train.steps=20", "model.norm=pre", "seed=7", "optimizer.betas=[0.8, 0.9]",
                  "train.dtype=bf16", "checkpoint.every=5", "data.train=[[2, data/b], [0.5, data/c]]")
    assert config.train.steps == 20 and config.model.norm.scheme == "pre" and config.seed == 7
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.train.dtype == "bf16" and config.checkpoint.every == 5
    assert config.data.train == ((2.0, "data/b"), (0.5, "data/c"))


def test_a_norm_in_short_takes_options_by_override(load):
    norm = load("model.norm.kind=layer", "model.norm.eps=1e-6").model.norm
    assert (norm.scheme, norm.kind, norm.eps) == ("hybrid_star", "layer", 1e-6)


def test_the_last_override_of_a_value_counts(load):
    assert load("seed=1", "seed=2").seed == 2


LAYER_ZERO = TEXT.replace("  norm: hybrid_star\n", """\
  norm:
    scheme: pre
    overrides:
      0:
        attention: {in_norm: none}
      2:4:
        ffn: {out_norm: default}
""")


def test_layers_in_yaml_and_on_the_command_line_are_the_same_layers(load):
    """Layer 0 is a number in YAML and text in an override; 2:4 is not minutes."""
    norm = load("model.norm.overrides.0.ffn.in_norm=none", text=LAYER_ZERO).model.norm
    assert norm.overrides == {"0": {"attention": {"in_norm": "none"}, "ffn": {"in_norm": "none"}},
                              "2:4": {"ffn": {"out_norm": "default"}}}
    blocks = resolve(norm, 4).blocks
    assert blocks[0].attention.in_norm is None and blocks[0].ffn.in_norm is None
    assert [block.ffn.out_norm is not None for block in blocks] == [False, False, True, True]


# YAML


@pytest.mark.parametrize(("text", "value"), [
    ("3e-4", 3e-4), ("3E-4", 3e-4), ("1.5e-3", 1.5e-3), (".5", 0.5), ("-2.0", -2.0), ("1e-08", 1e-8),
    ("2e9", 2_000_000_000), ("1.5e9", 1_500_000_000), ("100_000", 100_000), ("0x10", 16), ("-3", -3),
    ("0", 0), ("4:8", "4:8"), ("12:30:45", "12:30:45"),
    ("2026-11-30", "2026-11-30"), ("2026-13-45", "2026-13-45"),
    ("010", "010"), ("1e", "1e"), ("e5", "e5"), ("0x_", "0x_"), ("1.2.3", "1.2.3"),
    ("true", True), ("null", None), ("", None), ("'3e-4'", "3e-4"),
])
def test_scalars(text, value):
    read = read_yaml(f"key: {text}", "here")["key"]
    assert read == value and type(read) is type(value)


def test_merge_keys_and_anchors():
    text = "base: &base {a: 1, b: 2}\nhere:\n  <<: *base\n  b: 3"
    assert read_yaml(text, "here")["here"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\na: 2", "f.yaml: line 2: the key 'a' stands twice"),
    ("a:\n  b: 1\n  c: 2\n  b: 3", "f.yaml: line 4: the key 'b' stands twice"),
    ("hidden: {{SIZE}}", "f.yaml: line 1: a key must be a word or a number"),
    ("? [1, 2]\n: 3", "f.yaml: line 1: a key must be a word or a number"),
    ("a: [1", "f.yaml: line 1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("a: 1\n\tb: 2", "f.yaml: line 2: not valid YAML: found character '\\t' that cannot start any token"),
    ("a: !!python/object/apply:os.system [echo]",
     "f.yaml: line 1: not valid YAML: could not determine a constructor for the tag "
     "'tag:yaml.org,2002:python/object/apply:os.system'"),
])
def test_bad_yaml(text, message):
    assert refusal(read_yaml, text, "f.yaml") == message


# Refusals: one line each, golden


ERRORS = {
    "modle.layers=3": "unknown key 'modle'; did you mean 'model'?",
    "model.hiden=3": "unknown key 'model.hiden'; did you mean 'hidden'?",
    "train.microbatch=3": "unknown key 'train.microbatch'; did you mean 'micro_batch'?",
    "model.norm.epsilon=1e-5": "unknown key 'model.norm.epsilon'; did you mean 'eps'?",
    "model.layers=two": "model.layers='two': input should be a valid integer",
    "model.layers=2.0": "model.layers=2.0: input should be a valid integer",
    "model.layers=true": "model.layers=True: input should be a valid integer",
    "model.layers=0": "model.layers=0: input should be greater than 0",
    "model.layers=null": "model.layers=None: input should be a valid integer",
    "model.layers=010": "model.layers='010': input should be a valid integer",
    "run_dir=3": "run_dir=3: input should be a valid string",
    "optimizer.lr=.inf": "optimizer.lr=inf: input should be a finite number",
    "optimizer.lr=.nan": "optimizer.lr=nan: input should be a finite number",
    "optimizer.lr=-1e-3": "optimizer.lr=-0.001: input should be greater than 0",
    "optimizer.lr='3e-4'": "optimizer.lr='3e-4': input should be a valid number",
    "train.dtype=fp8": "train.dtype='fp8': input should be 'fp32' or 'bf16'",
    "model.heads=5": "model: hidden=64 is not divisible by heads=5: change one of them, or give head_size",
    "model.kv_heads=3": "model: heads=4 is not divisible by kv_heads=3: kv_heads may be one of [1, 2, 4]",
    "model.head_size=15": "model: head_size=15 is odd: rotary positions turn pairs of channels",
    "train.tokens=100": "train: give the duration either as steps or as tokens",
    "train.steps=null": "train: give the duration either as steps or as tokens",
    "data.sources=x": "data: name the data either as train (with valid, test) or as sources with split",
    "schedule.decay_steps=3":
        "schedule: kind=wsd takes one of decay_steps and decay_tokens, the other kinds none of them",
}


def test_documents_that_would_share_places_of_experts(load):
    moe = "model.moe={experts: 4, top_k: 1, ffn_hidden: 32, capacity: 1.5}"
    assert refusal(load, moe, "data.mask_documents=true").endswith(
        "data.mask_documents=true doesn't go with model.moe.capacity=1.5: the earlier documents of a row would take "
        "places of the later ones; set capacity to none")
    load(moe)
    load(moe.replace("1.5", "none"), "data.mask_documents=true")


def test_no_positions(load):
    assert load("model.positions=none", "model.head_size=15").model.head_size == 15
    assert refusal(load, "model.positions=none", "data.reset_positions=true").endswith(
        "data.reset_positions=true has nothing to reset with model.positions=none: leave one of them out")


@pytest.mark.parametrize("override", ERRORS)
def test_golden_errors(load, tmp_path, override):
    message = refusal(load, override)
    assert message.startswith(f"{tmp_path / 'run.yaml'}: ")
    lines = message.removeprefix(f"{tmp_path / 'run.yaml'}: ").splitlines()
    assert lines == [ERRORS[override]]


def test_several_errors_are_one_message(load):
    message = refusal(load, "model.layers=0", "train.micro_batch=x", "seeds=3")
    assert [line.strip() for line in message.splitlines()[1:]] == [
        "model.layers=0: input should be greater than 0",
        "train.micro_batch='x': input should be a valid integer",
        "unknown key 'seeds'; did you mean 'seed'?"]


def test_an_unknown_key_that_resembles_none_lists_the_known(load):
    assert refusal(load, "train.zzz=1").endswith(
        "unknown key 'train.zzz'; known here: " + ", ".join(load().train.model_dump()))


def test_a_missing_section_and_a_missing_value(load):
    assert refusal(load, text=TEXT.replace("optimizer:\n  lr: 3e-4\n", "")).endswith("'optimizer' is missing")
    assert refusal(load, text=TEXT.replace("  hidden: 64\n", "")).endswith("'model.hidden' is missing")


@pytest.mark.parametrize(("override", "message"), [
    ("train.steps", "override 'train.steps' is not of the form key.sub=value"),
    ("=3", "override '=3' is not of the form key.sub=value"),
    ("seed.x=3", "override 'seed.x=3': 'seed' is the value 7, not a section"),
    ("train.steps=[1", "override 'train.steps=[1': line 1: not valid YAML: expected ',' or ']', but got "
                       "'<stream end>'"),
])
def test_malformed_overrides(load, override, message):
    assert refusal(load, "seed=7", override) == message


def test_a_missing_file_names_the_nearest(write):
    path = write(TEXT)
    missing = path.with_name("runn.yaml")
    assert refusal(load_config, missing) == f"no configuration file {missing}; did you mean {path}?"
    assert refusal(load_config, path.parent).startswith(f"cannot read {path.parent}: ")
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(load_config, path).startswith(f"cannot read {path}: ")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_a_file_that_is_no_mapping(load, text):
    assert "a configuration is a mapping of sections, not " in refusal(load, text=text)


def test_a_layer_given_as_number_and_as_text(load):
    text = LAYER_ZERO.replace("      2:4:", "      '0':")
    assert "the layers '0' stand twice" in refusal(load, text=text)


# Norm overrides


SLOTS = {
    '{"9": {ffn: {in_norm: none}}}':
        "layer 9 is beyond the depth; with layers=4 the numbers go from -4 to 3",
    '{"2:9": {ffn: {in_norm: none}}}':
        "the range '2:9' is empty or beyond the depth (layers=4); numbers go from -4 to 4",
    '{"3:1": {ffn: {in_norm: none}}}':
        "the range '3:1' is empty or beyond the depth (layers=4); numbers go from -4 to 4",
    '{"all": {ffn: {in_norm: none}}}': "can't read the layers 'all'; write",
    '{"first 0": {ffn: {in_norm: none}}}': "'first 0' names 0 of 4 layers; give a whole number from 1 to 4",
    '{"first 5": {ffn: {in_norm: none}}}': "'first 5' names 5 of 4 layers",
    '{"last 10%": {ffn: {in_norm: none}}}': "'last 10%' names 0.4 of 4 layers",
    '{"0": {ffn: {in_nrm: none}}}': "unknown slot; did you mean 'in_norm'?",
    '{"0": {ffn: {q_norm: default}}}': "unknown slot",
    '{"0": {attention: {mid_norm: default}}}': "unknown slot",
    '{"0": {ffn: {in_norm: maybe}}}': "in_norm='maybe': write default, none, or a mapping",
    '{"0": {ffn: {in_norm: {kind: batch}}}}': "in_norm.kind='batch': input should be",
    '{"0": {ffn: {in_norm: {epsilon: 1}}}}':
        "in_norm.epsilon: unknown key of a norm 'epsilon'; did you mean 'eps'?",
    '{"0": {ffn: {residual_from: branch}}}': "residual_from='branch': input should be 'raw' or 'normed'",
}


@pytest.mark.parametrize("overrides", SLOTS)
def test_bad_norm_overrides(load, overrides):
    config = load("model.norm=pre", f"model.norm.overrides={overrides}")
    message = refusal(resolve, config.model.norm, 4)
    assert message.startswith("model.norm.overrides")
    assert SLOTS[overrides] in message
    assert "\n" not in message


def test_an_unknown_part_of_a_block(load):
    message = refusal(load, 'model.norm.overrides={"0": {atention: {in_norm: none}}}')
    assert "atention" in message and "'attention' or 'ffn'" in message


def test_an_unknown_scheme_names_the_nearest(load):
    message = refusal(resolve, load("model.norm=hybrid_sta").model.norm, 4)
    assert message == "model.norm: unknown scheme 'hybrid_sta'; did you mean 'hybrid_star'?"
    assert "known: " in refusal(resolve, load("model.norm=zzz").model.norm, 4)


def test_later_overrides_win_and_default_takes_the_sections_options(load):
    norm = load("model.norm={scheme: pre, kind: layer, eps: 1e-3, overrides: {'1:': {ffn: {in_norm: none}}, "
                "'2': {ffn: {in_norm: default}, attention: {q_norm: {scope: all_heads}}}, "
                "'-1': {ffn: {in_norm: {eps: 1e-6}, residual_scale: 2}}}}").model.norm
    blocks = resolve(norm, 4).blocks
    assert blocks[0].ffn.in_norm == blocks[2].ffn.in_norm and blocks[2].ffn.in_norm.kind == "layer"
    assert blocks[1].ffn.in_norm is None
    assert blocks[2].ffn.in_norm.eps == 1e-3 and blocks[3].ffn.in_norm.eps == 1e-6
    assert blocks[2].attention.q_norm.scope == "all_heads" and blocks[2].attention.q_norm.kind == "layer"
    assert blocks[3].ffn.residual_scale == type(blocks[3].ffn)(residual_scale=2.0).residual_scale


# Layer selectors against a search over all layers


DEPTHS = st.integers(1, 120)


def selected(selector, layers):
    try:
        return list(select_layers(selector, layers))
    except ConfigError as error:
        assert repr(selector) in str(error) or "beyond the depth" in str(error)
        return None


@given(DEPTHS, st.integers(-130, 130))
def test_a_number(layers, number):
    right = [layer for layer in range(layers) if layer == number or layer - layers == number]
    assert selected(str(number), layers) == (right or None)


@given(DEPTHS, st.none() | st.integers(-130, 130), st.none() | st.integers(-130, 130))
def test_a_range(layers, start, stop):
    def place(bound, default):
        if bound is None:
            return default
        return bound + layers if bound < 0 else bound

    first, last = place(start, 0), place(stop, layers)
    right = [layer for layer in range(layers) if first <= layer < last]
    inside = all(bound is None or -layers <= bound <= layers for bound in (start, stop))
    text = f"{'' if start is None else start}:{'' if stop is None else stop}"
    assert selected(text, layers) == (right if right and inside else None)


@given(DEPTHS, st.sampled_from(["first", "last"]), st.integers(0, 130))
def test_the_first_or_last_k(layers, end, count):
    right = [layer for layer in range(layers) if (layer if end == "first" else layers - 1 - layer) < count]
    assert selected(f"{end} {count}", layers) == (right if 0 < count <= layers else None)


@given(DEPTHS, st.sampled_from(["first", "last"]), st.integers(0, 1100))
def test_a_share_of_the_depth(layers, end, tenths):
    """floor(share L) layers, exactly: 29% of 100 are 29, which binary fractions miss."""
    right = [layer for layer in range(layers)
             if 1000 * ((layer if end == "first" else layers - 1 - layer) + 1) <= tenths * layers]
    text = f"{end} {tenths // 10}.{tenths % 10}%" if tenths % 10 else f"{end} {tenths // 10}%"
    assert selected(text, layers) == (right if right and tenths <= 1000 else None)


@given(st.text(max_size=8), DEPTHS)
def test_any_text_is_layers_or_one_message(text, layers):
    found = selected(text, layers)
    assert found is None or set(found) <= set(range(layers))


# Dump and load


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12) | \
    st.from_regex(r"[0-9+.:eE_x-]{1,8}", fullmatch=True)
POSITIVE = st.floats(1e-12, 1e12)


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS, POSITIVE, POSITIVE, st.sampled_from(["pre", "post", "hybrid_star"]),
       st.dictionaries(st.sampled_from(["0", "-1", "1:3", "first 2", "last 50%"]),
                       st.dictionaries(st.sampled_from(["in_norm", "out_norm"]),
                                       st.sampled_from(["none", "default", {"eps": 1e-3, "kind": "layer"}])),
                       max_size=3))
def test_a_dump_reads_back_equal(run_dir, tokenizer, lr, weight, scheme, slots):
    raw = yaml.safe_load(TEXT)
    raw["run_dir"], raw["optimizer"] = run_dir, {"lr": lr}
    raw["data"] |= {"tokenizer": tokenizer, "train": [[weight, run_dir], [1, "b"]]}
    overrides = {key: {"ffn": value} for key, value in slots.items()}
    raw["model"]["norm"] = {"scheme": scheme, "overrides": overrides}
    config = parse_config(raw)
    again = parse_config(read_yaml(dump_config(config), "dump"))
    assert again == config
    assert dump_config(again) == dump_config(config)
    assert list(again.model.norm.overrides) == list(config.model.norm.overrides)


def test_a_dump_is_read_alike_by_any_yaml_reader(load):
    config = load("run_dir='3e-4'", text=LAYER_ZERO)
    assert yaml.safe_load(dump_config(config))["run_dir"] == "3e-4"
    assert set(yaml.safe_load(dump_config(config))["model"]["norm"]["overrides"]) == {"0", "2:4"}


def test_a_configuration_can_not_be_changed(load):
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 3


CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = [path for path in sorted(CONFIGS.glob("**/*.yaml")) if path.parent.name != "sweeps"]  # these have their own


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_reads_back_equal(path):
    config = load_config(path)
    placement_of(config.model)
    assert parse_config(read_yaml(dump_config(config), "dump")) == config
