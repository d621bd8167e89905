"""Slots of the model and of layers as a user writes them; the resolved placement in a run's config."""

import copy
from pathlib import Path

import pytest

from megnorm.checkpoint.resume import CheckpointError
from megnorm.config import ConfigError, NormConfig, dump_config, load_config, parse_config, parse_norm
from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm, Placement, Scale
from megnorm.norms import SCHEMES, read_placement, resolve, save_placement, with_placement
from megnorm.prepare import check_run_dir

N, H = Norm(), HeadNorm()
RUN = {
    "run_dir": "r",
    "model": {"layers": 4, "hidden": 64, "heads": 4, "vocab_size": 100},
    "data": {"sequence_length": 8, "train": "t"},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 1, "micro_batch": 1, "global_batch": 1},
}

# part, slot, what is written, what stands in the slot
SLOTS = [
    (part, slot, text, value)
    for part in ("attention", "ffn")
    for slot, text, value in (
        ("in_norm", "none", None),
        ("in_norm", {"kind": "layer", "bias": True}, Norm(kind="layer", bias=True)),
        ("in_norm", {"kind": "l2", "scale": 0.5}, Norm(kind="l2", scale=0.5)),
        ("in_norm", {"zero_centred": True, "gain_init": 0.5}, Norm(zero_centred=True, gain_init=0.5)),
        ("out_norm", "default", N),
        ("out_norm", {"gain": "none"}, Norm(gain="none")),
        ("post_norm", {"kind": "dyt", "alpha_init": 0.2}, Norm(kind="dyt", alpha_init=0.2)),
        ("residual_from", "normed", "normed"),
        ("residual_scale", 2, Scale(value=2.0)),
        ("residual_scale", {"learned": "vector", "profiled": True}, Scale(learned="vector", profiled=True)),
        (
            "branch_scale",
            {"value": 0.1, "learned": "scalar", "ramp_steps": 5},
            Scale(value=0.1, learned="scalar", ramp_steps=5),
        ),
    )
]
SLOTS += [
    ("attention", slot, text, value)
    for slot in ("q_norm", "k_norm", "v_norm", "ctx_norm")
    for text, value in (
        ("default", H),
        ({"scope": "all_heads"}, HeadNorm(scope="all_heads")),
        ({"gain": "per_head"}, HeadNorm(gain="per_head")),
    )
]
SLOTS += [("attention", slot, {"rope": "after"}, HeadNorm(rope="after")) for slot in ("q_norm", "k_norm")]
SLOTS += [
    ("attention", "head_scale", "after", "after"),
    ("attention", "gate", "head", "head"),
    ("ffn", "mid_norm", "default", N),
]


@pytest.mark.parametrize("part, slot, text, value", SLOTS)
def test_one_layer_gets_one_slot(part, slot, text, value):
    plain = resolve(NormConfig(scheme="pre"), 4)
    changed = resolve(NormConfig(scheme="pre", overrides={"2": {part: {slot: text}}}), 4)
    assert getattr(getattr(changed.blocks[2], part), slot) == value
    assert [a == b for a, b in zip(plain.blocks, changed.blocks, strict=True)] == [True, True, False, True]
    back = {"2": {part: {slot: text}}, "-2": {part: {slot: plain_text(plain.blocks[2], part, slot)}}}
    assert resolve(NormConfig(scheme="pre", overrides=back), 4) == plain


def plain_text(block, part, slot):
    value = getattr(getattr(block, part), slot)
    return value.value if isinstance(value, Scale) else "default" if value == N else value


def test_every_slot_of_the_vocabulary_is_tried():
    for part, kind in (("attention", AttentionSlots), ("ffn", FFNSlots)):
        assert {slot for p, slot, _, _ in SLOTS if p == part} == set(kind.model_fields)


