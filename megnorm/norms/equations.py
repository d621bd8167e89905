"""The equations of a placement as text, rendered from the same slots that build the model."""

from megnorm.config.placement import AttentionSlots, Block, FFNSlots, Norm, Placement, Scale


def equations(placement: Placement) -> list[str]:
    """Lines that say what every layer computes; runs of equal layers are folded into one."""
    lines = [f"x = {_apply(placement.embed_norm, 'Embedding(tokens)')}"]
    for first, last, block in fold(placement.blocks):
        lines.append(f"layer {first}:" if first == last else f"layers {first}-{last}:")
        lines += [f"  {line}" for line in block_equations(block)]
    lines.append(f"logits = Output({_apply(placement.final_norm, 'x')})")
    return lines


def fold(blocks: tuple[Block, ...]) -> list[tuple[int, int, Block]]:
    """Runs of equal blocks as (first layer, last layer, block)."""
    runs: list[tuple[int, int, Block]] = []
    for layer, block in enumerate(blocks):
        if runs and runs[-1][2] == block:
            runs[-1] = (runs[-1][0], layer, block)
        else:
            runs.append((layer, layer, block))
    return runs


def block_equations(block: Block) -> list[str]:
    """The two lines of a block: attention, then FFN."""
    return [_sublayer(block.attention, _attention(block.attention)), _sublayer(block.ffn, _ffn(block.ffn))]


def _sublayer(slots: AttentionSlots | FFNSlots, body: str) -> str:
    h = _apply(slots.in_norm, "x")
    residual = _scaled(slots.residual_scale, h if slots.residual_from == "normed" else "x")
    branch = _scaled(slots.branch_scale, _apply(slots.out_norm, body.format(h)))
    return f"x = {_apply(slots.post_norm, f'{residual} + {branch}')}"


def _attention(slots: AttentionSlots) -> str:
    normed = "".join(n for n in "qkv" if getattr(slots, f"{n}_norm"))
    heads = {getattr(slots, f"{n}_norm").scope for n in normed}
    mark = f"[{normed} normed{' over all heads' if heads == {'all_heads'} else ''}]" if normed else ""
    context = "[context normed]" if slots.ctx_norm else ""
    return f"Attention{mark}{context}({{}})"


def _ffn(slots: FFNSlots) -> str:
    return f"FFN{'[inner normed]' if slots.mid_norm else ''}({{}})"


def _apply(norm: Norm | None, value: str) -> str:
    if norm is None:
        return value
    return f"{ {'rms': 'RMSNorm', 'layer': 'LayerNorm', 'l2': 'L2Norm', 'dyt': 'DyT'}[norm.kind] }({value})"


def _scaled(scale: Scale, value: str) -> str:
    return value if scale.value == 1.0 else f"{scale.value:.6g} {value}"
