"""Every scheme against its paper's equation written out in plain fp64 tensor code, forward and all gradients;
identities between placements; moving one slot changes the logits."""

import pytest
import torch
from decoders import decoder, model_config, relative, tokens_of, weights

from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm, Placement
from megnorm.norms import resolve

LAYERS, HEADS, KV, SIZE = 3, 4, 2, 8
THETA, EPS = 10000.0, 1e-5

# The reference: letters as in the papers, W the weights by name. It shares no code with the model.


def rms(x, gain):
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def layer(x, gain, bias=0.0):
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt() + bias


def turned(x):
    """Rotary positions by complex multiplication: channels i and i + e/2 are one complex number."""
    position = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    angle = position * THETA ** (-torch.arange(SIZE // 2, dtype=x.dtype) * 2 / SIZE)
    z = torch.complex(x[..., : SIZE // 2], x[..., SIZE // 2:])
    z = z * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag), -1)


def attention(W, x, q=None, k=None, v=None):
    """Softmax attention over earlier positions, heads in groups; q, k, v: gains of norms over each head."""
    b, s, _ = x.shape

    def heads(name, n, gain):
        y = (x @ W[f"{name}.weight"].T).view(b, s, n, SIZE)
        return y if gain is None else rms(y, gain)

    queries, keys = turned(heads("q", HEADS, q)), turned(heads("k", KV, k))
    values, out = heads("v", KV, v), []
    for h in range(HEADS):
        group = h * KV // HEADS
        score = torch.einsum("bie,bje->bij", queries[:, :, h], keys[:, :, group]) / SIZE ** 0.5
        score = score.masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
        out.append(score.softmax(-1) @ values[:, :, group])
    return torch.cat(out, -1) @ W["out.weight"].T


def ffn(W, x):
    gate = x @ W["gate.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ W["up.weight"].T)) @ W["down.weight"].T


def pre(A, F, a, f, x, number):
    y = x + attention(A, rms(x, a["in"]))
    return y + ffn(F, rms(y, f["in"]))


def post(A, F, a, f, x, number):
    y = rms(x + attention(A, x), a["post"])
    return rms(y + ffn(F, y), f["post"])


def peri(A, F, a, f, x, number):
    y = x + rms(attention(A, rms(x, a["in"])), a["out"])
    return y + rms(ffn(F, rms(y, f["in"])), f["out"])


def hybrid(A, F, a, f, x, number):
    y = x + attention(A, x, a["q"], a["k"], a["v"])
    n = rms(y, f["in"])
    return ffn(F, n) + n


def hybrid_star(A, F, a, f, x, number):
    if number > 0:
        return hybrid(A, F, a, f, x, number)
    y = x + attention(A, rms(x, a["in"]), a["q"], a["k"], a["v"])
    return y + ffn(F, rms(y, f["in"]))


REFERENCES = {"pre": pre, "post": post, "peri": peri, "hybrid": hybrid, "hybrid_star": hybrid_star}


def parts(W, name):
    """Weights below one name, and the gains of its norms by slot."""
    below = {key.removeprefix(f"{name}."): value for key, value in W.items() if key.startswith(f"{name}.")}
    end = "_norm.gain"
    return below, {key.removesuffix(end): value for key, value in below.items() if key.endswith(end)}


def reference_logits(W, block, tokens):
    x = W["embedding.weight"][tokens]
    for number in range(LAYERS):
        (A, a), (F, f) = parts(W, f"layers.{number}.attention"), parts(W, f"layers.{number}.ffn")
        x = block(A, F, a, f, x, number)
    if "final_norm.gain" in W:
        x = rms(x, W["final_norm.gain"])
    return x @ W.get("output.weight", W["embedding.weight"]).T


def reference_loss(W, block, tokens, targets, vocab):
    logits = reference_logits(W, block, tokens)[..., :vocab]
    return -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()


@pytest.mark.parametrize("scheme", sorted(REFERENCES))
@pytest.mark.parametrize("tied", [True, False])
def test_scheme_computes_its_papers_equation(scheme, tied):
    model = model_config(layers=LAYERS, norm=scheme, tie_embeddings=tied)
    module, (tokens, targets) = decoder(model), tokens_of(model)
    ours = weights(module)
    theirs = {name: value.detach().clone().requires_grad_() for name, value in ours.items()}
    assert ("final_norm.gain" in ours) == (scheme != "post")

    weight = torch.full(targets.shape, 1 / targets.numel(), dtype=torch.float64)
    loss = module(tokens, targets, weight)
    loss.backward()
    right = reference_loss(theirs, REFERENCES[scheme], tokens, targets, model.vocab_size)
    right.backward()
    assert abs(loss.item() - right.item()) < 1e-11
    assert relative(module(tokens), reference_logits(theirs, REFERENCES[scheme], tokens)) < 1e-11
    for name, parameter in ours.items():
        assert theirs[name].grad.norm() > 1e-6, f"{name} has no part in the reference"
        assert relative(parameter.grad, theirs[name].grad) < 1e-10, name


@pytest.mark.parametrize("scheme", sorted(REFERENCES))
def test_other_references_are_told_apart(scheme):
    """A control: with the same weights the equation of another scheme (where it has its gains) is far off."""
    model = model_config(layers=LAYERS, norm=scheme)
    module, (tokens, _) = decoder(model), tokens_of(model)
    for other, block in REFERENCES.items():
        if other == scheme:
            continue
        try:
            logits = reference_logits(weights(module), block, tokens)
        except KeyError:
            continue
        assert relative(module(tokens), logits) > 0.05, other


def test_post_norm_with_layer_norm_and_biases():
    """The original Transformer's block: LayerNorm with bias after each addition; GELU, all biases."""
    model = model_config(layers=LAYERS, norm={"scheme": "post", "kind": "layer", "bias": True}, bias=True,
                         activation="gelu")
    module, (tokens, targets) = decoder(model), tokens_of(model)
    ours = weights(module)
    W = {name: value.detach().clone().requires_grad_() for name, value in ours.items()}
    x = W["embedding.weight"][tokens]
    for number in range(LAYERS):
        A, F = parts(W, f"layers.{number}.attention")[0], parts(W, f"layers.{number}.ffn")[0]
        x = x + biased_attention(A, x)
        x = layer(x, A["post_norm.gain"], A["post_norm.bias"])
        z = x @ F["up.weight"].T + F["up.bias"]
        z = 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z ** 3)))
        x = layer(x + z @ F["down.weight"].T + F["down.bias"], F["post_norm.gain"], F["post_norm.bias"])
    logits = (x @ W["embedding.weight"].T)[..., :29]
    right = -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()
    right.backward()
    loss = module(tokens, targets, torch.full(targets.shape, 1 / targets.numel(), dtype=torch.float64))
    loss.backward()
    assert abs(loss.item() - right.item()) < 1e-11
    for name, parameter in ours.items():
        if not name.endswith("attention.k.bias"):  # moves every score of a row alike only without rotation
            assert W[name].grad.norm() > 1e-6, name
        assert (parameter.grad - W[name].grad).norm() < 1e-10 * max(1.0, float(W[name].grad.norm())), name


