"""The mixture of experts on one rank against a loop over tokens, and what must not depend on how it is computed."""

import math

import pytest
import torch
import torch.nn.functional as F
from decoders import decoder, model_config, relative, tokens_of, weights

from megnorm.model.grouped import by_torch, one_by_one
from megnorm.model.moe import MoE
from megnorm.model.router import Router, largest
from megnorm.model.routing import Routing

SIZES = {"experts": 6, "top_k": 2, "ffn_hidden": 20}


def moe_model(norm="pre", **moe):
    """Two layers of 32 channels, experts in both."""
    return {"norm": norm, "moe": {**SIZES, **moe}}


def layer_of(dtype=torch.float32, norm="pre", options=None, **moe):
    """The second block's mixture with random weights, biases and gains, and its model."""
    model = model_config(**moe_model(norm, **moe), **(options or {}))
    module = decoder(model, dtype=dtype)
    layer = [part for part in module.modules() if isinstance(part, MoE)][1]
    if model.moe.balance == "bias":
        layer.router.balance += torch.linspace(-0.3, 0.3, SIZES["experts"])
    return layer, model


def inputs(dtype=torch.float32, batch=2, length=9):
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(3), dtype=dtype, requires_grad=True)


def scores_of(logits, moe):
    return torch.sigmoid(logits) if moe.router == "sigmoid" else torch.softmax(logits, -1)


def expert(W, name, e, x, act):
    """One expert, or with e = () the shared FFN, on one token."""
    if act == "swiglu":
        gate, up = (W[f"{name}.gate_up"][e] if e != () else (W[f"{name}.gate.weight"], W[f"{name}.up.weight"]))
        h = F.silu(gate @ x) * (up @ x)
    else:
        up = W[f"{name}.up"][e][0] if e != () else W[f"{name}.up.weight"]
        bias = W[f"{name}.up_bias"][e][0] if e != () else W[f"{name}.up.bias"]
        h = F.gelu(up @ x + bias, approximate="tanh")
    if f"{name}.mid_norm.gain" in W:
        h = (h - h.mean()) / torch.sqrt(h.var(unbiased=False) + 1e-5)
        h = h * W[f"{name}.mid_norm.gain"][e] + W[f"{name}.mid_norm.bias"][e]
    down = W[f"{name}.down"][e] if e != () else W[f"{name}.down.weight"]
    y = down @ h
    return y if act == "swiglu" else y + (W[f"{name}.down_bias"][e] if e != () else W[f"{name}.down.bias"])


