"""The printed equations of every scheme are parsed, evaluated, and compared with the built module."""

import ast
import re
from pathlib import Path

import pytest
import torch
from decoders import model_config, weights

from megnorm.config import NormConfig
from megnorm.model.decoder import Decoder, TokenLoss, decoder_layers
from megnorm.model.init import initialise
from megnorm.model.scale import StepClock
from megnorm.norms import SCHEMES, equations, fold, placement_of, resolve
from megnorm.norms.page import markdown_page
from megnorm.parallel.tensor import Alone

HEADS, KV, SIZE, STEP = 4, 2, 8, 1500
LETTERS = {"q": "q_norm", "k": "k_norm", "v": "v_norm", "c": "ctx_norm"}
OPERATORS = {
    ast.Add: torch.add,
    ast.Sub: torch.sub,
    ast.Mult: torch.mul,
    ast.Div: torch.div,
    ast.Pow: torch.pow,
}


class Text:
    """A page of equations as lines of layers and definitions of names."""

    def __init__(self, lines):
        body, _, where = "\n".join(lines).partition("\nwhere")
        self.norms = {
            name: parsed(value.split(";")[0])
            for name, value in re.findall(r"^  (\w+)\(x\) = (.*)$", where, re.M)
        }
        self.first, *blocks, self.last = re.split(r"\n(?=layers? |logits)", body)
        self.layers = []
        for block in blocks:
            head, *equations_ = block.splitlines()
            numbers = [int(n) for n in re.findall(r"\d+", head)]
            self.layers += [[line.strip() for line in equations_]] * (numbers[-1] - numbers[0] + 1)


def parsed(text):
    return ast.parse(text.replace("^", "**").strip(), mode="eval").body


