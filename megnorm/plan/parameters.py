"""Parameters of a model counted from its sizes and its resolved norm placement, without building it.

Letters: d hidden, H heads, KV key-value heads, e head size, f FFN inner width, n experts, V padded vocabulary.
"""

from typing import NamedTuple

from megnorm.config import Config, ModelConfig
from megnorm.config.placement import Block, FFNSlots, HeadNorm, Norm, Scale
from megnorm.norms import norm_kinds, placement_of


def count_parameters(config: Config) -> dict[str, int]:
    """Parameters by part, each tensor once, whatever the layout.

    ``embedding`` and ``output`` have the rows of the padded vocabulary; ``output`` is 0 when it is tied.
    ``ffn``: what every token passes, dense FFNs and shared experts; ``experts``: the routed ones.
    ``norms``: gains, the norms' own biases, DyT's alphas, learned factors; ``biases``: those of the linear layers.
    ``non_embedding``: total without embedding and output, the N of scaling laws (arXiv:2001.08361).
    ``active``: total without the experts that a token doesn't choose.
    """
    model = config.model
    ffns = [ffn_parts(model, layer) for layer in range(model.layers)]
    parts = {
        "embedding": model.padded_vocab * model.hidden,
        "attention": model.layers * attention_matrices(model) + gate_matrices(model),
        "ffn": sum(parts.ffn for parts in ffns),
        "router": sum(parts.router for parts in ffns),
        "experts": sum(parts.experts for parts in ffns),
        "norms": norm_parameters(model),
        "biases": _linear_biases(model) if model.bias else 0,
        "output": 0 if model.tie_embeddings else model.padded_vocab * model.hidden,
    }
    total = sum(parts.values())
    blocks = placement_of(model).blocks
    idle = sum((model.moe.experts - model.moe.top_k) * ffn_size(model, blocks[layer].ffn, model.moe.ffn_hidden)
               for layer in model.moe_layers)
    return {**parts, "total": total, "non_embedding": total - parts["embedding"] - parts["output"],
            "active": total - idle}


def parameter_table(config: Config) -> list[tuple[str, int, str]]:
    """Rows (part, parameters, where they come from) for people; the vocabulary both padded and true."""
    model, counts = config.model, count_parameters(config)
    vocabulary = (f"{model.padded_vocab:,} rows ({model.vocab_size:,} tokens padded to a multiple of "
                  f"{model.pad_vocab_to}) x {model.hidden}")
    heads = f"{model.heads} heads, {model.kv_heads} kv heads x {model.head_size}"
    sources = {
        "embedding": vocabulary,
        "attention": f"{model.layers} layers: {heads}",
        "ffn": _ffn_source(model),
        **(_expert_sources(model) if model.moe else {}),
        "norms": f"{model.norm.scheme}, {', '.join(norm_kinds(placement_of(model)))}",
        "biases": "of the linear layers" if model.bias else "none",
        "output": "tied to the embedding" if model.tie_embeddings else vocabulary,
        "total": "",
        "non_embedding": "total without embedding and output",
        **({"active": "total without the experts that a token doesn't choose"} if model.moe else {}),
    }
    return [(part, counts[part], source) for part, source in sources.items()]


def _ffn_source(model: ModelConfig) -> str:
    matrices = "gate, up, down" if model.activation == "swiglu" else "up, down"
    dense = model.layers - len(model.moe_layers)
    kinds = [f"{dense} layers: {matrices}, {model.hidden} x {model.ffn_hidden}, {model.activation}"] * (dense > 0)
    if model.moe and model.moe.shared_experts:
        kinds.append(f"{len(model.moe_layers)} layers: {model.moe.shared_experts} shared experts")
    return "; ".join(kinds) or "every layer has experts"


def _expert_sources(model: ModelConfig) -> dict[str, str]:
    moe, layers = model.moe, len(model.moe_layers)
    return {"router": f"{layers} layers: {model.hidden} x {moe.experts}, {moe.router}",
            "experts": f"{layers} layers: {moe.experts}, of which {moe.top_k} chosen, {model.hidden} x "
                       f"{moe.ffn_hidden}, {model.activation}"}


def attention_matrices(model: ModelConfig) -> int:
    """Of one layer: q and the output [H*e, d], k and v [KV*e, d]."""
    return 2 * (model.heads + model.kv_heads) * model.head_size * model.hidden


class FFNParts(NamedTuple):
    """Parameters of the matrices of one block's FFN.

    ffn: those that every token passes: a dense FFN, or shared experts. router [n, d]. experts: of all n routed
    ones; chosen: of as many as a token chooses.
    """

    ffn: int
    router: int = 0
    experts: int = 0
    chosen: int = 0

    @property
    def met(self) -> int:
        """Those that a token is multiplied with."""
        return self.ffn + self.router + self.chosen


