"""The placements of published model families, with their eps, gains and rounding."""

from typing import Any

from megnorm.config.placement import Block
from megnorm.norms.classic import OutputOptions, output, peri, qk
from megnorm.norms.scheme import Place, Scheme, final_norm, fixed

GEMMA_NORM = {"kind": "rms", "zero_centred": True, "eps": 1e-6}


def gemma_ends(at: Place) -> dict[str, Any]:
    """The embedding times sqrt(d)."""
    return {**final_norm(at), "embed_scale": at.sqrt_d}


def gemma2_ends(at: Place) -> dict[str, Any]:
    """Gemma's, with both soft-caps."""
    return {**gemma_ends(at), "attention_softcap": 50.0, "final_softcap": 30.0}


def gemma3(at: Place) -> Block:
    """Peri-norm with q and k normed over each head."""
    block = peri(at)
    return block.model_copy(
        update={"attention": block.attention.model_copy(update={"q_norm": at.h, "k_norm": at.h})}
    )


FAMILIES = {
    "gemma2": Scheme(
        "peri-norm with gains 1 + w, embedding times sqrt(d), soft-caps 50 and 30",
        "arXiv:2408.00118",
        fixed(peri, ends=gemma2_ends, norm=GEMMA_NORM, head=GEMMA_NORM, init="normal"),
        needs="an attention kernel with a soft-cap",
    ),
    "gemma3": Scheme(
        "peri-norm with gains 1 + w, q and k normed, embedding times sqrt(d)",
        "arXiv:2503.19786",
        fixed(gemma3, ends=gemma_ends, norm=GEMMA_NORM, head=GEMMA_NORM, init="normal"),
    ),
    "qwen3": Scheme(
        "pre-norm with q and k normed over each head",
        "arXiv:2505.09388",
        fixed(
            qk,
            norm={"eps": 1e-6, "rounding": "cast_then_gain"},
            head={"eps": 1e-6, "rounding": "cast_then_gain"},
        ),
    ),
    "olmo2": Scheme(
        "norm on each sublayer's output, q and k normed over all heads",
        "arXiv:2501.00656",
        lambda options: output(OutputOptions())._replace(norm={"eps": 1e-6}, head={"eps": 1e-6}),
    ),
}
