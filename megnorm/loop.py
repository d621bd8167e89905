"""The training loop."""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megnorm.checkpoint.save import SaveFailed, save
from megnorm.config import Config
from megnorm.data.batches import Batch, digest_text, evaluation_batches, micro_batches, part_of, rows_digest
from megnorm.data.datasets import Datasets
from megnorm.engine.engine import Engine, MicroBatch, StepResult
from megnorm.engine.replicas import unequal_replicas
from megnorm.exits import EXIT_FAILURE, EXIT_NO_SPACE, EXIT_STOPPED
from megnorm.observe.humanize import duration
from megnorm.observe.probes import Probes
from megnorm.observe.routers import RouterWatch, broken_router
from megnorm.parallel.groups import Groups
from megnorm.plan.flops import model_flops_utilization
from megnorm.plan.schedule import learning_rate


class RunFailed(RuntimeError):
    """The run can't go on; ``exit_code`` says which kind of end it is."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class StopRequest:
    """Notes that a signal asked the run to stop; the loop acts on it between two steps."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: str | None = None

    def install(self) -> None:
        """Take over the signals of this process."""
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        self.signal = signal.Signals(number).name

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop; a collective call."""
        asked = torch.tensor(self.signal is not None, dtype=torch.int32, device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())


@dataclass
class Run:
    """What the loop works with. ``step`` counts finished steps; ``sinks`` take rows of metrics."""

    config: Config
    groups: Groups
    engine: Engine
    datasets: Datasets
    stop: StopRequest
    console: Any
    sinks: list[Any]
    peak_tflops: float | None
    probes: Probes
    routers: RouterWatch
    step: int = 0
    saved_step: int = 0
    interval: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all steps were made."""
        return self.step >= self.config.total_steps


def train(run: Run, report: Callable[[str], None]) -> int:
    """Run to the end, or to a stop that a signal asked for. Returns the exit code; raises RunFailed.

    report: takes a few words on where this rank is, for the message in case it dies.
    """
    began = time.monotonic()
    try:
        stopped = _train(run, report)
        return finish(run, stopped, time.monotonic() - began)
    finally:
        run.console.close()


def _train(run: Run, report: Callable[[str], None]) -> bool:
    """Steps, evaluations and checkpoints until the end. Returns whether a signal ended it before."""
    config, stopped = run.config, run.stop.agreed(run.groups.device)
    while not run.done and not stopped:
        report(f"step {run.step + 1}")
        train_step(run)
        every = config.train.check_replicas_every
        if every and run.step % every == 0:
            check_replicas(run)
        if config.train.eval_every and (run.step % config.train.eval_every == 0 or run.done):
            evaluate(run, "valid")
        stopped = run.stop.agreed(run.groups.device)
        due = config.checkpoint.every and run.step % config.checkpoint.every == 0
        if due and not stopped and not run.done:
            save_checkpoint(run)
    report(f"step {run.step}, ending")
    return stopped and not run.done


def train_step(run: Run) -> None:
    """One optimizer step, and its row of metrics where one is due (its times are means since the last row)."""
    config, began = run.config, time.monotonic()
    batches = step_batches(config, run.datasets, run.groups, run.step)
    lr = learning_rate(config, run.step)
    run.probes.begin(run.step + 1)
    result = run.engine.step(as_tensors(batches, run.groups), lr, run.step + 1)
    probe = run.probes.end()
    run.step += 1
    routers = run.routers.row(run.step, result.routing)
    run.interval.append(time.monotonic() - began)
    finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm) and not broken_router(result.routing)
    if run.step % config.observe.log_every == 0 or probe or routers or run.done or not finite:
        seconds = sum(run.interval) / len(run.interval)
        run.interval.clear()
        speed = config.tokens_per_step / seconds
        mfu = (model_flops_utilization(config, speed, run.groups.layout.world, run.peak_tflops)
               if run.peak_tflops else None)
        row = {"step": run.step, "samples": run.step * config.train.global_batch,
               "tokens": run.step * config.tokens_per_step, "loss": result.loss, "grad_norm": result.grad_norm,
               "lr": lr, "step_seconds": seconds, "tokens_per_second": speed, "mfu": mfu, **result.beside,
               "data": data_digest(run, batches), **({"probe": probe} if probe else {}),
               **({"routers": routers} if routers else {})}
        for sink in run.sinks:
            sink.step(row)
        run.console.step(row, config.total_steps)
    for warning in run.routers.warnings(run.step, result.routing):
        run.console.note(f"WARNING: {warning}")
    if not finite:
        diverged(run, result)


def step_batches(config: Config, datasets: Datasets, groups: Groups, step: int) -> list[Batch]:
    """This replica's micro batches of the step after ``step`` finished ones."""
    size = config.train.global_batch
    return micro_batches(datasets.train, step * size, size, config.train.micro_batch, groups.replica,
                         groups.layout.replicas, datasets.rules)