@pytest.mark.parametrize(
    "slot, text, value",
    [
        ("embed_norm", "default", N),
        ("embed_norm", {"gain": "none"}, Norm(gain="none")),
        ("final_norm", "none", None),
        ("final_norm", None, None),
        ("embed_scale", 3, Scale(value=3.0)),
        ("embed_scale", {"value": 2.0, "learned": "scalar"}, Scale(value=2.0, learned="scalar")),
        ("streams", "residual", "residual"),
        ("attention_scale", 0.5, 0.5),
        ("attention_softcap", 20, 20),
        ("final_softcap", 15.0, 15.0),
    ],
)
def test_model_slot(slot, text, value):
    plain = resolve(NormConfig(scheme="pre"), 2)
    changed = resolve(NormConfig(scheme="pre", **{slot: text}), 2)
    assert getattr(changed, slot) == value != getattr(plain, slot)
    assert changed.model_copy(update={slot: getattr(plain, slot)}) == plain


def test_model_slots_switch_a_schemes_off():
    changed = resolve(
        NormConfig(scheme="gemma2", final_softcap="none", attention_softcap=None, embed_scale=1), 2, 64
    )
    assert changed.final_softcap is changed.attention_softcap is None and changed.embed_scale == Scale()


def test_custom_spells_the_slots_out():
    norm = NormConfig(
        scheme="custom",
        eps=1e-6,
        final_norm="default",
        overrides={
            ":": {
                "attention": {"in_norm": "default", "q_norm": {"scope": "all_heads"}},
                "ffn": {"mid_norm": "default"},
            },
            "last 25%": {"ffn": {"branch_scale": 0.5}},
        },
    )
    n = Norm(eps=1e-6)
    attention = AttentionSlots(in_norm=n, q_norm=HeadNorm(eps=1e-6, scope="all_heads"))
    plain, last = FFNSlots(mid_norm=n), FFNSlots(mid_norm=n, branch_scale=0.5)
    assert resolve(norm, 4) == Placement(
        final_norm=n,
        blocks=(*[Block(attention=attention, ffn=plain)] * 3, Block(attention=attention, ffn=last)),
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            ["overrides.0.ffn.in_nrom=default"],
            "overrides['0'].ffn.in_nrom: unknown slot; did you mean 'in_norm'?",
        ),
        (["overrides.0.ffn.q_norm=default"], "unknown slot"),
        (
            ["overrides.9.ffn.in_norm=default"],
            "layer 9 is beyond the depth; with layers=4 the numbers go from -4 to 3",
        ),
        (["overrides.0.fnn.in_norm=default"], "input should be 'attention' or 'ffn'"),
        (["overrides.0.ffn.in_norm={knd: rms}"], "unknown key of a norm 'knd'; did you mean 'kind'?"),
        (["overrides.0.ffn.in_norm={scope: head}"], "unknown key of a norm 'scope'"),
        (["overrides.0.ffn.in_norm={kind: rmss}"], "did you mean 'rms'?"),
        (["overrides.0.ffn.in_norm={gain: per_head}"], "'vector' or 'none'"),
        (["overrides.0.ffn.branch_scale={valu: 1}"], "unknown key 'valu'; did you mean 'value'?"),
        (["overrides.0.ffn.branch_scale=[]"], "write a number, or a mapping"),
        (["overrides.0.ffn.branch_scale=true"], "write a number, or a mapping"),
        (["overrides.0.ffn.branch_scale=.inf"], "finite"),
        (["overrides.0.ffn.residual_scale={profiled: true}"], "profiled=true needs learned"),
        (["overrides.0.attention.gate=elemen"], "did you mean 'element'?"),
        (["final_norm=[1]"], "model.norm.final_norm=[1]: write default, none, or a mapping"),
        (["attention_softcap=-1"], "model.norm.attention_softcap=-1: input should be greater than 0"),
        (["embed_scale={learned: vecto}"], "model.norm.embed_scale.learned='vecto'"),
        (["streams=two"], "input should be 'scheme', 'single' or 'residual'"),
        (["kind=rsm"], "input should be 'rms', 'layer', 'l2' or 'dyt'"),
        (["overrides.0.ffn.branch_scale=__import__('os').abort()"], "write a number, or a mapping"),
        (['overrides={"range(0,4)[0]": {ffn: {in_norm: none}}}'], "can't read the layers 'range(0,4)[0]'"),
    ],
)
def test_mistakes_are_one_message(changes, said):
    with pytest.raises(ConfigError) as caught:
        resolve(parse_norm("pre", changes), 4)
    assert said in str(caught.value) and "\n" not in str(caught.value) and "model.norm" in str(caught.value)


