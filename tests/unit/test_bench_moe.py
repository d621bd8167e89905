"""The benchmark of an MoE layer: its contestants compute the same, its figures are the right quotients."""

import importlib.util
import os
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from megnorm.testing.bench_moe import CONTESTANTS, SHAPES, MoEShape, make_input, make_layer, make_moe_step, make_weights
from megnorm.testing.bench_step import Comparison, Cost
from megnorm.testing.ranks import run_ranks

TINY = MoEShape(hidden=16, ffn_hidden=16, experts=6, top_k=3, sequence=8, batch=2)
LAYERS = [name for name in CONTESTANTS if name != "products"]


def outputs(shapes):
    """Of each layer: the output and the input's gradient, which passes through every expert and the router. Every
    contestant also takes a step in bf16."""
    found = {}
    for shape, name in product(shapes, LAYERS):
        x, gradient = make_input(shape)
        y = make_layer(name, shape)(x.requires_grad_())
        y.backward(gradient)
        found[shape, name] = y.detach(), x.grad
    for name in CONTESTANTS:
        make_moe_step(name, shapes[0], "bf16")()
    return found


def test_contestants_compute_the_same():
    shapes = TINY, TINY._replace(skew=1.0)
    (found,) = run_ranks(outputs, 1, shapes)
    for shape in shapes:
        expected = by_tokens(shape)
        for name in LAYERS:
            torch.testing.assert_close(found[shape, name][0], expected, rtol=1e-5, atol=1e-5, msg=name)
        (_, ours), (_, reference), *others = (found[shape, name] for name in LAYERS)
        for _, gradient in others:
            torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)
        assert 0 < (ours - reference).abs().max() < 0.1  # ours adds the gradient of its losses


def by_tokens(shape):
    """sum of g_e down_e(silu(gate_e x) * up_e x), a token at a time."""
    router, gate_up, down = make_weights(shape)
    x, _ = make_input(shape)
    rows = []
    for token in x.flatten(0, 1):
        scores, chosen = (router @ token).softmax(-1).topk(shape.top_k)
        row = torch.zeros(shape.hidden)
        for g, e in zip(scores / scores.sum(), chosen, strict=True):
            gate, up = (gate_up[e] @ token).chunk(2)
            row += g * (down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows).view_as(x)


def test_tables_show_ratios_beside_goals():
    tool = Path(__file__).resolve().parents[2] / "tools" / "bench_moe.py"
    spec = importlib.util.spec_from_file_location("bench_moe_tool", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    costs = dict(zip(CONTESTANTS, (2.0, 2.5, 3.0, 6.0, 1.5), strict=True))
    results = [Comparison(shape, "fp32", {name: [Cost(c, c)] * 2 for name, c in costs.items()}) for shape in SHAPES]
    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    console.print(module.costs_table(results), module.ratios_table(results))
    text = console.export_text()
    for shown in ("1.25 +1.0", "1.50 +1.0", "3.00 +2.0", "75 %", "2000.0", "1,024"):
        assert shown in text, text