def data_digest(run: Run, batches: list[Batch]) -> str:
    """A digest of the global batch, the same on every layout; a collective call."""
    own = sum(rows_digest(batch.rows) for batch in batches) * (run.groups.cp.rank == 0)
    total = torch.from_numpy(own).to(run.groups.device)
    dist.all_reduce(total, group=run.groups.dp_group)
    return digest_text(total.cpu().numpy())


def check_replicas(run: Run) -> None:
    """Stop when ranks that must hold equal parameters don't."""
    unequal = unequal_replicas(run.engine.raw.module, run.groups)
    if unequal:
        raise RunFailed(f"step {run.step}: {len(unequal)} parameters differ between ranks that must hold them alike: "
                        f"{'; '.join(unequal[:5])}{'; ...' if len(unequal) > 5 else ''}. The run is not what it seems; "
                        f"the checkpoint of step {run.saved_step} is the last one", EXIT_FAILURE)


def diverged(run: Run, result: StepResult) -> NoReturn:
    """A number that no step can mend: stop before it reaches a checkpoint."""
    last = f"step {run.saved_step} is the last good checkpoint" if run.saved_step else "nothing was saved yet"
    layer = broken_router(result.routing)
    where = f", and the first router whose scores are not numbers is that of {layer}" if layer else ""
    raise RunFailed(f"step {run.step}: loss {result.loss}, gradient norm {result.grad_norm}{where}; {last}. A lower "
                    "learning rate or a longer warm-up may help", EXIT_FAILURE)


def evaluate(run: Run, split: str) -> float:
    """Mean loss in nats per token over the first ``eval_samples`` samples of a split, on every layout the same."""
    dataset, config = getattr(run.datasets, split), run.config
    samples = min(config.train.eval_samples, getattr(dataset, "samples_per_epoch", config.train.eval_samples))
    batches = evaluation_batches(dataset, samples, config.train.micro_batch, run.groups.replica,
                                 run.groups.layout.replicas, run.datasets.rules)
    loss = run.engine.evaluate(as_tensors(batches, run.groups))
    for sink in run.sinks:
        sink.evaluation(run.step, split, loss)
    run.console.evaluation(run.step, split, loss)
    return loss


def save_checkpoint(run: Run) -> bool:
    """Save, together with all ranks. A save that fails leaves the earlier ones, says so, and the run goes on."""
    config = run.config
    for sink in run.sinks:
        sink.sync()
    trainer = {"step": run.step, "samples": run.step * config.train.global_batch,
               "tokens": run.step * config.tokens_per_step}
    try:
        saved = save(config.run_dir, run.engine.raw, run.groups, trainer=trainer,
                     config=config.model_dump(mode="json"), keep_last=config.checkpoint.keep_last,
                     keep_every=config.checkpoint.keep_every)
    except SaveFailed as error:
        run.console.note(f"WARNING: the checkpoint of step {run.step} could not be saved: {error}; "
                         + (f"the one of step {run.saved_step} stays" if run.saved_step else "there is none yet"))
        return False
    run.saved_step = run.step
    run.console.note(f"saved {saved.path} ({saved.size / 2**20:.1f} MiB in {saved.seconds:.1f} s)")
    for warning in saved.warnings:
        run.console.note(f"WARNING: {warning}")
    return True


def finish(run: Run, stopped: bool, seconds: float) -> int:
    """Save what is not saved yet, close everything, say how it ended."""
    unsaved = run.step != run.saved_step and (stopped or run.config.checkpoint.save_at_end)
    kept = save_checkpoint(run) if unsaved else True
    for sink in run.sinks:
        sink.close()
    signals = run.stop.signal or "a signal to another rank"
    summary = (f"stopped by {signals} after step {run.step:,}; the same command again continues" if stopped else
               f"done: {run.step:,} steps in {duration(seconds)}, run directory {Path(run.config.run_dir)}")
    run.console.close(summary)
    if not kept:
        last = f"step {run.saved_step} is the last one" if run.saved_step else "there is none"
        raise RunFailed(f"the last checkpoint (step {run.step}) could not be saved; {last}. Free some space, and run "
                        "the same command again", EXIT_NO_SPACE)
    return EXIT_STOPPED if stopped else 0


def as_tensors(batches: list[Batch], groups: Groups) -> list[MicroBatch]:
    """This rank's part of a replica's batches, as tensors on its device."""
    return [_as_tensors(part_of(batch, groups.cp.rank, groups.cp.size), groups.device) for batch in batches]


def _as_tensors(part: Batch, device: torch.device) -> MicroBatch:
    tokens, labels, weights, *rows = (
        torch.from_numpy(array).to(device)
        for array in (part.tokens, part.labels, part.weights, part.positions, part.documents) if array is not None)
    return (tokens, *rows) if rows else tokens, labels, weights