def ffn_parts(model: ModelConfig, layer: int) -> FFNParts:
    """Of one layer by its global number; up and down [f, d] each, and a gate for SwiGLU."""
    column = inner_matrices(model) * model.hidden
    if layer not in model.moe_layers:
        return FFNParts(column * model.ffn_hidden)
    moe, one = model.moe, column * model.moe.ffn_hidden
    return FFNParts(moe.shared_experts * one, moe.experts * model.hidden, moe.experts * one, moe.top_k * one)


def inner_matrices(model: ModelConfig) -> int:
    """How many matrices [f, d] an FFN has."""
    return 3 if model.activation == "swiglu" else 2


def ffn_size(model: ModelConfig, slots: FFNSlots, inner: int) -> int:
    """All parameters of an FFN of inner width ``inner``: a dense one, one expert, or a rank's part of it."""
    biases = _ffn_biases(model, inner) if model.bias else 0
    return inner_matrices(model) * inner * model.hidden + biases + norm_size(slots.mid_norm, inner)


def _ffn_biases(model: ModelConfig, inner: int) -> int:
    return (inner_matrices(model) - 1) * inner + model.hidden


def _ffn_widths(model: ModelConfig, layer: int) -> list[int]:
    """Inner widths of the FFNs of a layer: of the dense one, or of each expert, where shared ones are one."""
    if layer not in model.moe_layers:
        return [model.ffn_hidden]
    moe = model.moe
    return [moe.shared_experts * moe.ffn_hidden] * (moe.shared_experts > 0) + [moe.ffn_hidden] * moe.experts


def gate_matrices(model: ModelConfig) -> int:
    """Of all layers: the attention's output gates [H, d] or [H*e, d], where a layer has one."""
    return sum(_gate_width(block, model) for block in placement_of(model).blocks) * model.hidden


def norm_parameters(model: ModelConfig) -> int:
    """Gains and biases of all norms of the placement, DyT's alphas, learned factors."""
    placement = placement_of(model)
    ends = sum(norm_size(norm, model.hidden) for norm in (placement.embed_norm, placement.final_norm))
    ends += scale_size(placement.embed_scale, model.hidden)
    return ends + sum(_block_norms(block, model, layer) for layer, block in enumerate(placement.blocks))


def _block_norms(block: Block, model: ModelConfig, layer: int) -> int:
    count = sum(norm_size(block.ffn.mid_norm, width) for width in _ffn_widths(model, layer))
    for sublayer in (block.attention, block.ffn):
        for norm in (sublayer.in_norm, sublayer.out_norm, sublayer.post_norm):
            count += norm_size(norm, model.hidden)
        for scale in (sublayer.residual_scale, sublayer.branch_scale):
            count += scale_size(scale, model.hidden)
    attention = block.attention
    for norm, heads in ((attention.q_norm, model.heads), (attention.k_norm, model.kv_heads),
                        (attention.v_norm, model.kv_heads), (attention.ctx_norm, model.heads)):
        count += head_norm_size(norm, heads, model.head_size)
    return count + (model.heads if attention.head_scale != "none" else 0)


def norm_size(norm: Norm | None, width: int) -> int:
    """Gain and bias over the width, where there are any; a DyT also has one alpha."""
    if norm is None:
        return 0
    return width * ((norm.gain != "none") + norm.bias) + (norm.kind == "dyt")


def head_norm_size(norm: HeadNorm | None, heads: int, head_size: int) -> int:
    """Over one head: a gain [e] that the heads share, or [heads, e]; over all heads: [heads * e]."""
    if norm is None:
        return 0
    shared = norm.scope == "head" and norm.gain != "per_head"
    return norm_size(norm, head_size if shared else heads * head_size)


def scale_size(scale: Scale, width: int) -> int:
    """Learned numbers of a residual or branch scale."""
    return {"no": 0, "scalar": 1, "vector": width}[scale.learned]


def _gate_width(block: Block, model: ModelConfig) -> int:
    return {"none": 0, "head": model.heads, "element": model.heads * model.head_size}[block.attention.gate]


def _linear_biases(model: ModelConfig) -> int:
    """One value for each output of each linear layer; the output layer has none."""
    attention = (model.heads + 2 * model.kv_heads) * model.head_size + model.hidden
    ffns = sum(_ffn_biases(model, width) for layer in range(model.layers) for width in _ffn_widths(model, layer))
    return model.layers * attention + ffns + sum(_gate_width(block, model) for block in placement_of(model).blocks)
