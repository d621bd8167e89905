"""Which rank stands where, which layouts are refused and what the message says; stages of equal cost; how
parameters are cut."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megnorm.config import ConfigError, parse_config
from megnorm.parallel.sharding import Constant, ExpertSlice, Sharding, new_parameter, sharding_of
from megnorm.parallel.tensor import Alone
from megnorm.parity import parse_layouts
from megnorm.plan.layout import Layout, accumulation_steps, check_layout, make_layout, stage_bounds
from megnorm.plan.stages import block_bounds


def config(parallel=None, model=None, train=None, length=32):
    return parse_config({
        "run_dir": "x",
        "model": {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn_hidden": 192, "vocab_size": 500,
                  "pad_vocab_to": 64, **(model or {})},
        "data": {"sequence_length": length, "train": "x"},
        "train": {"steps": 1, "micro_batch": 2, "global_batch": 16, **(train or {})},
        "optimizer": {"lr": 1e-3}, "parallel": parallel or {}})


MOE = {"experts": 6, "top_k": 2, "ffn_hidden": 32}


# Ranks


SIZES = st.sampled_from([1, 2, 3, 4])


@given(SIZES, SIZES, SIZES)
def test_groups_part_the_ranks(pp, dp, tp):
    """Each axis: groups of its size, every rank once; two groups of different axes share at most one rank."""
    layout = Layout(pp=pp, dp=dp, tp=tp)
    assert layout.world == pp * dp * tp
    assert len({layout.coordinates(rank) for rank in range(layout.world)}) == layout.world
    found = {axis: layout.groups(axis) for axis in ("pp", "dp", "tp")}
    for axis, groups in found.items():
        assert sorted(sum(groups, [])) == list(range(layout.world))
        for group in groups:
            places = [getattr(layout.coordinates(rank), axis) for rank in group]
            assert places == list(range(getattr(layout, axis)))
    for one, other in itertools.combinations(found, 2):
        assert all(len(set(a) & set(b)) == 1 for a in found[one] for b in found[other] if set(a) & set(b))


def test_tensor_parallel_ranks_are_neighbours():
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_parity_starts_the_ranks_of_each_layout():
    runs = parse_layouts(config(), ["cp=2", "tp=2,cp=2,dp=2"], full=False)
    assert [layout.world for _, _, layout in runs] == [2, 8]


def test_expert_parallel_ranks_are_neighbours_among_the_replicas():
    layout = Layout(pp=2, dp=4, tp=2, ep=2)
    assert layout.neighbours(layout.ep)[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.expert_replicas()[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert layout.whole_models() == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


# Refusals


@pytest.mark.parametrize(("parallel", "world", "message"), [
    ({"tp": 4}, 6, "a world of 6 processes doesn't fit parallel.tp=4 x pp=1: it must be a multiple of 4, "
                   "such as [4, 8, 12]"),
    ({"tp": 2, "pp": 2}, 2, "a world of 2 processes doesn't fit parallel.tp=2 x pp=2: it must be a multiple "
                            "of 4, such as [4, 8, 12]"),
    ({"tp": 2, "dp": 3}, 4, "parallel.dp=3 doesn't fit: 4 processes / (parallel.tp=2 x pp=1) = 2; leave dp "
                            "out, or start 6 processes"),
])
def test_a_world_that_does_not_fit(parallel, world, message):
    with pytest.raises(ConfigError) as caught:
        make_layout(config(parallel), world)
    assert str(caught.value) == message


@pytest.mark.parametrize(("parallel", "model", "train", "world", "parts"), [
    ({"tp": 3}, {}, {}, 3, ["model.heads=8", "parallel.tp=3", "[1, 2, 4, 8]"]),
    ({"tp": 8}, {"ffn_hidden": 100}, {}, 8, ["model.ffn_hidden=100", "parallel.tp=8"]),
    ({"tp": 8}, {"pad_vocab_to": 4}, {}, 8, ["vocab", "500", "parallel.tp=8"]),
    ({"pp": 2, "zero_stage": 2}, {}, {}, 2, ["zero_stage=2", "pp=2", "0 or 1"]),
    ({"pp": 2, "zero_stage": 3}, {}, {}, 2, ["zero_stage=3", "pp=2"]),
    ({"pp": 8}, {}, {}, 8, ["parallel.pp=8", "model.layers=4"]),
    ({}, {}, {"global_batch": 15}, 2, ["train.global_batch=15", "micro_batch=2", "dp=2", "16"]),
    ({"ep": 2}, {}, {}, 2, ["parallel.ep=2", "model.moe", "not set"]),
    ({"ep": 3}, {"moe": MOE}, {}, 4, ["parallel.ep=3", "dp=4 x cp=1", "model.moe.experts=6", "one of [1, 2]"]),
    ({"ep": 4}, {"moe": MOE}, {}, 4, ["parallel.ep=4", "model.moe.experts=6", "one of [1, 2]"]),
    ({"ep": 2, "zero_stage": 3}, {"moe": MOE}, {}, 2, ["zero_stage=3", "ep=2", "1 or 2"]),
    ({"tp": 8}, {"moe": {**MOE, "ffn_hidden": 36}}, {}, 8, ["model.moe.ffn_hidden=36", "parallel.tp=8", "[1, 2, 3"]),
    ({}, {}, {"global_batch": 2}, 4, ["train.global_batch=2", "8"]),
])
def test_layouts_that_are_refused(parallel, model, train, world, parts):
    chosen = config(parallel, model, train)
    with pytest.raises(ConfigError) as caught:
        check_layout(chosen, make_layout(chosen, world))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(("parallel", "world", "steps"), [
    ({}, 1, 8), ({}, 2, 4), ({"tp": 2}, 2, 8), ({"tp": 2, "pp": 2}, 8, 4), ({"pp": 4}, 4, 8),
    ({"tp": 4}, 4, 8)])
def test_accumulation_follows_from_the_batches(parallel, world, steps):
    chosen = config(parallel)
    layout = make_layout(chosen, world)
    check_layout(chosen, layout)
    assert accumulation_steps(chosen, layout) == steps


# Stages


def costs(weights, bounds):
    return [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_the_costliest_stage_is_as_cheap_as_can_be(weights, stages):
    stages = min(stages, len(weights))
    bounds = stage_bounds(weights, stages)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and len(bounds) == stages + 1
    assert all(a < b for a, b in itertools.pairwise(bounds))
    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    assert max(costs(weights, bounds)) == min(max(costs(weights, [0, *cut, len(weights)])) for cut in cuts)


def test_the_output_layer_counts_on_the_last_stage():
    """A vocabulary that costs two blocks: the last stage has fewer blocks."""
    one = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192
    vocab = round(2 * one / 64)
    bounds = block_bounds(config(model={"layers": 10, "vocab_size": vocab, "pad_vocab_to": 1}), 2)
    assert bounds == [0, 6, 10]
    assert block_bounds(config(model={"layers": 8, "vocab_size": 1, "pad_vocab_to": 1}), 4) == [0, 2, 4, 6, 8]


# How parameters are cut


class Place(Alone):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize(("dim", "size"), [(0, 2), (0, 4), (1, 2), (1, 4), (None, 4)])
def test_slices_tile_the_whole_tensor(dim, size):
    whole = torch.arange(8 * 12).view(8, 12)
    seen = torch.zeros_like(whole)
    for rank in range(size):
        about = Place(rank, size).parameter("w", (8, 12), dim=dim, role="matrix", init=Constant(0.0)).sharding
        assert whole[about.slices()].shape == about.local_shape
        seen[about.slices()] += 1
    assert bool((seen == (size if dim is None else 1)).all())


def test_fewer_slices_than_ranks_are_shared_by_neighbours():
    """Two key/value heads over four ranks: ranks 0, 1 hold the first, their gradients are shares."""
    made = {"dim": 0, "slices": 2, "role": "matrix", "init": Constant(0.0)}
    about = [Place(rank, 4).parameter("k", (16, 8), **made).sharding for rank in range(4)]
    assert [a.slices()[0] for a in about] == [slice(0, 8), slice(0, 8), slice(8, 16), slice(8, 16)]
    assert all(a.partial for a in about)


def test_metadata_survives_casts_and_its_absence_is_an_error():
    parameter = new_parameter(Sharding("w", (4, 4), "matrix", Constant(0.0)))
    module = torch.nn.Module()
    module.w = parameter
    assert sharding_of(module.bfloat16().w).name == "w"
    with pytest.raises(AssertionError, match="carries no sharding"):
        sharding_of(torch.nn.Parameter(torch.zeros(3)))


def test_a_cut_that_does_not_divide_is_an_error():
    with pytest.raises(AssertionError):
        Place(0, 3).parameter("w", (8, 12), dim=0, role="matrix", init=Constant(0.0))


def test_experts_are_cut_beside_the_tensor_parallel_dimension():
    """Rank 1 of 2 in either way: experts 2 and 3 of 4, the second half of the inner axis."""
    sharding = Sharding("e.down", (4, 8, 6), "matrix", Constant(0.0), dim=2, index=1, count=2,
                        experts=ExpertSlice(1, 2))
    assert tuple(new_parameter(sharding).shape) == sharding.local_shape == (2, 8, 3)
    assert sharding.slices() == (slice(2, 4), slice(0, 8), slice(3, 6))
    parts = sharding.by_expert()
    assert [part.name for part in parts] == ["e.down.2", "e.down.3"]
    assert all(part.local_shape == (8, 3) and part.slices() == (slice(0, 8), slice(3, 6)) for part in parts)
    value = torch.arange(48).view(2, 8, 3)
    assert torch.equal(sharding.cut(value)[1], value[1]) and torch.equal(sharding.join(sharding.cut(value)), value)
