"""Training with a mixture of experts: what is shown and written of its routers, and the end of a broken one."""

import math
from pathlib import Path

import pytest
import torch
from small_run import raw_config, write_config

from megnorm.observe.metrics import read_metrics
from megnorm.testing.ranks import run_ranks

MOE = {"experts": 32, "top_k": 2, "ffn_hidden": 8, "layers": "first dense 1", "capacity": 1.5}


def trained(config: str, poisoned: bool) -> str:
    """The whole run on this rank; its console, or with a NaN in the third block's router how it ended."""
    import contextlib
    import io

    from megnorm.engine.start import start
    from megnorm.loop import RunFailed, StopRequest, train
    from megnorm.model.router import Router
    from megnorm.parallel.groups import make_groups
    from megnorm.prepare import prepare
    from megnorm.worker import open_run

    prepared = prepare(config, [f"run_dir={Path(config).parent / 'poisoned'}"] if poisoned else [], 1, "none")
    device = torch.device("cpu")
    start(device, 120)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run = open_run(prepared, "none", make_groups(prepared.layout, device), StopRequest())
        if poisoned:
            (router,) = (part for part in run.engine.raw.module.modules()
                         if isinstance(part, Router) and part.layer == 2)
            with torch.no_grad():
                router.weight[3, 5] = math.nan
            try:
                train(run, lambda where: None)
            except RunFailed as error:
                return str(error)
        train(run, lambda where: None)
    return shown.getvalue()


@pytest.fixture(scope="module")
def config(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of two micro batches: too few tokens for some of the experts."""
    folder = tmp_path_factory.mktemp("experts")
    raw = raw_config(data, folder / "run", model__layers=3, model__moe=MOE, train__steps=5, train__global_batch=2,
                     observe__routers_every=2, observe__idle_expert_steps=3, schedule__warmup_steps=1)
    return write_config(folder / "config.yaml", raw)


@pytest.fixture(scope="module")
def shown(config: Path) -> str:
    return run_ranks(trained, 1, str(config), False)[0]


def test_rows_hold_what_the_routers_did(config: Path, shown: str) -> None:
    rows = [row for row in read_metrics(config.parent / "run") if "split" not in row]
    assert [row["step"] for row in rows if "routers" in row] == [1, 2, 4]
    assert abs(rows[0]["loss"] - math.log(300)) < 0.3
    for row in rows:
        assert 0.009 < row["router_aux_loss"] < 0.03 and row["router_z_loss"] > 0.001
    for layers in (row["routers"] for row in rows if "routers" in row):
        assert list(layers) == ["layers.1", "layers.2"]
        for seen in layers.values():
            assert sum(seen["load"]) == pytest.approx(1.0) and len(seen["load"]) == 32
            assert seen["max_over_mean"] == pytest.approx(32 * max(seen["load"]))
            assert all((share * 128) == pytest.approx(round(share * 128)) for share in seen["load"]), "2 x 32 tokens, 2 each"
            assert 0 < seen["dropped"] < 1 and 3 < seen["entropy"] <= math.log(32) and seen["z"] > 1
    mean_z = sum(seen["z"] for seen in rows[0]["routers"].values()) / 2
    assert rows[0]["router_z_loss"] == pytest.approx(0.001 * mean_z)


def test_experts_that_stay_idle_are_named(shown: str) -> None:
    warnings = [line for line in shown.splitlines() if "no token went to expert" in line]
    assert warnings and all("WARNING: step" in line and "of layers." in line and "for 3 steps" in line
                            for line in warnings)
    assert not [line for line in warnings if "step 1:" in line or "step 2:" in line]


def test_the_console_shows_the_losses_apart_and_the_equations(shown: str) -> None:
    (first,) = [line for line in shown.splitlines() if line.startswith("step 1/5")]
    assert " | router aux 0.0" in first and " | router z 0.0" in first
    assert "MoE(x) is sum of s_e * FFN_e(x) over the 2 of 32 experts" in shown


def test_tensorboard_holds_the_same(config: Path, shown: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.parent / "run" / "tensorboard")).Reload()
    rows = [row for row in read_metrics(config.parent / "run") if "routers" in row]
    for tag, value in {"routers/layers.2/load/31": lambda row: row["routers"]["layers.2"]["load"][31],
                       "routers/layers.1/entropy": lambda row: row["routers"]["layers.1"]["entropy"],
                       "train/router_aux_loss": lambda row: row["router_aux_loss"]}.items():
        points = {event.step: event.value for event in events.Scalars(tag)}
        assert all(points[row["step"]] == pytest.approx(value(row), rel=1e-6) for row in rows), tag


def test_a_broken_router_ends_the_run_with_its_layer(config: Path) -> None:
    message = run_ranks(trained, 1, str(config), True)[0]
    assert "step 1:" in message and "router whose scores are not numbers is that of layers.2" in message
    assert not list((config.parent / "poisoned").glob("checkpoints/*"))


def test_a_decoder_filled_from_the_checkpoint_has_the_loss_of_the_last_evaluation(config: Path, shown: str) -> None:
    from megnorm.checkpoint.storage import candidates
    from megnorm.checkpoint.weights import fill
    from megnorm.config import load_config
    from megnorm.data.datasets import open_datasets
    from megnorm.model.decoder import Decoder, TokenLoss, decoder_layers
    from megnorm.norms import placement_of
    from megnorm.parallel.tensor import Alone

    loaded = load_config(config.parent / "run" / "config.yaml")
    model = Decoder(decoder_layers(loaded.model, placement_of(loaded.model), "none", Alone()), TokenLoss(300, Alone()))
    fill(model, candidates(config.parent / "run")[0])
    valid = open_datasets(loaded).valid
    rows = torch.stack([torch.from_numpy(valid[sample].astype("int64")) for sample in range(7)])
    with torch.no_grad():
        loss = model(rows[:, :-1], rows[:, 1:], torch.full((7, 32), 1 / (7 * 32)))
    (last,) = [row["loss"] for row in read_metrics(config.parent / "run") if "split" in row]
    assert float(loss) == pytest.approx(last, rel=1e-5)
