"""Probes in one process: when they look, what they count, what they leave behind."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megnorm.observe.probes import Probes, in_order, part_of_model
from megnorm.observe.tensorboard import TensorBoard

NAMES = ("embedding", "layers.0.attention.q.weight", "layers.0.attention.in_norm.gain", "layers.1.ffn.up.weight",
         "layers.10.ffn.up.weight", "final_norm.gain")


@pytest.fixture
def groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(device=torch.device("cpu"))
    dist.destroy_process_group()


def probes(groups, every=2, streams=1, shares=dict, blocks=None):
    return Probes(every, streams, blocks or {0: nn.Identity(), 1: nn.Identity()}, NAMES, shares, groups)


def test_parts_stand_in_the_order_of_the_model():
    parts = [part_of_model(name) for name in reversed(NAMES)]
    assert in_order(parts) == ["embedding", "layers.0.attention", "layers.1.ffn", "layers.10.ffn", "final_norm"]
    assert part_of_model("embed_scale.factor") == "embed_scale"


def test_the_first_step_and_each_multiple_is_looked_at(groups):
    watched = probes(groups, every=3)
    seen = []
    for step in range(1, 8):
        watched.begin(step)
        watched.blocks[0](torch.ones(1, 2, 4))
        watched.blocks[1](torch.ones(1, 2, 4))
        if watched.end() is not None:
            seen.append(step)
    assert seen == [1, 3, 6]


def test_shares_are_added_by_part_and_absent_parts_are_zero(groups):
    scalar = torch.tensor
    shares = {"layers.0.attention.q.weight": scalar(9.0), "layers.0.attention.in_norm.gain": scalar(16.0),
              "final_norm.gain": scalar(float("nan")), "embedding": scalar(4.0)}
    watched = probes(groups, shares=lambda: shares)
    watched.begin(2)
    watched.gradients_are_whole()
    assert watched.end()["grad_norm"] == {"embedding": 2.0, "layers.0.attention": 5.0, "layers.1.ffn": 0.0,
                                          "layers.10.ffn": 0.0, "final_norm": None}


def test_gradients_of_other_steps_are_left_alone(groups):
    def shares():
        raise AssertionError

    watched = probes(groups, shares=shares)
    watched.begin(3)
    watched.gradients_are_whole()
    assert watched.end() is None


def test_sizes_are_over_all_micro_batches_and_not_over_evaluations(groups):
    blocks = {0: nn.Linear(2, 2, bias=False), 1: nn.Identity()}
    with torch.no_grad():
        blocks[0].weight.copy_(2 * torch.eye(2))
    watched = probes(groups, blocks=blocks)
    watched.begin(2)
    for x in (torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[3.0, 3.0], [3.0, 3.0]]])):  # one token, two tokens
        blocks[1](blocks[0](x))
    with torch.no_grad():
        blocks[0](torch.full((1, 1, 2), 100.0))
    size = (19 / 3) ** 0.5
    assert watched.end()["residual_rms"] == pytest.approx({"input": size, "layers.0": 2 * size, "layers.1": 2 * size})
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks.values())


def test_two_streams_have_two_sizes(groups):
    watched = probes(groups, streams=2)
    watched.begin(1)
    for block in watched.blocks.values():
        block(torch.tensor([[[1.0, 1.0, 3.0, 3.0]]]))
    assert watched.end()["residual_rms"]["layers.1"] == pytest.approx([1.0, 3.0])


def test_no_probes_ask_nothing_of_the_other_ranks():
    """Without a process group a collective call would raise."""
    watched = Probes(0, 1, {0: nn.Identity()}, NAMES, dict, SimpleNamespace(device=torch.device("cpu")))
    watched.begin(1)
    assert watched.end() is None


def test_tensorboard_has_a_curve_for_each_part(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.step({"step": 4, "loss": 1.0, "probe": {"grad_norm": {"layers.0.ffn": 2.5, "final_norm": None},
                                                  "residual_rms": {"layers.0": [1.0, 3.0]}}})
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points == {"train/loss": [(4, 1.0)], "probe/grad_norm/layers.0.ffn": [(4, 2.5)],
                      "probe/residual_rms/layers.0/0": [(4, 1.0)], "probe/residual_rms/layers.0/1": [(4, 3.0)]}
