"""Parallel layers, norms over a split axis and the vocabulary-parallel loss against one rank, in fp64.

World 4: tensor-parallel pairs with other data in each replica, and all four as one group. Every collective
must be given its group: the default group is poisoned.
"""

import contextlib
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megnorm.config.placement import HeadNorm, Norm
from megnorm.model.init import initialise
from megnorm.model.norm import SpanningNorm, heads_norm
from megnorm.parallel.cross_entropy import cross_entropy, nats_and_log_z
from megnorm.parallel.groups import make_groups
from megnorm.parallel.linear import ColumnLinear, RowLinear, VocabEmbedding
from megnorm.parallel.sharding import Normal
from megnorm.parallel.tensor import Alone
from megnorm.plan.layout import Layout
from megnorm.testing.parity import perturb
from megnorm.testing.ranks import RankFailed, run_ranks

INIT = Normal(0.3, 3.0)
COLLECTIVES = [name for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
                                 "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
                                 "all_to_all", "all_to_all_single", "broadcast") if hasattr(dist, name)]


@contextlib.contextmanager
def no_default_group():
    """Collectives raise when they are not told their group, or told the world."""
    def guarded(name, original):
        def call(*args, **kwargs):
            groups = [a for a in (*args, *kwargs.values()) if isinstance(a, dist.ProcessGroup)]
            if not groups or groups[0] is dist.group.WORLD:
                raise RuntimeError(f"{name} on the default group")
            return original(*args, **kwargs)
        return call

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, guarded(name, getattr(dist, name))))
        yield


def on_ranks(check, tp):
    """Run ``check(groups)`` on 4 ranks in pairs or as one group; returns its results."""
    return run_ranks(_checked, 4, check, tp)


def _checked(check, tp):
    groups = make_groups(Layout(pp=1, dp=4 // tp, tp=tp), torch.device("cpu"))
    with no_default_group():
        return check(groups)


def twice(build, groups):
    """The module over the ranks, and the whole one, filled alike."""
    return filled(build(tp=groups.tp)), filled(build(tp=Alone()))


def filled(module):
    module.double()
    initialise(module.parameters(), seed=3)
    perturb(module.parameters())
    return module


def data(groups, *shape):
    """Equal on the ranks of a tensor-parallel group, different in each replica."""
    stream = torch.Generator().manual_seed(100 + groups.at.dp)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


def mine(whole, groups, dim=-1):
    return whole.chunk(groups.tp.size, dim)[groups.tp.rank]


def close(got, right, what):
    assert got.shape == right.shape, what
    assert (got - right).norm() <= 1e-10 * right.norm().clamp_min(1e-3), f"{what}: {got} {right}"


def same_gradients(parallel, whole):
    for part, right in zip(parallel.parameters(), whole.parameters(), strict=True):
        assert part.sharding.name == right.sharding.name
        assert right.grad.norm() > 1e-6
        close(part.grad, right.grad[part.sharding.slices()], f"gradient of {part.sharding.name}")


def column(groups):
    layer, whole = twice(partial(ColumnLinear, "c", 12, 20, bias=True, init=INIT), groups)
    direction, x = data(groups, 3, 5, 20), data(groups, 3, 5, 12)
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, right = layer(groups.tp.enter(x)), whole(y)
    close(got, mine(right, groups), "output")
    (got * mine(direction, groups)).sum().backward()
    (right * direction).sum().backward()
    close(x.grad, y.grad, "gradient of x")
    same_gradients(layer, whole)


def row(groups):
    layer, whole = twice(partial(RowLinear, "r", 20, 12, bias=True, init=INIT), groups)
    direction, x = data(groups, 3, 5, 12), data(groups, 3, 5, 20)
    part, y = mine(x, groups).clone().requires_grad_(), x.clone().requires_grad_()
    got, right = layer(part), whole(y)
    close(got, right, "output")
    (got * direction).sum().backward()
    (right * direction).sum().backward()
    close(part.grad, mine(y.grad, groups), "gradient of x")
    same_gradients(layer, whole)


def pair(groups):
    """Column, activation, row: the FFN; a layer before it shows the gradient that leaves the region."""
    def build(tp):
        return [filled(layer) for layer in (
            ColumnLinear("up", 12, 20, bias=True, init=INIT, tp=tp),
            RowLinear("down", 20, 12, bias=True, init=INIT, tp=tp))]

    direction, x = data(groups, 3, 5, 12), data(groups, 3, 5, 12)
    results = []
    for tp in (groups.tp, Alone()):
        up, down = build(tp)
        first = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64))
        h = first * x
        y = h + down(F.gelu(up(tp.enter(h))))
        (y * direction).sum().backward()
        results.append((y, first.grad, up, down))
    (y, grad, up, down), (right, right_grad, whole_up, whole_down) = results
    close(y, right, "output")
    close(grad, right_grad, "gradient of the layer before")
    same_gradients(up, whole_up)
    same_gradients(down, whole_down)


def embedding(groups):
    layer, whole = twice(partial(VocabEmbedding, "e", 32, 12, init=INIT), groups)
    borders = torch.tensor([[0, 7, 8, 15, 16, 23, 24, 31]])
    direction = data(groups, 4, 8, 12)
    ids = torch.cat((borders, direction[1:, :, 0].mul(1000).long() % 32))
    got, right = layer(ids), whole(ids)
    close(got, right, "vectors")
    (got * direction).sum().backward()
    (right * direction).sum().backward()
    same_gradients(layer, whole)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("check", [column, row, pair, embedding])