def biased_attention(A, x):
    """Attention with biases: a one as another channel carries them through ``attention``."""
    wide = torch.cat((x, torch.ones_like(x[..., :1])), -1)
    W = {f"{n}.weight": torch.cat((A[f"{n}.weight"], A[f"{n}.bias"][:, None]), -1) for n in "qkv"}
    return attention({**W, "out.weight": A["out.weight"]}, wide) + A["out.bias"]


# Identities between placements (norm-placement reference: I1 to I3, I5): equal functions, other slots.

N, H = Norm(), HeadNorm()


def placed(*blocks, embed=None, final=N):
    return Placement(embed_norm=embed, blocks=blocks, final_norm=final)


def renamed(module, names):
    """Weights of ``module`` under the names that another placement gives them."""
    return {names.get(name, name): value for name, value in weights(module).items()}


def same(model, first, second, names):
    """Largest relative difference of the logits of two placements that share weights."""
    one, two = decoder(model, first), decoder(model, second)
    source = renamed(one, names)
    assert sorted(source) == sorted(weights(two))
    with torch.no_grad():
        for name, parameter in weights(two).items():
            parameter.copy_(source[name])
    tokens, _ = tokens_of(model)
    return relative(one(tokens), two(tokens))


def test_input_norm_with_normed_residual_is_post_norm_of_the_sublayer_before():
    """I1, from the FFN of block 0 to the attention of block 1, and from the embedding."""
    shifted = Block(attention=AttentionSlots(in_norm=N, residual_from="normed"), ffn=FFNSlots(in_norm=N))
    plain = Block(attention=AttentionSlots(), ffn=FFNSlots(in_norm=N, post_norm=N))
    last = Block(attention=AttentionSlots(), ffn=FFNSlots(in_norm=N))
    names = {"layers.0.attention.in_norm.gain": "embed_norm.gain",
             "layers.1.attention.in_norm.gain": "layers.0.ffn.post_norm.gain"}
    assert same(model_config(), placed(shifted, shifted), placed(plain, last, embed=N), names) < 1e-14


