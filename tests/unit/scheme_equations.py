# ruff: noqa: E741 -- l and L are the papers' letters
"""Every scheme's equations as its paper prints them, in plain tensor code that shares nothing with the model.

A reference takes (W, tokens): weights by global name, ids [b, s]; it returns logits over the padded vocabulary.
Letters as in the papers: l = 1..L block, A attention, F FFN; heads H, KV of size E.
"""

import math
from functools import partial

import torch

H, KV, E, THETA = 4, 2, 8, 10000.0
EPS = {"gemma2": 1e-6, "gemma3": 1e-6, "qwen3": 1e-6, "olmo2": 1e-6, "beam": 1e-6}


class Part:
    """Weights below a name; ``p.in_(x)`` and so on apply the norm of that slot, as ``norm`` computes it."""

    def __init__(self, W, name, norm):
        self.W, self.name, self.norm = W, name, norm

    def __getitem__(self, key):
        return self.W[f"{self.name}.{key}"]

    def apply(self, slot, x):
        return self.norm({k: self.W.get(f"{self.name}.{slot}_norm.{k}") for k in ("gain", "bias", "alpha")}, x)

    def __getattr__(self, slot):
        return partial(self.apply, slot.rstrip("_"))


def rms(p, x, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * p["gain"]


def rms_one_plus(p, x, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (1 + p["gain"])


def ln(p, x, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred ** 2).mean(-1, keepdim=True) + eps) * p["gain"] + p["bias"]


def dyt(p, x):
    return p["gain"] * torch.tanh(p["alpha"] * x)


def turn(x):
    """RoPE on [b, s, n, e] by a rotation matrix for each pair (i, i + e/2)."""
    out = torch.empty_like(x)
    for i in range(E // 2):
        angle = torch.arange(x.shape[1], dtype=x.dtype) * THETA ** (-2 * i / E)
        c, s = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
        a, b = x[..., i], x[..., i + E // 2]
        out[..., i], out[..., i + E // 2] = a * c - b * s, a * s + b * c
    return out


def attention(p, x, norms="", whole="", cap=None, context=lambda c: c, out=lambda y: y):
    """norms: letters of q, k, v, c normed over each head; whole: over all heads together."""
    def heads(letter, n):
        y = x @ p[f"{letter}.weight"].T
        if letter in whole:
            y = p.apply(letter, y)
        y = y.reshape(*y.shape[:2], n, E)
        return p.apply(letter, y) if letter in norms else y

    q, k, v = turn(heads("q", H)), turn(heads("k", KV)), heads("v", KV)
    k, v = (y.repeat_interleave(H // KV, 2) for y in (k, v))
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(E)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    weights = torch.exp(scores) * torch.ones_like(scores).tril()
    c = torch.einsum("bhij,bjhe->bihe", weights / weights.sum(-1, keepdim=True), v)
    if "c" in norms:
        c = p.apply("ctx", c)
    c = context(c).flatten(2)
    if "c" in whole:
        c = p.apply("ctx", c)
    return out(c @ p["out.weight"].T)


def ffn(p, x, mid=lambda z: z):
    gate = x @ p["gate.weight"].T
    return mid(gate / (1 + torch.exp(-gate)) * (x @ p["up.weight"].T)) @ p["down.weight"].T


def model(block, norm=rms, final=True, embed=lambda W, x: x, cap=None):
    """Logits of a stack of blocks (A's part, F's part, x, l, L) -> x."""
    def logits(W, tokens):
        x = embed(W, W["embedding.weight"][tokens])
        L = 1 + max(int(name.split(".")[1]) for name in W if name.startswith("layers."))
        for l in range(1, L + 1):  # noqa: E741 -- the papers' letter
            a, f = (Part(W, f"layers.{l - 1}.{part}", norm) for part in ("attention", "ffn"))
            x = block(a, f, x, l, L)
        if final:
            x = Part(W, "final", norm).norm({k: W.get(f"final_norm.{k}") for k in ("gain", "bias", "alpha")}, x)
        scores = x @ W.get("output.weight", W["embedding.weight"]).T
        return cap * torch.tanh(scores / cap) if cap else scores
    return logits


def post(a, f, x, l, L):
    y = a.post(x + attention(a, x))
    return f.post(y + ffn(f, y))


def post_shifted(a, f, x, l, L):
    n = a.in_(x)
    y = n + attention(a, n)
    n = f.in_(y)
    return n + ffn(f, n)


def pre(a, f, x, l, L, **about):
    y = x + attention(a, a.in_(x), **about)
    return y + ffn(f, f.in_(y))


def peri(a, f, x, l, L, **about):
    y = x + a.out(attention(a, a.in_(x), **about))
    return y + f.out(ffn(f, f.in_(y)))


def output(a, f, x, l, L, **about):
    y = x + a.out(attention(a, x, **about))
    return y + f.out(ffn(f, y))


def mix_ln(a, f, x, l, L, share=0.25):
    return (post if l <= math.floor(share * L) else pre)(a, f, x, l, L)


def normformer(a, f, x, l, L, where="before", resscale=False):
    s = a["head_scale.factor"]
    if where == "before":
        branch = attention(a, a.in_(x), context=lambda c: c * s[:, None])
    else:
        branch = attention(a, a.in_(x), out=lambda y: (y.reshape(*y.shape[:2], H, -1) * s[:, None]).flatten(2))
    y = x + a.out(branch)
    return (f["residual_scale.factor"] * y if resscale else y) + ffn(f, f.in_(y), mid=f.mid)


def sub_ln(a, f, x, l, L):
    y = x + attention(a, a.in_(x), whole="c")
    return y + ffn(f, f.in_(y), mid=f.mid)


def sharp_post(sharp, a, f, x, l, L):
    """#-Post of HybridNorm's appendix G."""
    y = x + attention(a, x, sharp)
    return ffn(f, f.in_(y)) + f.in_(y)


def sharp_pre(sharp, a, f, x, l, L):
    y = x + attention(a, x, sharp)
    return ffn(f, f.in_(y)) + y


def pre_sharp_post(sharp, a, f, x, l, L):
    y = x + attention(a, a.in_(x), sharp)
    return ffn(f, f.in_(y)) + f.in_(y)


def pre_sharp_pre(sharp, a, f, x, l, L):
    y = x + attention(a, a.in_(x), sharp)
    return ffn(f, f.in_(y)) + y


def post_pre(a, f, x, l, L):
    y = a.in_(x) + attention(a, a.in_(x))
    return ffn(f, f.in_(y)) + y


def hybrid_star(a, f, x, l, L):
    return (pre_sharp_pre if l == 1 else sharp_post)("qkv", a, f, x, l, L)


def first_qkv_pre(a, f, x, l, L):
    return (sharp_pre if l == 1 else sharp_post)("qkv", a, f, x, l, L)


def hybrid_star_7b(a, f, x, l, L):
    y = x + a.out(attention(a, a.in_(x) if l == 1 else x, "qkv"))
    n = f.in_(y)
    return ffn(f, n) + (y if l == 1 else n)


def deepnorm(a, f, x, l, L):
    alpha = (2 * L) ** 0.25
    y = a.post(alpha * x + attention(a, x))
    return f.post(alpha * y + ffn(f, y))


def admin(a, f, x, l, L):
    y = a.post(a["residual_scale.factor"] * x + attention(a, x))
    return f.post(f["residual_scale.factor"] * y + ffn(f, y))


def lns(a, f, x, l, L):
    y = x + attention(a, a.in_(x) / math.sqrt(l))
    return y + ffn(f, f.in_(y) / math.sqrt(l))


def layerscale(a, f, x, l, L):
    y = x + a["branch_scale.factor"] * attention(a, a.in_(x))
    return y + f["branch_scale.factor"] * ffn(f, f.in_(y))


def rezero(a, f, x, l, L):
    y = x + a["branch_scale.factor"] * attention(a, x)
    return y + f["branch_scale.factor"] * ffn(f, y)


def keel(a, f, x, l, L, alpha=None):
    alpha = alpha or L
    y = a.post(alpha * x + attention(a, a.in_(x)))
    return f.post(alpha * y + ffn(f, f.in_(y)))


def gate(a, h, e):
    """Sigmoid gates [b, s, H, e] of the context, from what attention reads."""
    z = h @ a["gate.weight"].T
    return (1 / (1 + torch.exp(-z))).reshape(*h.shape[:2], H, e)


def beam(a, f, x, l, L):
    h, i = a.in_(x), 2 * l
    y = math.sqrt((i - 1) / i) * x + a.out(attention(a, h, "qk", context=lambda c: c * gate(a, h, E))) / math.sqrt(i)
    i = 2 * l + 1
    return math.sqrt((i - 1) / i) * y + f.out(ffn(f, f.in_(y))) / math.sqrt(i)


def prores(a, f, x, l, L, t, T, base="pre"):
    beta = min(t / (T * l), 1)
    if base == "pre":
        y = x + beta * attention(a, a.in_(x))
        return y + beta * ffn(f, f.in_(y))
    y = a.post(x + beta * attention(a, x))
    return f.post(y + beta * ffn(f, y))


def residual(W, tokens):
    """ResiDual: x is post-normed, y adds every branch up; the output reads x + LN(y)."""
    x = y = W["embedding.weight"][tokens]
    for l in range(1 + max(int(name.split(".")[1]) for name in W if name.startswith("layers."))):  # noqa: E741
        for part, body in (("attention", attention), ("ffn", ffn)):
            p = Part(W, f"layers.{l}.{part}", ln)
            branch = body(p, x)
            x, y = p.post(x + branch), y + branch
    return (x + ln({k: W[f"final_norm.{k}"] for k in ("gain", "bias")}, y)) @ W["embedding.weight"].T


def sharp(frame, letters):
    return model(partial(frame, letters))


def times_root_d(W, x):
    return x * math.sqrt(x.shape[-1])


rms6 = partial(rms, eps=1e-6)
REFERENCES = {
    "pre": model(pre), "post": model(post, final=False), "post_shifted": model(post_shifted), "peri": model(peri),
    "output": model(partial(output, whole="qk")), "qk": model(partial(pre, norms="qk")),
    "qk_all_heads": model(partial(pre, whole="qk")), "mix_ln": model(mix_ln), "normformer": model(normformer, ln),
    "sub_ln": model(sub_ln, ln), "residual": residual,
    "dyt": model(pre, dyt, embed=lambda W, x: W["embed_scale.factor"] * x),
    "qkv_pre": sharp(sharp_pre, "qkv"), "pre_qkv_pre": sharp(pre_sharp_pre, "qkv"),
    "pre_qkv_post": sharp(pre_sharp_post, "qkv"), "pre_post": sharp(pre_sharp_post, ""), "post_pre": model(post_pre),
    "hybrid": sharp(sharp_post, "qkv"), "hybrid_star": model(hybrid_star), "first_qkv_pre": model(first_qkv_pre),
    "hybrid_embed_norm": model(partial(sharp_post, "qkv"), embed=lambda W, x: rms({"gain": W["embed_norm.gain"]}, x)),
    **{f"{letters}_post": sharp(sharp_post, letters) for letters in ("qkvc", "qkc", "qk", "kv", "kc")},
    "deepnorm": model(deepnorm, ln, final=False), "admin": model(admin, ln, final=False), "lns": model(lns),
    "layerscale": model(layerscale), "rezero": model(rezero), "keel": model(keel, final=False),
    "beam": model(beam, rms6), "prores": model(partial(prores, t=7, T=5)),
    "gemma2": model(partial(peri, cap=50.0), rms_one_plus, embed=times_root_d, cap=30.0),
    "gemma3": model(partial(peri, norms="qk"), rms_one_plus, embed=times_root_d),
    "qwen3": model(partial(pre, norms="qk"), rms6), "olmo2": model(partial(output, whole="qk"), rms6),
    "custom": model(lambda a, f, x, l, L: (y := x + attention(a, x)) + ffn(f, y), final=False),
}
