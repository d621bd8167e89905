"""Every scheme's slots against rows written down here by hand, at several depths."""

import math

import pytest

from megnorm.config import ConfigError, ModelConfig, NormConfig
from megnorm.config.placement import Block, HeadNorm, Norm, Placement, Scale
from megnorm.norms import SCHEMES, find_scheme, init_policy, resolve
from megnorm.norms.table import scheme_rows

WIDTH = 64

# The reference's table: attention in, residual, q k v c, head scale or gate, out, post | FFN in, residual,
# mid, out, post | embedding, final norm. n hidden norm, h over each head, a over all heads, 1: gain 1 + w.
ROWS = {
    "post": ". r .... . . n | . r . . n | . .",
    "post_shifted": "n n .... . . . | n n . . . | . n",
    "pre": "n r .... . . . | n r . . . | . n",
    "peri": "n r .... . n . | n r . n . | . n",
    "output": ". r aa.. . n . | . r . n . | . n",
    "qk": "n r hh.. . . . | n r . . . | . n",
    "qk_all_heads": "n r aa.. . . . | n r . . . | . n",
    "qkv_pre": ". r hhh. . . . | n r . . . | . n",
    "pre_qkv_pre": "n r hhh. . . . | n r . . . | . n",
    "pre_qkv_post": "n r hhh. . . . | n n . . . | . n",
    "pre_post": "n r .... . . . | n n . . . | . n",
    "post_pre": "n n .... . . . | n r . . . | . n",
    "hybrid": ". r hhh. . . . | n n . . . | . n",
    "hybrid_embed_norm": ". r hhh. . . . | n n . . . | n n",
    "qkvc_post": ". r hhhh . . . | n n . . . | . n",
    "qkc_post": ". r hh.h . . . | n n . . . | . n",
    "qk_post": ". r hh.. . . . | n n . . . | . n",
    "kv_post": ". r .hh. . . . | n n . . . | . n",
    "kc_post": ". r .h.h . . . | n n . . . | . n",
    "normformer": "n r .... before n . | n r n . . | . n",
    "deepnorm": ". r .... . . n | . r . . n | . .",
    "sub_ln": "n r ...a . . . | n r n . . | . n",
    "admin": ". r .... . . n | . r . . n | . .",
    "lns": "n r .... . . . | n r . . . | . n",
    "residual": ". r .... . . n | . r . . n | . n",
    "layerscale": "n r .... . . . | n r . . . | . n",
    "rezero": ". r .... . . . | . r . . . | . n",
    "keel": "n r .... . . n | n r . . n | . .",
    "beam": "n r hh.. element n . | n r . n . | . n",
    "prores": "n r .... . . . | n r . . . | . n",
    "gemma2": "n1 r .... . n1 . | n1 r . n1 . | . n1",
    "gemma3": "n1 r h1h1.. . n1 . | n1 r . n1 . | . n1",
    "qwen3": "n r hh.. . . . | n r . . . | . n",
    "olmo2": ". r aa.. . n . | . r . n . | . n",
    "dyt": "dyt r .... . . . | dyt r . . . | . dyt",
    "custom": ". r .... . . . | . r . . . | . .",
}
# Schemes with other blocks in front: how many of L, and what they are.
FRONT = {
    "hybrid_star": (lambda depth: 1, "n r hhh. . . . | n r . . . | . n", ROWS["hybrid"]),
    "first_qkv_pre": (lambda depth: 1, ". r hhh. . . . | n r . . . | . n", ROWS["hybrid"]),
    "mix_ln": (lambda depth: depth // 4, ". r .... . . n | . r . . n | . n", ROWS["pre"]),
}
DEPTHS = [1, 2, 7, 16]


def letter(norm):
    if norm is None:
        return "."
    name = norm.kind if norm.kind in ("dyt", "l2") else "n"
    if isinstance(norm, HeadNorm):
        name = {"head": "h", "all_heads": "a"}[norm.scope]
    return name + "1" * norm.zero_centred


def row(block: Block, placement: Placement) -> str:
    """A block as one of the rows above."""
    a, f = block.attention, block.ffn
    residual = {"raw": "r", "normed": "n"}
    inner = next((v for v in (a.head_scale, a.gate) if v != "none"), ".")
    parts = [
        [
            letter(a.in_norm),
            residual[a.residual_from],
            "".join(map(letter, (a.q_norm, a.k_norm, a.v_norm, a.ctx_norm))),
            inner,
            letter(a.out_norm),
            letter(a.post_norm),
        ],
        [
            letter(f.in_norm),
            residual[f.residual_from],
            letter(f.mid_norm),
            letter(f.out_norm),
            letter(f.post_norm),
        ],
        [letter(placement.embed_norm), letter(placement.final_norm)],
    ]
    return " | ".join(" ".join(part) for part in parts)


def placed(scheme, depth, **changes):
    return resolve(NormConfig(scheme=scheme, **changes), depth, WIDTH)


def scales(placement):
    """(residual, branch) factors of all sublayers in order."""
    return [
        (part.residual_scale, part.branch_scale)
        for block in placement.blocks
        for part in (block.attention, block.ffn)
    ]


def test_every_scheme_has_a_row():
    assert sorted(SCHEMES) == sorted([*ROWS, *FRONT])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_scheme_is_its_row(scheme, depth):
    placement = placed(scheme, depth)
    front, first, rest = FRONT.get(scheme) or (lambda depth: 0, None, ROWS[scheme])
    assert [row(block, placement) for block in placement.blocks] == [first] * front(depth) + [rest] * (
        depth - front(depth)
    )


SCALED = {"deepnorm", "admin", "layerscale", "rezero", "keel", "beam", "prores"}


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - SCALED))
def test_other_schemes_have_no_factors(scheme):
    assert set(scales(placed(scheme, 3))) == {(Scale(), Scale())}


