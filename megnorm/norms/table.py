"""Every scheme as a row of slots."""

from typing import Any, NamedTuple

from megnorm.config import NormConfig
from megnorm.config.base import Section
from megnorm.config.placement import (
    AttentionSlots,
    Block,
    FFNSlots,
    HeadNorm,
    Norm,
    Placement,
    Scale,
    Sublayer,
)
from megnorm.norms.resolve import resolve
from megnorm.norms.schemes import SCHEMES

DEPTH, WIDTH = 12, 1024
COLUMNS = (
    "attn in",
    "res",
    "qkvc",
    "hs/gate",
    "out",
    "alpha, beta",
    "post",
    "ffn in",
    "res",
    "mid",
    "out",
    "alpha, beta",
    "post",
)
MODEL_COLUMNS = ("embed", "final", "streams", "caps")
KEY = [
    "n norm over the width, h over each head, a over all heads, . absent; n1 gain 1 + w, n0 no gain;",
    "dyt, l2: kinds; n*c output times c, n@c gain starts at c; h' after the rotation; res: raw or normed;",
    "hs head scale before or after the output projection; alpha residual factor, beta branch factor:",
    "numbers, vec or scalar learned from the number, ~ set from the first batch, /T grows over T steps;",
    f"where a factor follows the layer, from .. to. Depth {DEPTH}, width {WIDTH}.",
]


class Row(NamedTuple):
    """Cells of a run of layers whose slots are alike: ``layers`` is "" where that is all of them."""

    scheme: str
    layers: str
    cells: tuple[str, ...]


def scheme_rows(scheme: str, placement: Placement) -> list[Row]:
    """Rows of a placement; layers that differ only in numbers share one."""
    runs: list[tuple[int, int]] = []
    shapes = [_shape(block) for block in placement.blocks]
    for layer, shape in enumerate(shapes):
        if runs and shapes[runs[-1][0]] == shape:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    rows = []
    for first, last in runs:
        layers = "" if len(runs) == 1 else str(first) if first == last else f"{first}-{last}"
        ends = zip(block_cells(placement.blocks[first]), block_cells(placement.blocks[last]), strict=True)
        cells = [a if a == b else f"{a} .. {b}" for a, b in ends]
        rows.append(Row(scheme, layers, (*cells, *(model_cells(placement) if first == 0 else [""] * 4))))
    return rows


def block_cells(block: Block) -> list[str]:
    """A block's slots, a cell each, in the order of COLUMNS."""
    attention, ffn = block.attention, block.ffn
    return [
        *_front(attention),
        _heads(attention),
        _context(attention),
        *_back(attention),
        *_front(ffn),
        _norm(ffn.mid_norm),
        *_back(ffn),
    ]


def model_cells(placement: Placement) -> list[str]:
    """The model's own slots, in the order of MODEL_COLUMNS."""
    embed = [
        text
        for text in (_factor(placement.embed_scale), _norm(placement.embed_norm))
        if text not in ("", ".")
    ]
    caps = [
        f"{name} {value:g}"
        for name, value in (
            ("scale", placement.attention_scale),
            ("attn", placement.attention_softcap),
            ("final", placement.final_softcap),
        )
        if value is not None
    ]
    streams = "two" if placement.streams == "residual" else ""
    return [" ".join(embed) or ".", _norm(placement.final_norm), streams, ", ".join(caps)]


def slot_table() -> list[str]:
    """The table of all schemes as aligned lines, with its key."""
    rows = table_rows()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*lines, "", *KEY]


def table_rows() -> list[list[str]]:
    """The header and the rows of all schemes."""
    rows = [["scheme", "layers", *COLUMNS, *MODEL_COLUMNS]]
    for scheme in SCHEMES:
        for row in scheme_rows(scheme, resolve(NormConfig(scheme=scheme), DEPTH, WIDTH)):
            rows.append([row.scheme, row.layers or "all", *row.cells])
    return rows


def _front(slots: Sublayer) -> list[str]:
    return [_norm(slots.in_norm), "n" if slots.residual_from == "normed" else "r"]


def _back(slots: AttentionSlots | FFNSlots) -> list[str]:
    alpha, beta = _factor(slots.residual_scale), _factor(slots.branch_scale)
    return [
        _norm(slots.out_norm),
        f"{alpha or '1'}, {beta or '1'}" if alpha or beta else "",
        _norm(slots.post_norm),
    ]


def _heads(slots: AttentionSlots) -> str:
    return "".join(_norm(norm) for norm in (slots.q_norm, slots.k_norm, slots.v_norm, slots.ctx_norm))


def _context(slots: AttentionSlots) -> str:
    parts = [
        f"hs {slots.head_scale}" if slots.head_scale != "none" else "",
        slots.gate if slots.gate != "none" else "",
    ]
    return " ".join(part for part in parts if part) or "."


def _norm(norm: Norm | None) -> str:
    if norm is None:
        return "."
    letter = "n"
    if isinstance(norm, HeadNorm):
        letter = "a" if norm.scope == "all_heads" else "h"
    letter = {"dyt": "dyt", "l2": "l2"}.get(norm.kind, letter)
    mark = "0" if norm.gain == "none" else "1" if norm.zero_centred else ""
    after = "'" if isinstance(norm, HeadNorm) and norm.rope == "after" else ""
    scale = f"*{norm.scale:.3g}" if norm.scale != 1.0 else ""
    start = f"@{norm.gain_init:.3g}" if norm.gain_init != 1.0 else ""
    return f"{letter}{mark}{after}{scale}{start}"


def _factor(scale: Scale) -> str:
    if scale == Scale():
        return ""
    learned = {"no": "", "scalar": " scalar", "vector": " vec"}[scale.learned]
    value = "~" if scale.profiled else f"{scale.value:.4g}"
    return f"{value}{learned}{f'/{scale.ramp_steps}' if scale.ramp_steps else ''}"


def _shape(section: Any) -> Any:
    """The slots without their numbers, which may follow the layer."""
    if not isinstance(section, Section):
        return None if isinstance(section, (int, float)) and not isinstance(section, bool) else section
    return tuple((name, _shape(value)) for name, value in section)
