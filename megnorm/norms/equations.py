"""The equations of a placement as text, rendered from the same slots that build the model.

They read as Python expressions with names for norms and learned factors, which the last lines define.
"""

from megnorm.config.moe import Moe
from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm, Placement, Scale
from megnorm.norms.fold import fold

NAMES = {"rms": "RMSNorm", "layer": "LayerNorm", "l2": "L2Norm", "dyt": "DyT"}
LETTERS = {
    "q": ("q_norm", "norm of the queries over each head, before the rotation"),
    "k": ("k_norm", "norm of the keys over each head, before the rotation"),
    "v": ("v_norm", "norm of the values over each head"),
    "c": ("ctx_norm", "norm of the context over each head, before the output projection"),
}


def equations(placement: Placement, moe: Moe | None = None) -> list[str]:
    """Lines that say what every layer computes, runs of equal layers folded, and what the names stand for."""
    routed = moe.blocks(len(placement.blocks)) if moe else ()
    names = Names()
    start = names.apply(
        placement.embed_norm, names.scaled(placement.embed_scale, "Embedding(tokens)", "gamma")
    )
    lines = [f"x = y = {start}" if placement.streams == "residual" else f"x = {start}"]
    for first, last, (block, experts) in fold((b, moe if n in routed else None) for n, b in enumerate(placement.blocks)):
        lines.append(f"layer {first}:" if first == last else f"layers {first}-{last}:")
        lines += [f"  {line}" for line in block_equations(block, placement, names, experts)]
    return [*lines, f"logits = {_logits(placement, names)}", *names.legend()]


def norm_kinds(placement: Placement) -> list[str]:
    """Names of the kinds of norm that occur, as RMSNorm."""
    sublayers = [sublayer for block in placement.blocks for sublayer in (block.attention, block.ffn)]
    slots = [value for section in (placement, *sublayers) for _, value in section if isinstance(value, Norm)]
    return [name for kind, name in NAMES.items() if any(norm.kind == kind for norm in slots)]


def block_equations(block: Block, placement: Placement, names: "Names", moe: Moe | None) -> list[str]:
    """The lines of a block: attention, then FFN or experts."""
    lines = []
    for slots, body in (
        (block.attention, _attention(block.attention, placement, names)),
        (block.ffn, _ffn(block.ffn, names, moe)),
    ):
        h = names.apply(slots.in_norm, "x")
        residual = names.scaled(slots.residual_scale, h if slots.residual_from == "normed" else "x", "alpha")
        branch = names.scaled(slots.branch_scale, names.apply(slots.out_norm, body.format(h)), "beta")
        if placement.streams == "residual":
            lines += [f"b = {branch}", f"x = {names.apply(slots.post_norm, f'{residual} + b')}", "y = y + b"]
        else:
            lines.append(f"x = {names.apply(slots.post_norm, f'{residual} + {branch}')}")
    return lines