@pytest.mark.parametrize(
    "depth, alpha", [(12, 2.2134), (16, 2.3784), (24, 2.6321), (29, 2.7597), (32, 2.8284)]
)
def test_deepnorm_alpha(depth, alpha):
    for residual, branch in scales(placed("deepnorm", depth)):
        assert residual.value == pytest.approx(alpha, abs=5e-5)
        assert residual == Scale(value=residual.value) and branch == Scale()


def test_lns_divides_by_the_root_of_the_global_number():
    placement = placed("lns", 9)
    for number, block in enumerate(placement.blocks, start=1):
        assert block.attention.in_norm.scale == block.ffn.in_norm.scale == pytest.approx(number**-0.5)
        assert block.attention.in_norm.gain_init == 1.0
    assert placement.final_norm.scale == 1.0


def test_beam_gives_embedding_and_branches_equal_shares():
    """A stream of independent unit terms keeps variance 1, all terms with the same weight."""
    weights = [1.0]
    for residual, branch in scales(placed("beam", 5)):
        weights = [weight * residual.value for weight in weights] + [branch.value]
    assert weights == pytest.approx([1 / math.sqrt(11)] * 11)


def test_keel_takes_the_number_of_blocks():
    assert set(scales(placed("keel", 7))) == {(Scale(value=7.0), Scale())}
    assert set(scales(placed("keel", 7, options={"alpha": 3.0}))) == {(Scale(value=3.0), Scale())}


def test_learned_factors():
    assert set(scales(placed("admin", 2))) == {(Scale(learned="vector", profiled=True), Scale())}
    assert set(scales(placed("rezero", 2))) == {(Scale(), Scale(value=0.0, learned="scalar"))}
    assert set(scales(placed("layerscale", 2))) == {(Scale(), Scale(value=0.1, learned="vector"))}
    assert set(scales(placed("layerscale", 2, options={"init": 0.3}))) == {
        (Scale(), Scale(value=0.3, learned="vector"))
    }
    resscale = placed("normformer", 2, options={"resscale": True, "head_scale": "after"})
    assert [residual.learned for residual, _ in scales(resscale)] == ["no", "vector"] * 2
    assert resscale.blocks[0].attention.head_scale == "after"


def test_prores_ramps_any_base():
    assert [branch.ramp_steps for _, branch in scales(placed("prores", 3))] == [
        1000,
        1000,
        2000,
        2000,
        3000,
        3000,
    ]
    options = {"base": "layerscale", "base_options": {"init": 0.2}, "steps": 10}
    assert scales(placed("prores", 2, options=options))[-1][1] == Scale(
        value=0.2, learned="vector", ramp_steps=20
    )
    ramped = placed("prores", 4, options={"base": "gemma2"})
    assert ramped.final_softcap == 30.0 and ramped.final_norm.zero_centred
    assert row(ramped.blocks[3], ramped) == ROWS["gemma2"]


def test_mix_ln_takes_a_share_of_the_depth_exactly():
    for fraction, depth, posts in ((0.1, 10, 1), (0.29, 100, 29), (0.3, 9, 2), (0.0, 4, 0), (1.0, 4, 4)):
        blocks = placed("mix_ln", depth, options={"fraction": fraction}).blocks
        assert [block.attention.post_norm is not None for block in blocks] == [True] * posts + [False] * (
            depth - posts
        )


def test_model_slots():
    gemma2, dyt = placed("gemma2", 2), placed("dyt", 2)
    assert (
        gemma2.embed_scale == Scale(value=8.0)
        and gemma2.attention_softcap == 50.0
        and gemma2.final_softcap == 30.0
    )
    assert placed("gemma3", 2).embed_scale == Scale(value=8.0) and placed("gemma3", 2).final_softcap is None
    assert dyt.embed_scale == Scale(value=8.0, learned="scalar")
    for scheme in SCHEMES:
        assert placed(scheme, 2).streams == ("residual" if scheme == "residual" else "single")