def test_shifted_post_norm_is_embedding_norm_and_canonical_post_norm():
    """I2: the final norm takes the part of the last block's post norm."""
    shifted = Block(attention=AttentionSlots(in_norm=N, residual_from="normed"),
                    ffn=FFNSlots(in_norm=N, residual_from="normed"))
    plain = Block(attention=AttentionSlots(post_norm=N), ffn=FFNSlots(post_norm=N))
    names = {"layers.0.attention.in_norm.gain": "embed_norm.gain",
             "final_norm.gain": "layers.1.ffn.post_norm.gain",
             "layers.1.attention.in_norm.gain": "layers.0.ffn.post_norm.gain"}
    names |= {f"layers.{n}.ffn.in_norm.gain": f"layers.{n}.attention.post_norm.gain" for n in (0, 1)}
    canonical = placed(plain, plain, embed=N, final=None)
    assert same(model_config(), placed(shifted, shifted), canonical, names) < 1e-14


def test_hybrid_norm_is_post_norm_of_attention_and_an_ffn_without_norm():
    """I3."""
    plain = Block(attention=AttentionSlots(q_norm=H, k_norm=H, v_norm=H, post_norm=N), ffn=FFNSlots())
    names = {f"layers.{n}.ffn.in_norm.gain": f"layers.{n}.attention.post_norm.gain" for n in (0, 1)}
    model = model_config(norm="hybrid")
    assert same(model, resolve(model.norm, 2), placed(plain, plain), names) < 1e-14


def test_input_and_post_norm_is_the_wrong_peri_norm_of_some_texts():
    """I5: N(x + F(N(x))) has peri's gains but is another function."""
    keel = Block(attention=AttentionSlots(in_norm=N, post_norm=N), ffn=FFNSlots(in_norm=N, post_norm=N))
    model = model_config(norm="peri")
    names = {f"layers.{n}.{part}.out_norm.gain": f"layers.{n}.{part}.post_norm.gain"
             for n in (0, 1) for part in ("attention", "ffn")}
    assert same(model, resolve(model.norm, 2), placed(keel, keel), names) > 0.1

    module, (tokens, _) = decoder(model, placed(keel, keel)), tokens_of(model)

    def wrong_peri(A, F, a, f, x, number):
        y = rms(x + attention(A, rms(x, a["in"])), a["post"])
        return rms(y + ffn(F, rms(y, f["in"])), f["post"])

    W = weights(module)
    x = W["embedding.weight"][tokens]
    for number in (0, 1):
        (A, a), (F, f) = parts(W, f"layers.{number}.attention"), parts(W, f"layers.{number}.ffn")
        x = wrong_peri(A, F, a, f, x, number)
    assert relative(module(tokens), rms(x, W["final_norm.gain"]) @ W["embedding.weight"].T) < 1e-12


MOVES = {
    "hybrid with post-norm after the FFN": ("hybrid", {"ffn": {"in_norm": "none", "residual_from": "raw",
                                                               "post_norm": "default"}}),
    "hybrid with the raw residual": ("hybrid", {"ffn": {"residual_from": "raw"}}),
    "pre with the normed residual": ("pre", {"attention": {"residual_from": "normed"}}),
    "peri without an output norm": ("peri", {"ffn": {"out_norm": "none"}}),
    "v norm moved to the context": ("hybrid", {"attention": {"v_norm": "none", "ctx_norm": "default"}}),
    "k norm moved to v": ("hybrid", {"attention": {"k_norm": "none", "v_norm": "default"}}),
    "post norm moved to the branch": ("post", {"attention": {"post_norm": "none", "out_norm": "default"}}),
    "mid norm": ("pre", {"ffn": {"mid_norm": "default"}}),
    "residual scale": ("pre", {"ffn": {"residual_scale": 1.3}}),
    "branch scale": ("pre", {"attention": {"branch_scale": 0.7}}),
    "q over all heads": ("hybrid", {"attention": {"q_norm": {"scope": "all_heads"}}}),
    "layer norm in one place": ("pre", {"ffn": {"in_norm": {"kind": "layer"}}}),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("block", ["0", "1"])
def test_one_slot_moved_changes_the_logits(move, block):
    """Gains of 1 and the same matrices: only the placement of one block differs."""
    scheme, slots = MOVES[move]
    logits = []
    for overrides in ({}, {block: slots}):
        model = model_config(norm={"scheme": scheme, "overrides": overrides})
        module, (tokens, _) = decoder(model), tokens_of(model)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.sharding.role == "norm":
                    parameter.fill_(1.0)
            logits.append(module(tokens))
    assert relative(logits[1], logits[0]) > 1e-2


def test_recomputation_changes_nothing():
    model = model_config(norm="hybrid_star")
    tokens, targets = tokens_of(model)
    weight = torch.rand(targets.shape, dtype=torch.float64)
    gradients = []
    for recompute in ("none", "full"):
        module = decoder(model, recompute=recompute)
        module(tokens, targets, weight).backward()
        gradients.append({name: p.grad for name, p in weights(module).items()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