class Evaluator:
    """Values of equations. Where a norm stands says which it is: around the sum, around a branch, or
    on the input."""

    def __init__(self, text, W):
        self.text, self.W, self.at = text, W, ""

    def logits(self, tokens):
        self.names = {"tokens": tokens, "t": torch.tensor(STEP, dtype=torch.float64)}
        self.at = "embed"
        self.assign(self.text.first, "embed_norm")
        for number, lines in enumerate(self.text.layers):
            sublayers = iter(("attention", "ffn"))
            for line in lines:
                if re.search(r"Attention\(|FFN\(", line):
                    self.at = f"layers.{number}.{next(sublayers)}"
                self.assign(line, "out_norm" if line.startswith("b =") else "post_norm")
        self.at = ""
        return self.value(parsed(self.text.last.partition("=")[2]), "final_norm")

    def assign(self, line, slot):
        *targets, text = line.split(" = ")
        value = self.value(parsed(text), slot)
        self.names |= dict.fromkeys((target.strip() for target in targets), value)

    def value(self, node, slot):
        if isinstance(node, ast.Constant):
            return torch.tensor(node.value, dtype=torch.float64)
        if isinstance(node, ast.Name):
            return self.names[node.id] if node.id in self.names else self.factor(node.id)
        if isinstance(node, ast.UnaryOp):
            return -self.value(node.operand, slot)
        if isinstance(node, ast.BinOp):
            left, right = slot, slot
            if isinstance(node.op, ast.Add) and slot == "post_norm":
                left, right = "in_norm", "out_norm"
            elif isinstance(node.op, ast.Mult) and slot == "post_norm":
                raise AssertionError("a factor around the sum")
            return OPERATORS[type(node.op)](self.value(node.left, left), self.value(node.right, right))
        name = node.func.id
        if name in self.text.norms:
            return self.normed(name, self.value(node.args[0], slot), self.name(slot))
        arguments = [self.value(a, "in_norm" if name in ("Attention", "FFN") else slot) for a in node.args]
        return getattr(self, f"call_{name}")(*arguments, **{k.arg: k.value for k in node.keywords})

    def name(self, slot):
        return slot if slot in ("embed_norm", "final_norm") else f"{self.at}.{slot}"

    def factor(self, symbol):
        slot = {"alpha": "residual_scale", "beta": "branch_scale", "gamma": "scale"}[symbol.partition("_")[0]]
        return self.W[f"embed_{slot}.factor" if self.at == "embed" else f"{self.at}.{slot}.factor"]

    def normed(self, name, x, at):
        """The definition of the norm applied over the last axis."""
        known = {
            "x": x,
            **{
                short: self.W[f"{at}.{long}"]
                for short, long in (("w", "gain"), ("b", "bias"), ("a", "alpha"))
                if f"{at}.{long}" in self.W
            },
        }
        functions = {
            "sqrt": torch.sqrt,
            "tanh": torch.tanh,
            "mean": lambda v: v.mean(-1, keepdim=True),
            "sum": lambda v: v.sum(-1, keepdim=True),
            "var": lambda v: v.var(-1, correction=0, keepdim=True),
        }

        def walk(node):
            if isinstance(node, ast.BinOp):
                return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
            if isinstance(node, ast.Call):
                return functions[node.func.id](walk(node.args[0]))
            return (
                torch.tensor(node.value, dtype=torch.float64)
                if isinstance(node, ast.Constant)
                else known[node.id]
            )

        return walk(self.text.norms[name])

    def call_min(self, a, b):
        return torch.minimum(a, b)

    def call_tanh(self, x):
        return torch.tanh(x)

    def call_Embedding(self, tokens):
        return self.W["embedding.weight"][tokens]

    def call_Output(self, x):
        return x @ self.W["embedding.weight"].T

    def call_FFN(self, x, mid=None):
        W = {name: self.W[f"{self.at}.{name}.weight"] for name in ("gate", "up", "down")}
        inner = torch.nn.functional.silu(x @ W["gate"].T) * (x @ W["up"].T)
        return (inner if mid is None else self.function(mid, inner, "mid_norm")) @ W["down"].T

    def function(self, node, x, slot):
        """A norm given as a function: RMSNorm, 0.5 * RMSNorm, over the last axis of x."""
        if isinstance(node, ast.BinOp):
            return node.left.value * self.function(node.right, x, slot)
        return self.normed(node.id, x, f"{self.at}.{slot}")

    def head_norm(self, node, x, slot):
        """x [b, s, n, e]; all_heads(N): over the flat heads; else over each head."""
        if isinstance(node, ast.BinOp):
            return node.left.value * self.head_norm(node.right, x, slot)
        if isinstance(node, ast.Call) and node.func.id == "all_heads":
            return self.function(node.args[0], x.flatten(2), slot).view(x.shape)
        if isinstance(node, ast.Call):
            return self.head_norm(node.args[0], x, slot)
        return self.function(node, x, slot)

    def call_Attention(self, x, head_scale=None, gate=None, scale=None, softcap=None, **norms):
        W = {name: self.W[f"{self.at}.{name}.weight"] for name in ("q", "k", "v", "out")}
        norms = {letter: node for letters, node in norms.items() for letter in letters}
        late = {letter: node for letter, node in norms.items() if "after_rope" in ast.dump(node)}

        def maybe(which, letter, heads):
            return self.head_norm(which[letter], heads, LETTERS[letter]) if letter in which else heads

        early = {letter: node for letter, node in norms.items() if letter not in late}
        heads = {
            letter: maybe(early, letter, (x @ W[letter].T).unflatten(-1, (-1, SIZE))) for letter in "qkv"
        }
        q, k = (maybe(late, letter, turned(heads[letter])) for letter in "qk")
        k, v = (y.repeat_interleave(HEADS // KV, 2) for y in (k, heads["v"]))
        scores = torch.einsum("bihe,bjhe->bhij", q, k) * (SIZE**-0.5 if scale is None else scale.value)
        if softcap is not None:
            scores = softcap.value * torch.tanh(scores / softcap.value)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        context = torch.einsum("bhij,bjhe->bihe", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        context = maybe(early, "c", context)
        if gate is not None:
            score = torch.sigmoid(x @ self.W[f"{self.at}.gate.weight"].T)
            context = context * score.unflatten(-1, (HEADS, -1))
        factors = self.W.get(f"{self.at}.head_scale.factor")
        if head_scale is not None and head_scale.id == "before":
            context = context * factors[:, None]
        out = context.flatten(2) @ W["out"].T
        if head_scale is not None and head_scale.id == "after":
            out = (out.unflatten(-1, (HEADS, -1)) * factors[:, None]).flatten(2)
        return out


def turned(x):
    """x [b, s, n, e]: channels i and i + e/2 turn by position * 10000^(-2i/e)."""
    angle = torch.outer(
        torch.arange(x.shape[1], dtype=x.dtype), 1e4 ** (-torch.arange(0, SIZE, 2) / SIZE).to(x)
    )
    first, second = x.chunk(2, -1)
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag), -1)


def built(model):
    """The module, all its weights random, in training step STEP."""
    clock, tp = StepClock(STEP), Alone()
    module = Decoder(
        decoder_layers(model, placement_of(model), "none", tp, clock=clock), TokenLoss(model.vocab_size, tp)
    ).double()
    initialise(module.parameters(), seed=5)
    stream = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2 or parameter.sharding.role in ("norm", "bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
    return module


def difference(model, lines=None):
    """Of the printed equations and the module: largest relative difference of the logits."""
    module, tokens = built(model), torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(1))
    text = Text(lines or equations(placement_of(model)))
    with torch.no_grad():
        right, got = module(tokens), Evaluator(text, weights(module)).logits(tokens)
    return float((got - right).abs().max() / right.abs().max())


VARIANTS = {
    "normformer, resscale, after": {
        "scheme": "normformer",
        "options": {"resscale": True, "head_scale": "after"},
    },
    "star, output norm": {"scheme": "hybrid_star", "options": {"attention_out_norm": True}},
    "prores of gemma2": {"scheme": "prores", "options": {"base": "gemma2"}},
    "layer norm": {"scheme": "peri", "kind": "layer", "bias": True},
    "l2": {"scheme": "hybrid", "kind": "l2"},
    "no gain": {"scheme": "pre", "gain": "none"},
    "dyt everywhere": {"scheme": "hybrid", "kind": "dyt", "bias": True},
    "two kinds": {
        "scheme": "peri",
        "overrides": {
            "0": {"ffn": {"in_norm": {"eps": 0.1}}},
            "1": {"attention": {"out_norm": {"kind": "layer"}}},
        },
    },
    "heads": {
        "scheme": "custom",
        "overrides": {
            ":": {
                "attention": {
                    "q_norm": {"rope": "after", "scale": 0.5},
                    "k_norm": {"gain": "per_head"},
                    "v_norm": {"scope": "all_heads", "kind": "layer"},
                    "ctx_norm": {"scope": "all_heads"},
                    "gate": "head",
                }
            }
        },
    },
    "mid and ends": {
        "scheme": "pre",
        "embed_norm": "default",
        "embed_scale": 3.0,
        "final_softcap": 5.0,
        "attention_softcap": 2.0,
        "attention_scale": 0.7,
        "overrides": {":": {"ffn": {"mid_norm": {"scale": 2.0}}}},
    },
    "factors": {
        "scheme": "post",
        "overrides": {
            ":": {
                "ffn": {
                    "residual_scale": {"value": 2.0, "learned": "scalar", "ramp_steps": 3000},
                    "branch_scale": {"value": -0.5, "ramp_steps": 2000},
                    "in_norm": "default",
                    "residual_from": "normed",
                }
            }
        },
    },
    "two streams of peri": {"scheme": "peri", "streams": "residual"},
}
CASES = {**{name: {"scheme": name} for name in SCHEMES}, **VARIANTS}


def model_of(case):
    return model_config(layers=3, norm=CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_printed_equations_compute_what_the_module_does(case):
    assert difference(model_of(case)) < 2e-5  # constants are printed with six digits


MISPRINTS = {
    "pre": ("x + FFN", "RMSNorm(x) + FFN"),
    "peri": ("RMSNorm(Attention(RMSNorm(x)))", "Attention(RMSNorm(x))"),
    "hybrid": ("qkv", "qk"),
    "deepnorm": ("1.56508", "1.5"),
    "lns": ("0.707107", "0.717107"),
    "gemma2": ("1 + w", "w"),
    "residual": ("y = y + b", "y = y"),
    "output": ("all_heads(RMSNorm)", "RMSNorm"),
    "normformer": ("head_scale=before", "head_scale=after"),
    "prores": ("min(t / 3000, 1)", "min(t / 2000, 1)"),
    "mid and ends": ("5 * tanh(Output(RMSNorm(x)) / 5)", "Output(RMSNorm(x))"),
    "heads": ("after_rope", "per_head"),
}


@pytest.mark.parametrize("case", MISPRINTS)
def test_a_misprint_is_seen(case):
    model, (right, wrong) = model_of(case), MISPRINTS[case]
    lines = equations(placement_of(model))
    assert any(right in line for line in lines), "\n".join(lines)
    try:
        assert difference(model, [line.replace(right, wrong) for line in lines]) > 1e-3
    except (KeyError, RuntimeError):  # a norm without parameters there, or of another width
        pass


def test_equal_layers_are_folded():
    def heads(**norm):
        return [line for line in equations(resolve(NormConfig(**norm), 8, 64)) if line.startswith("layer")]

    assert heads(scheme="hybrid_star") == ["layer 0:", "layers 1-7:"]
    assert heads(scheme="pre") == ["layers 0-7:"]
    assert heads(scheme="pre", overrides={"3": {"ffn": {"in_norm": "none"}}}) == [
        "layers 0-2:",
        "layer 3:",
        "layers 4-7:",
    ]
    assert heads(scheme="lns") == [f"layer {n}:" for n in range(8)]
    assert [run[:2] for run in fold(resolve(NormConfig(scheme="mix_ln"), 8).blocks)] == [(0, 1), (2, 7)]


def test_names_are_defined_once_and_only_where_used():
    for case in CASES:
        body, _, where = "\n".join(equations(placement_of(model_of(case)))).partition("\nwhere")
        defined = re.findall(r"^  (\w+)(?:\(\w\))?(?: =|:| c:| in )", where, re.M)
        assert len(defined) == len(set(defined)), case
        used = set(re.findall(r"\b(\w*Norm(?:_\d)?|DyT(?:_\d)?|(?:alpha|beta|gamma)(?:_\d)?|t)\b", body)) - {
            "Embedding"
        }
        assert used == {
            name
            for name in defined
            if re.fullmatch(r"\w*Norm(_\d)?|DyT(_\d)?|(alpha|beta|gamma)(_\d)?|t", name)
        }, case


def test_the_page_of_all_schemes_is_up_to_date():
    page = Path(__file__).resolve().parents[2] / "configs/norms/README.md"
    right = "python -m megnorm schemes --markdown > configs/norms/README.md"
    assert page.read_text().splitlines() == markdown_page(), right