def test_star_with_the_papers_output_norm():
    blocks = placed("hybrid_star", 8, options={"attention_out_norm": True}).blocks
    assert {block.attention.out_norm for block in blocks} == {Norm(gain_init=0.25)}
    assert all(block.ffn.out_norm is None for block in blocks)


def test_prescribed_norms_and_the_users_choice():
    assert placed("normformer", 1).final_norm == Norm(kind="layer", bias=True)
    assert placed("normformer", 1, kind="rms").final_norm == Norm()
    assert placed("normformer", 1, kind="layer", bias=False).final_norm == Norm(kind="layer")
    assert placed("gemma3", 1).blocks[0].attention.q_norm == HeadNorm(eps=1e-6, zero_centred=True)
    assert placed("gemma3", 1, eps=1e-5).final_norm == Norm(zero_centred=True)
    assert placed("gemma3", 1, kind="layer").final_norm == Norm(kind="layer")
    assert placed("qwen3", 1).final_norm == Norm(eps=1e-6, rounding="cast_then_gain")
    slots = {"0": {"attention": {"q_norm": "default"}}}
    assert placed("dyt", 1, overrides=slots).blocks[0].attention.q_norm == HeadNorm()
    assert placed("dyt", 1, kind="dyt", overrides=slots).blocks[0].attention.q_norm == HeadNorm(kind="dyt")
    own = placed("dyt", 1, alpha_init=0.2, options={"attention_alpha": 0.8})
    assert own.blocks[0].attention.in_norm.alpha_init == 0.8 and own.blocks[0].ffn.in_norm.alpha_init == 0.2


def test_initial_values_follow_the_scheme():
    def policy(scheme, **init):
        return init_policy(ModelConfig(layers=2, hidden=32, heads=2, norm=scheme, init=init))

    rules = {
        "deepnorm": "deepnorm",
        "sub_ln": "sub_ln",
        "lns": "normal",
        "peri": "normal",
        "hybrid": "megatron",
        "hybrid_star": "megatron",
        "pre": "megatron",
    }
    assert {scheme: policy(scheme) for scheme in rules} == rules
    assert policy("deepnorm", policy="normal") == "normal"
    assert policy({"scheme": "prores", "options": {"base": "deepnorm"}}) == "deepnorm"


def test_every_scheme_names_its_source():
    for name, scheme in SCHEMES.items():
        assert scheme.summary and (scheme.paper.startswith("arXiv:") or name in ("beam", "custom"))


def test_aliases():
    assert find_scheme("sandwich") is find_scheme("double") is SCHEMES["peri"]
    assert placed("sandwich", 2) == placed("peri", 2)


def test_table_shows_the_rows():
    """The columns that the rows above have, for all schemes."""
    for scheme in SCHEMES:
        for shown in scheme_rows(scheme, placed(scheme, 12)):
            cells = [cell.split(" .. ")[0] for cell in shown.cells]
            front = FRONT.get(scheme)
            first = shown.layers.startswith("0")
            right = (front[1] if first else front[2]) if front else ROWS[scheme]
            a, f, model = (part.split() for part in right.split(" | "))
            assert cells[:5] + [cells[6]] == [*a[:3], a[3].replace("before", "hs before"), *a[4:]]
            assert cells[7:11] + [cells[12]] == f
            assert first is False and front or cells[14] == model[1]
    assert scheme_rows("lns", placed("lns", 4))[0].cells[0] == "n .. n*0.5"
    assert [r.layers for r in scheme_rows("mix_ln", placed("mix_ln", 8))] == ["0-1", "2-7"]


def test_unknown_scheme_and_options_name_the_nearest():
    for changes, said in (
        ({"scheme": "hybird"}, "did you mean 'hybrid'"),
        ({"scheme": "mix_ln", "options": {"fractoin": 1}}, "did you mean 'fraction'"),
        ({"scheme": "mix_ln", "options": {"fraction": 2.0}}, "less than or equal to 1"),
        ({"scheme": "pre", "options": {"x": 1}}, "known: none"),
        ({"scheme": "normformer", "options": {"head_scale": "befor"}}, "did you mean 'before'"),
        ({"scheme": "prores", "options": {"base": "prre"}}, "options.base: unknown scheme 'prre'"),
        (
            {"scheme": "prores", "options": {"base": "mix_ln", "base_options": {"fracton": 1}}},
            "base_options.fracton",
        ),
    ):
        with pytest.raises(ConfigError, match="model.norm") as caught:
            resolve(NormConfig(**changes), 4, WIDTH)
        assert said in str(caught.value) and "\n" not in str(caught.value)