def token_loop(layer, model, x):
    """y [b, s, d], token by token, expert by expert."""
    W = {p.sharding.name.removeprefix("layers.1.ffn."): p for p in layer.parameters()}
    moe, rows = model.moe, []
    balance = layer.router.balance if moe.balance == "bias" else [0.0] * moe.experts
    capacity = math.inf if moe.capacity is None else math.ceil(moe.capacity * moe.top_k * x.shape[1] / moe.experts)
    for sequence in x:
        taken = [0] * moe.experts
        for token in sequence:
            scores = scores_of(W["router.weight"] @ token, moe)
            ranked = sorted(range(moe.experts), key=lambda e: -float(scores[e].detach() + balance[e]))
            size = moe.experts // moe.groups
            groups = sorted(range(moe.groups), key=lambda g: -sum(sorted(
                (float(scores[e].detach() + balance[e]) for e in range(g * size, (g + 1) * size)))[-2:]))
            chosen = [e for e in ranked if e // size in groups[:moe.top_groups]][:moe.top_k]
            total = sum(scores[e] for e in chosen) if moe.normalise_top_k else 1.0
            y = torch.zeros_like(token)
            for e in chosen:
                taken[e] += 1
                if taken[e] <= capacity:
                    y = y + moe.routed_scale * scores[e] / total * expert(W, "experts", e, token, model.activation)
            if moe.shared_experts:
                y = y + expert(W, "shared", (), token, model.activation)
            rows.append(y)
    return torch.stack(rows).view(x.shape)


CASES = {
    "olmoe": {},
    "mixtral": {"normalise_top_k": True},
    "deepseek": {"router": "sigmoid", "normalise_top_k": True, "routed_scale": 2.5, "shared_experts": 2,
                 "balance": "bias", "groups": 3, "top_groups": 2},
    "sigmoid, one expert": {"router": "sigmoid", "top_k": 1, "balance": "sequence"},
    "capacity": {"capacity": 0.7, "router": "sigmoid"},
    "all experts": {"top_k": 6, "balance": "none"},
    "a norm in the experts": {"norm": "normformer", "shared_experts": 1},
    "biases": {"norm": "normformer", "options": {"bias": True, "activation": "gelu"}, "shared_experts": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_tokens(case):
    """fp32 to 1e-6: output, and the gradients of input, router, experts."""
    layer, model = layer_of(**{"aux_weight": 0, "z_weight": 0, **CASES[case]}
                            if CASES[case].get("balance", "aux") in ("aux", "sequence")
                            else {"z_weight": 0, **CASES[case]})
    x = inputs()
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    parameters = [x, *layer.parameters()]
    found = layer(x)
    right = token_loop(layer, model, x)
    assert relative(found, right) < 1e-6
    for parameter, got, its in zip(parameters, torch.autograd.grad((found * along).sum(), parameters),
                                   torch.autograd.grad((right * along).sum(), parameters), strict=True):
        assert its.norm() > 1e-4
        assert relative(got, its) < 1e-6, getattr(parameter, "sharding", "input")


def test_an_expert_that_is_not_chosen_has_a_gradient_of_zeros():
    layer, _ = layer_of(torch.float64, balance="bias", router="sigmoid")
    layer.router.balance.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))
    layer(inputs(torch.float64)).sum().backward()
    norms = layer.experts.down.grad.flatten(1).norm(dim=1)
    assert (norms[:2] > 0.1).all() and (norms[2:] == 0).all()


def test_gradients_of_the_losses_by_finite_differences():
    """The losses' gradients with respect to the input, loads held fixed as in training: fp64."""
    for moe in ({"balance": "aux", "aux_weight": 0.5}, {"balance": "sequence", "router": "sigmoid", "aux_weight": 0.5},
                {"balance": "none", "z_weight": 0.3}):
        layer, _ = layer_of(torch.float64, **moe)
        router: Router = layer.router

        def loss(x, router=router):
            logits = F.linear(x, router.weight)
            chosen = largest(logits, 2)
            return router.losses(logits, router.log_scores(logits), chosen, chosen)[0]

        assert torch.autograd.gradcheck(loss, inputs(torch.float64, length=4), eps=1e-7)


@pytest.mark.parametrize(("balance", "capacity"), [("aux", None), ("sequence", 0.6), ("bias", None)])
def test_losses_in_closed_form(balance, capacity):
    """aux = n sum f P over the micro batch or each sequence, dropped choices too, z = mean logsumexp^2; their gradient
    arrives, times the share that the engine gives; recomputation counts nothing twice."""
    for recompute in ("none", "full"):
        still = {"bias_rate": 0.0} if balance == "bias" else {}
        model = model_config(**moe_model(balance=balance, aux_weight=0.7, z_weight=0.2, capacity=capacity, **still))
        module = decoder(model, recompute=recompute)
        routers = {part.layer: part for part in module.modules() if isinstance(part, Router)}
        routing = routers[0].routing
        tokens, _ = tokens_of(model)
        seen = {}
        hooks = [router.register_forward_pre_hook(lambda m, a, layer=layer: seen.setdefault(layer, a[0]))
                 for layer, router in routers.items()]
        logits = module(tokens)
        for hook in hooks:
            hook.remove()
        aux, z = [], []
        for layer, router in routers.items():
            its = F.linear(seen[layer], router.weight)
            p = its.softmax(-1)
            counts = F.one_hot(p.topk(2).indices, 6).sum(2).double()
            per = (counts, p) if balance != "aux" else (counts.flatten(0, 1)[None], p.flatten(0, 1)[None])
            f, mean = per[0].mean(1) / 2, per[1].mean(1)
            aux.append(6 * (f * mean).sum(-1).mean())
            z.append(its.logsumexp(-1).square().mean())
        right = 0.25 * (0.7 * sum(aux) + 0.2 * sum(z)) / 2
        W = list(weights(module).values())
        routing.loss_scale = 0.0  # so that this alone is what flows back
        expected = torch.autograd.grad(right, W, allow_unused=True, retain_graph=True)
        routing.end_step(lambda sums: sums + 1, micro_batches=1)
        routing.loss_scale = 0.25
        found = torch.autograd.grad(0.0 * logits.sum(), W)
        for parameter, got, its in zip(W, found, expected, strict=True):
            its = torch.zeros_like(got) if its is None else its
            assert (got - its).norm() < 1e-9 * max(1e-3, its.norm()), parameter.sharding.name
        by_name = dict(zip(weights(module), found, strict=True))
        assert by_name["layers.0.ffn.router.weight"].norm() > 1e-4
        record = routing.end_step(lambda sums: sums, micro_batches=1)
        for layer in routers:
            assert record[layer].aux == pytest.approx(float(aux[layer].detach()), rel=1e-12)
            assert record[layer].z == pytest.approx(float(z[layer].detach()), rel=1e-12)
        assert routing.beside(record) == pytest.approx({"router_aux_loss": 0.7 * float(sum(aux).detach()) / 2,
                                                        "router_z_loss": 0.2 * float(sum(z).detach()) / 2}, rel=1e-12)


def test_what_is_recorded_is_that_of_the_choices():
    """Loads, entropy and dropped shares over two micro batches; an evaluation is not counted; recomputed or not."""
    records = []
    for recompute in ("none", "selective", "full"):
        model = model_config(**moe_model(capacity=0.6, router="sigmoid", balance="none"))
        module = decoder(model, recompute=recompute)
        router = next(part for part in module.modules() if isinstance(part, Router) and part.layer == 1)
        choices, scores = [], []

        @torch.no_grad()
        def look(_module, args, router=router, choices=choices, scores=scores):
            s = torch.sigmoid(F.linear(args[0], router.weight))
            choices.append(s.topk(2).indices)
            scores.append(s / s.sum(-1, keepdim=True))

        for seed in (0, 1):
            hook = router.register_forward_pre_hook(look)
            loss = module(*tokens_of(model, seed=seed), torch.ones(2, 12))
            hook.remove()
            loss.backward()
        with torch.no_grad():
            module(tokens_of(model, seed=2)[0])
        record = router.routing.end_step(lambda sums: sums, micro_batches=2)[1]
        load = torch.bincount(torch.cat(choices).flatten(), minlength=6) / 96
        p = torch.cat(scores)
        capacity = math.ceil(0.6 * 2 * 12 / 6)
        over = (F.one_hot(torch.cat(choices), 6).sum((1, 2)) - capacity).clamp_min(0).sum()
        assert torch.tensor(record.load) == pytest.approx(load, rel=1e-6)
        even = [6 * (torch.bincount(c.flatten(), minlength=6) / 48 * q.flatten(0, 1).mean(0)).sum()
                for c, q in zip(choices, scores, strict=True)]
        assert record.aux == pytest.approx(float(sum(even)) / 2) and even[0] != even[1]
        assert record.dropped == pytest.approx(float(over) / 96) and over > 0
        assert record.entropy == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-6)
        records.append(record)
        assert router.routing.end_step(lambda sums: sums + 1, micro_batches=1)[1].aux == 1  # nothing is left over
    assert records[0] == records[1] == records[2]