def test_nothing_is_evaluated():
    """No source of the configuration or of the norms calls what runs text as code."""
    root = Path(__file__).resolve().parents[2] / "megnorm"
    for path in [*(root / "config").glob("*.py"), *(root / "norms").glob("*.py")]:
        for name in ("eval(", "exec(", "compile(", "__import__", "unsafe_load", "getattr(builtins"):
            assert name not in path.read_text().replace("re.compile(", ""), f"{path}: {name}"


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_saved_placement_reads_back_equal(scheme):
    placement = resolve(NormConfig(scheme=scheme), 5, 64)
    assert read_placement(save_placement(placement), 5) == placement


def run_config(**norm):
    raw = copy.deepcopy(RUN)
    raw["model"]["norm"] = norm
    return parse_config(raw)


def saved(tmp_path, config):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config.model_copy(update={"model": with_placement(config.model)})))
    return path


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_runs_config_holds_the_placement(tmp_path, scheme):
    config = run_config(
        scheme=scheme,
        overrides={
            "-1": {"ffn": {"branch_scale": {"value": 0.5, "learned": "vector"}}},
            "first 2": {"attention": {"v_norm": "default"}},
        },
    )
    placement = resolve(config.model.norm, 4, 64)
    path = saved(tmp_path, config)
    again = load_config(path)
    assert read_placement(again.model.norm.resolved, 4) == placement == resolve(again.model.norm, 4, 64)
    assert again.model == with_placement(config.model) == with_placement(again.model)


def test_a_resolved_placement_that_no_longer_agrees_is_refused(tmp_path):
    path = saved(tmp_path, run_config(scheme="lns"))
    text = path.read_text()
    path.write_text(text.replace("scale: 0.5\n", "scale: 0.25\n"))
    assert path.read_text() != text
    config = load_config(path)
    with pytest.raises(
        ConfigError, match=r"resolved.layers.3.attention.in_norm.scale=0.25 .* 0.5; .*resolved=null"
    ):
        resolve(config.model.norm, 4, 64)


def test_overrides_on_a_runs_config_start_from_its_words(tmp_path):
    path = saved(tmp_path, run_config(scheme="lns"))
    for change, right in (
        ("model.norm.scheme=pre", NormConfig(scheme="pre")),
        ("model.norm=pre", NormConfig()),
        ("model.norm.eps=0.5", NormConfig(scheme="lns", eps=0.5)),
    ):
        assert resolve(load_config(path, [change]).model.norm, 4, 64) == resolve(right, 4, 64)
    deeper = load_config(path, ["model.layers=6"])
    assert resolve(deeper.model.norm, 6, 64) == resolve(NormConfig(scheme="lns"), 6, 64)


def test_a_run_whose_schemes_meaning_has_changed_is_not_continued(tmp_path):
    """The same words, other slots: as if a later version read the scheme differently."""
    config = parse_config({**copy.deepcopy(RUN), "run_dir": str(tmp_path)})
    config = config.model_copy(update={"model": with_placement(config.model)})
    path = saved(tmp_path, config)
    assert check_run_dir(config, "auto") == []
    path.write_text(path.read_text().replace("eps: 1.0e-05", "eps: 1.0e-06"))
    with pytest.raises(
        CheckpointError, match=r"resolved.layers.0:4.attention.in_norm.eps: 1e-06 -> 1e-05"
    ):
        check_run_dir(config, "auto")
    path.write_text(
        path.read_text().partition("    resolved:")[0]
        + path.read_text().partition("  init:")[1]
        + path.read_text().partition("  init:")[2]
    )
    assert load_config(path).model.norm.resolved is None and check_run_dir(config, "auto") == []