class Names:
    """Names of norms and learned factors, one for each kind that occurs, and what they mean."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def apply(self, norm: Norm | None, value: str) -> str:
        """The norm of ``value``; the value itself where there is none."""
        if norm is None:
            return value
        return f"{'' if norm.scale == 1.0 else f'{norm.scale:.6g} * '}{self.norm(norm)}({value})"

    def norm(self, norm: Norm) -> str:
        """The name of norms with this definition."""
        return self._name(NAMES[norm.kind], _definition(norm), "{0}{1}")

    def head_norm(self, norm: HeadNorm) -> str:
        """The name of a norm of queries, keys, values or the context, as a function of one of them."""
        text = self.norm(norm)
        if norm.scope == "all_heads":
            text = f"all_heads({text})"
            self.notes["all_heads"] = "all_heads(N): over all heads together, a gain for each channel"
        elif norm.gain == "per_head":
            text = f"per_head({text})"
            self.notes["per_head"] = "per_head(N): over each head, each with gains of its own"
        if norm.rope == "after":
            text = f"after_rope({text})"
            self.notes["after_rope"] = "after_rope(N): after the rotation"
        return text if norm.scale == 1.0 else f"{norm.scale:.6g} * {text}"

    def scaled(self, scale: Scale, value: str, symbol: str) -> str:
        """The value times a constant, a learned factor, a ramp."""
        factors = []
        if scale.learned != "no":
            start = "is set from the first batch" if scale.profiled else f"starts at {scale.value:.6g}"
            factors.append(self._name(symbol, f"a learned {scale.learned}, {start}", "{0}: {1}"))
        elif scale.value != 1.0:
            factors.append(f"{scale.value:.6g}")
        if scale.ramp_steps:
            factors.append(f"min(t / {scale.ramp_steps}, 1)")
            self.notes["t"] = "t: training step, 1, 2, ..."
        return " * ".join([*factors, value])

    def legend(self) -> list[str]:
        """What the names mean, a line each."""
        lines = [*self.given, *self.notes.values()]
        return (
            ["where, with parameters of its own in each place:", *(f"  {line}" for line in lines)]
            if lines
            else []
        )

    def _name(self, base: str, meaning: str, template: str) -> str:
        known = [name for name in self.given.values() if name.partition("_")[0] == base]
        for name in known:
            if template.format(name, meaning) in self.given:
                return name
        name = f"{base}_{len(known) + 1}" if known else base
        self.given[template.format(name, meaning)] = name
        return name


def _definition(norm: Norm) -> str:
    gain = "" if norm.gain == "none" else "(1 + w) * " if norm.zero_centred else "w * "
    eps = f"{norm.eps:.6g}"
    body = {
        "rms": f"x / sqrt(mean(x^2) + {eps})",
        "layer": f"(x - mean(x)) / sqrt(var(x) + {eps})",
        "l2": f"x / sqrt(sum(x^2) + {eps})",
        "dyt": "tanh(a * x)",
    }[norm.kind]
    notes = []
    if norm.kind == "dyt":
        notes.append(f"a learned, starts at {norm.alpha_init:.6g}")
    if norm.gain != "none" and norm.gain_init != 1.0:
        notes.append(f"w starts at {norm.gain_init - 1.0 if norm.zero_centred else norm.gain_init:.6g}")
    if norm.rounding == "cast_then_gain":
        notes.append("in bf16 rounded before the gain")
    return f"(x) = {gain}{body}{' + b' if norm.bias else ''}{''.join(f'; {note}' for note in notes)}"


def _attention(slots: AttentionSlots, placement: Placement, names: Names) -> str:
    groups: dict[str, str] = {}
    for letter, (slot, _) in LETTERS.items():
        norm = getattr(slots, slot)
        if norm is not None:
            text = names.head_norm(norm)
            groups[text] = groups.get(text, "") + letter
            names.notes[letter] = f"{letter} in Attention: {LETTERS[letter][1]}"
    extras = [f"{letters}={text}" for text, letters in groups.items()]
    if slots.head_scale != "none":
        extras.append(f"head_scale={slots.head_scale}")
        names.notes["head_scale"] = (
            "head_scale: a learned factor of each head, before or after the output projection"
        )
    if slots.gate != "none":
        extras.append(f"gate={slots.gate}")
        names.notes["gate"] = "gate: the context times sigmoid(W_g input), for each head or element"
    if placement.attention_scale is not None:
        extras.append(f"scale={placement.attention_scale:.6g}")
        names.notes["scale"] = "scale: factor on the scores in place of 1 / sqrt(head size)"
    if placement.attention_softcap is not None:
        extras.append(f"softcap={placement.attention_softcap:.6g}")
        names.notes["softcap"] = "softcap c: scores s become c * tanh(s / c)"
    return f"Attention({', '.join(['{}', *extras])})"


def _ffn(slots: FFNSlots, names: Names, moe: Moe | None) -> str:
    body = "FFN" if moe is None else "MoE"
    if moe is not None:
        names.notes["MoE"] = _experts(moe)
    if slots.mid_norm is None:
        return f"{body}({{}})"
    names.notes["mid"] = "mid in FFN: norm over the inner width, before the down projection"
    if moe is not None:
        names.notes["mid in MoE"] = "mid in MoE: the same in each expert, over its own inner width"
    scale = "" if slots.mid_norm.scale == 1.0 else f"{slots.mid_norm.scale:.6g} * "
    return f"{body}({{}}, mid={scale}{names.norm(slots.mid_norm)})"


def _experts(moe: Moe) -> str:
    """What MoE(x) is."""
    scores = f"{moe.router}(W x)" + (", divided by the sum of those chosen" if moe.normalise_top_k else "")
    choice = f"the {moe.top_k} of {moe.experts} experts e with the largest "
    choice += "s_e + b_e, b moved against the loads" if moe.balance == "bias" else "s_e"
    if moe.top_groups < moe.groups:
        choice += f" in the {moe.top_groups} of {moe.groups} groups with the largest sum of two of them"
    factor = "" if moe.routed_scale == 1.0 else f"{moe.routed_scale:.6g} * "
    plural = "s" if moe.shared_experts > 1 else ""
    shared = f"FFN(x) of {moe.shared_experts} shared expert{plural} + " if moe.shared_experts else ""
    return f"MoE(x) is {shared}sum of {factor}s_e * FFN_e(x) over {choice}; s = {scores}"


def _logits(placement: Placement, names: Names) -> str:
    last = names.apply(placement.final_norm, "y" if placement.streams == "residual" else "x")
    output = f"Output({'x + ' if placement.streams == 'residual' else ''}{last})"
    cap = placement.final_softcap
    return output if cap is None else f"{cap:.6g} * tanh({output} / {cap:.6g})"