def test_the_bias_is_moved_once_a_step_against_the_loads():
    """b_e += rate * sign(mean load - load_e) by the counts of all micro batches; no gradient, no weight."""
    model = model_config(**moe_model(balance="bias", router="sigmoid", bias_rate=0.25))
    module = decoder(model, recompute="full")
    router = next(part for part in module.modules() if isinstance(part, Router))
    for seed in (0, 1):
        module(*tokens_of(model, seed=seed), torch.ones(2, 12)).backward()
    assert (router.balance == 0).all()
    load = torch.tensor(router.routing.end_step(lambda sums: sums, micro_batches=2)[0].load)
    assert torch.equal(router.balance, 0.25 * torch.sign(1 / 6 - load).to(router.balance))
    assert len(set(router.balance.tolist())) > 1
    assert not any("balance" in name for name in weights(module))


def test_the_bias_stays_in_fp32():
    layer, _ = layer_of(balance="bias")
    before = layer.router.balance.clone()
    layer.to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.bfloat16 and torch.equal(layer.router.balance, before)
    assert layer.router.balance.dtype == torch.float32


def test_the_router_scores_in_fp32_in_a_bf16_run():
    layer, _ = layer_of()
    layer.to(torch.bfloat16)
    x = inputs().detach().bfloat16()
    chosen, gates = layer.router(x)
    scores = F.linear(x.float(), layer.router.weight.float()).softmax(-1)
    assert gates.dtype == torch.float32
    assert relative(gates, scores.gather(-1, chosen)) < 1e-6


