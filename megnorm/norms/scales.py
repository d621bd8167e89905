"""Schemes by factors on the residual and on the branch; those of l and L take global numbers."""

import math

from pydantic import Field

from megnorm.config.base import Section
from megnorm.config.placement import Block, Scale
from megnorm.norms.classic import LAYER_NORM, peri, post, pre
from megnorm.norms.scheme import Place, Scheme, Spec, change_sublayers, fixed, make_block, no_final_norm


def deepnorm(at: Place) -> Block:
    """N(alpha x + F(x)) with alpha = (2 L)^(1/4)."""
    alpha = Scale(value=(2 * at.L) ** 0.25)
    return change_sublayers(post(at), lambda slots: {"residual_scale": alpha})


def admin(at: Place) -> Block:
    """N(w x + F(x)), the vectors w set from the first batch, then learned."""
    profiled = Scale(learned="vector", profiled=True)
    return change_sublayers(post(at), lambda slots: {"residual_scale": profiled})


def lns(at: Place) -> Block:
    """x + F(N(x) / sqrt(l))."""
    scaled = at.n.model_copy(update={"scale": at.n.scale / math.sqrt(at.l)})
    return make_block({"in_norm": scaled}, {"in_norm": scaled})


class KeelOptions(Section):
    """alpha: factor of the residual; the number of blocks when left out."""

    alpha: float | None = Field(None, gt=0)


def keel(options: KeelOptions) -> Spec:
    """N(alpha x + F(N(x))), alpha = L."""

    def block(at: Place) -> Block:
        alpha = Scale(value=float(at.L) if options.alpha is None else options.alpha)
        slots = {"in_norm": at.n, "post_norm": at.n, "residual_scale": alpha}
        return make_block(slots, slots)

    return Spec(block, no_final_norm)


class LayerScaleOptions(Section):
    """init: first value of the learned factors."""

    init: float = 0.1


def layerscale(options: LayerScaleOptions) -> Spec:
    """x + lambda * F(N(x)) with a learned vector lambda."""
    beta = Scale(value=options.init, learned="vector")
    return Spec(lambda at: change_sublayers(pre(at), lambda slots: {"branch_scale": beta}))


def rezero(at: Place) -> Block:
    """x + a F(x) with a learned scalar a that starts at 0."""
    slots = {"branch_scale": Scale(value=0.0, learned="scalar")}
    return make_block(slots, slots)


def beam(at: Place) -> Block:
    """sqrt((i - 1) / i) x + sqrt(1 / i) N(F(N(x))), i = 1 + number of the sublayer: the embedding and all
    branches have equal shares."""

    def scales(i: int) -> dict:
        return {
            "residual_scale": Scale(value=math.sqrt((i - 1) / i)),
            "branch_scale": Scale(value=math.sqrt(1 / i)),
        }

    block = peri(at)
    heads = {"q_norm": at.h, "k_norm": at.h, "gate": "element"}
    return Block(
        attention=block.attention.model_copy(update={**heads, **scales(2 * at.l)}),
        ffn=block.ffn.model_copy(update=scales(2 * at.l + 1)),
    )


SCALES = {
    "deepnorm": Scheme(
        "post-norm with the residual times (2 L)^(1/4) (DeepNet)",
        "arXiv:2203.00555",
        fixed(deepnorm, ends=no_final_norm, norm=LAYER_NORM, init="deepnorm"),
        needs="its own initial values; no final norm; LayerNorm, unless kind is given",
    ),
    "admin": Scheme(
        "post-norm with a learned vector on the residual, set from the first batch",
        "arXiv:2004.08249",
        fixed(admin, ends=no_final_norm, norm=LAYER_NORM),
        needs="one pass over the first batch before training; no final norm; LayerNorm, unless kind is given",
    ),
    "lns": Scheme(
        "pre-norm with each norm's output times 1 / sqrt(l) (LayerNorm Scaling)",
        "arXiv:2502.05795",
        fixed(lns, init="normal"),
        needs="initial values without depth scaling",
    ),
    "layerscale": Scheme(
        "pre-norm with a learned vector on each branch", "arXiv:2103.17239", layerscale, LayerScaleOptions
    ),
    "rezero": Scheme(
        "no norm in the blocks, a learned scalar from 0 on each branch, final norm",
        "arXiv:2003.04887",
        fixed(rezero),
    ),
    "keel": Scheme(
        "norm before the sublayer and after the addition, the residual times L",
        "arXiv:2601.19895",
        keel,
        KeelOptions,
        needs="no final norm (our reading: each block ends with a norm)",
    ),
    "beam": Scheme(
        "peri-norm, q and k normed, gated attention, equal shares for the embedding and every branch",
        "transformers BeamForCausalLM",
        fixed(beam, norm={"eps": 1e-6}, init="normal"),
        needs="gate weights in attention",
    ),
}