def test_equals_one_rank(check, tp):
    on_ranks(check, tp)


NORMS = [Norm(kind=kind, rounding=rounding, bias=bias) for kind, rounding, bias in itertools.product(
    ("rms", "layer"), ("gain_then_cast", "cast_then_gain"), (False, True))]


def spanning(groups):
    for norm in NORMS:
        layer, whole = twice(partial(SpanningNorm, "n", norm, 24), groups)
        direction, x = data(groups, 3, 5, 24), 2 + data(groups, 3, 5, 24)
        part, y = mine(x, groups).clone().requires_grad_(), x.clone().requires_grad_()
        got, right = layer(part), whole(y)
        close(got, mine(right, groups), "output")
        (got * mine(direction, groups)).sum().backward()
        (right * direction).sum().backward()
        close(part.grad, mine(y.grad, groups), "gradient of x")
        same_gradients(layer, whole)


def one_one_three_three(groups):
    """The statistic is of the whole vector, on every layout; the gradient likewise."""
    norm = HeadNorm(scope="all_heads", eps=0.0)
    layer = heads_norm("n", norm, 4, 1, groups.tp).double()
    torch.nn.init.ones_(layer.gain)
    x = torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64)
    part = mine(x, groups).clone().requires_grad_()
    y = layer(part)
    close(y, mine(x / 5 ** 0.5, groups), "output")
    direction = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)
    (y * mine(direction, groups)).sum().backward()
    # d/dx of sum(d x) / sqrt(mean(x^2)): d / r - x (d . x) / (4 r^3), with r^2 = 5, d . x = 12.5
    close(part.grad, mine(direction / 5 ** 0.5 - x * 12.5 / (4 * 5 ** 1.5), groups), "gradient of x")
    close(layer.gain.grad, mine(direction * x / 5 ** 0.5, groups), "gradient of the gain")
    return y.tolist()


@pytest.mark.parametrize("tp", [2, 4])
def test_norm_over_a_split_axis_equals_one_rank(tp):
    on_ranks(spanning, tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_one_one_three_three(tp):
    results = on_ranks(one_one_three_three, tp)
    assert sum(results[:tp], []) == pytest.approx([0.4472, 0.4472, 1.3416, 1.3416], abs=1e-4)


def targets_at_borders(vocab):
    """Every id at the border of a shard of 4 or 2 ranks that is a real one, the last real one, others."""
    borders = [i for i in (0, 7, 8, 15, 16, 23, 24, 31) if i < vocab]
    return torch.tensor([*borders, vocab - 1, *(5 * i % vocab for i in range(14 - len(borders)))]).view(3, 5)


def split_vocabulary(groups, dtype, limit):
    """29, 20, 8 or 1 of 32 columns are real: with 4 ranks the last one, or the last three, hold padding only.
    Nats and log Z, each with a gradient of its own."""
    for vocab in (32, 29, 20, 8, 1):
        logits = (3 * data(groups, 3, 5, 32)).to(dtype)
        logits[..., vocab:] += 50
        targets, weight = targets_at_borders(vocab), data(groups, 3, 5)
        part = mine(logits, groups).clone().requires_grad_()
        nats, log_z = nats_and_log_z(part, targets, vocab, groups.tp)
        assert torch.equal(nats, cross_entropy(part, targets, vocab, groups.tp))
        wide = logits.double().requires_grad_()
        right = -F.log_softmax(wide[..., :vocab], -1).gather(-1, targets[..., None])[..., 0]
        right_z = wide[..., :vocab].logsumexp(-1)
        assert (nats - right).norm() <= limit * right.norm().clamp_min(1e-3), vocab
        assert (log_z - right_z).norm() <= limit * right_z.norm(), vocab
        (nats * weight + 0.3 * log_z.square()).sum().backward()
        (right * weight + 0.3 * right_z.square()).sum().backward()
        rounding = 4e-3 if dtype == torch.bfloat16 else limit
        assert (part.grad - mine(wide.grad, groups)).norm() <= rounding * wide.grad.norm()
        padding = torch.arange(32).chunk(groups.tp.size)[groups.tp.rank] >= vocab
        assert bool((part.grad[..., padding] == 0).all())


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6),
                                              (torch.bfloat16, 1e-6)])
def test_cross_entropy_of_a_split_vocabulary(tp, dtype, limit):
    on_ranks(partial(split_vocabulary, dtype=dtype, limit=limit), tp)


# What the checks above must not let pass


def faulty(groups, check, method, fault):
    with mock.patch.object(type(groups.tp), method, FAULTS[fault]):
        check(groups)


FAULTS = {
    "a statistic of this rank alone": lambda tp, x: x * tp.size,
    "a gradient that is not summed": lambda tp, x: x,
    "a sum on the default group": lambda tp, x: _summed_in_the_world(x),
}


def _summed_in_the_world(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


PLANTED = [(spanning, "statistic", "a statistic of this rank alone", "output"),
           (one_one_three_three, "statistic", "a statistic of this rank alone", "output"),
           (column, "enter", "a gradient that is not summed", "gradient of x"),
           (pair, "enter", "a gradient that is not summed", "gradient of the layer before"),
           (row, "leave", "a sum on the default group", "default group"),
           (embedding, "leave", "a gradient that is not summed", "vectors")]


@pytest.mark.parametrize(("check", "method", "fault", "message"), PLANTED)
def test_a_planted_fault_is_found(check, method, fault, message):
    with pytest.raises(RankFailed, match=message):
        on_ranks(partial(faulty, check=check, method=method, fault=fault), 2)