def test_the_first_of_equal_scores_wins():
    scores = torch.tensor([[0.5, 0.7, 0.5, 0.7, 0.5, 0.7], [0.1] * 6])
    assert largest(scores, 4).tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]
    assert largest(torch.zeros(1000, 64), 8).eq(torch.arange(8)).all()


@pytest.mark.parametrize("low", [-40.0, -60.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vanishing_sigmoids_stay_finite(low, dtype):
    """Scores that all underflow: finite factors and losses, and a gradient that doesn't push all logits one way."""
    layer, _ = layer_of(router="sigmoid", normalise_top_k=True, aux_weight=1.0, z_weight=0.0)
    layer.to(dtype)
    with torch.no_grad():
        layer.router.weight[:, 0] = low
        layer.router.weight[:, 1:] *= 0.1
    x = inputs().detach()
    x[..., 0] = 1.0
    router = layer.router
    logits = F.linear(x.to(dtype).float(), router.weight.float()).requires_grad_()
    log_scores = router.log_scores(logits)
    chosen = largest(log_scores, 2)
    loss, _ = router.losses(logits, log_scores, chosen, chosen)
    (push,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss) and torch.isfinite(push).all() and push.norm() > 1e-5
    assert push.sum(-1).abs().max() < 1e-3 * push.norm()
    _, gates = router(x.to(dtype))
    assert relative(gates.sum(-1), torch.ones(2, 9)) < 1e-6


def test_dropping_depends_on_no_later_token_and_no_other_sequence():
    layer, _ = layer_of(torch.float64, capacity=0.5)
    x = inputs(torch.float64, batch=3, length=12).detach()
    changed = x.clone()
    changed[0, 7:] = 0.3
    changed[1] = -x[1]
    found, other = layer(x), layer(changed)
    assert relative(other[0, :7], found[0, :7]) < 1e-12 and relative(other[2], found[2]) < 1e-12
    assert relative(other[1], found[1]) > 0.1


@pytest.mark.parametrize("norm", ["post", "hybrid_star", "deepnorm", "normformer", "admin", "rezero", "residual"])
def test_schemes_train_with_experts(norm):
    """Every parameter of the model has a finite gradient; NaN in an expert that nobody chose reaches none."""
    model = model_config(**moe_model(norm, balance="bias", router="sigmoid"))
    module = decoder(model)
    idle = [part for part in module.modules() if isinstance(part, MoE)]
    for layer in idle:
        layer.router.balance[5] = -9.0
        with torch.no_grad():
            layer.experts.down[5] = math.nan
    module(*tokens_of(model), torch.ones(2, 12)).backward()
    for name, parameter in weights(module).items():
        assert torch.isfinite(parameter.grad).all(), name


def test_torchs_grouped_product_is_the_same():
    """What a GPU takes for bf16, on groups of which one is empty: values and gradients."""
    stream = torch.Generator().manual_seed(8)
    rows, weight, along = (torch.randn(size, generator=stream) for size in ((40, 32), (5, 16, 32), (40, 16)))
    counts = torch.tensor([9, 0, 16, 7, 8])
    found = []
    for product in (one_by_one, by_torch):
        x, w = (t.bfloat16().requires_grad_() for t in (rows, weight))
        y = product(x, w, counts)
        found.append((y, *torch.autograd.grad(y, (x, w), along.bfloat16())))
    assert all(relative(got.float(), its.float()) < 1e-2 for got, its in zip(*found, strict=True))
    assert (found[0][2][1] == 0).all() and (found[1][2][1] == 0).all()


def test_an_uncounted_model_has_no_routing():
    assert Routing(model_config()).end_step(None, 1) == {}
