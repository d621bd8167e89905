"""What rank 0 shows: the first page, then a bar on a terminal, or one line a log interval elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

from megnorm.config import Config
from megnorm.observe.first_page import first_page
from megnorm.observe.humanize import count, duration, percent, speed
from megnorm.plan.layout import Layout

REDRAW_SECONDS = 0.1
SETTLED = 3
# What is trained beside the loss, as far as a line has room for it.
BESIDE = {"router_aux_loss": "router aux", "router_z_loss": "router z"}


class Pace:
    """Seconds a step, smoothed; the first one, which also warms everything up, counts only until the next."""

    def __init__(self) -> None:
        self.rows, self.seconds = 0, 0.0

    def add(self, step_seconds: float) -> None:
        """Take a step's seconds into the running mean."""
        self.rows += 1
        self.seconds = step_seconds if self.rows <= 2 else 0.9 * self.seconds + 0.1 * step_seconds


class Console:
    """The run on ``stream``. Methods are called on rank 0; the others hold a NullConsole."""

    def __init__(self, config: Config, layout: Layout, stream: TextIO | None = None) -> None:
        self.config, self.layout, self.pace = config, layout, Pace()
        self._console = RichConsole(file=stream or sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._drawn = 0.0

    def first_page(self, peak: tuple[float | None, str], start_step: int = 0,
                   extra: Mapping[str, str] | None = None) -> None:
        """Model, norms, layout, batch, duration, FLOPs; see first_page.first_page for the arguments."""
        for line in first_page(self.config, self.layout, peak, start_step, extra):
            self._console.print(line)

    def step(self, row: dict, total_steps: int) -> None:
        """One logged step: a row of metrics.jsonl."""
        self.pace.add(row["step_seconds"])
        left = self.pace.seconds * (total_steps - row["step"])
        if self._console.is_terminal:
            self._draw(row, total_steps, left)
        else:
            self._console.print(step_line(row, total_steps, left))
        if self.pace.rows == SETTLED:
            self.note(f"estimated time: {duration(left)} more for the {total_steps - row['step']:,} steps to "
                      f"go, {duration(self.pace.seconds)} a step")

    def evaluation(self, step: int, split: str, loss: float) -> None:
        """A loss over an evaluation set."""
        self.note(f"step {step:,}: {split} loss {loss:.4f} nats a token")

    def note(self, text: str) -> None:
        """A line on anything else: checkpoints saved, signals, what was resumed."""
        (self._bar.console if self._bar else self._console).print(text)

    def close(self, summary: str = "") -> None:
        """Leave the bar as it stands, and print the summary; safe to call twice."""
        if self._bar:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None
        if summary:
            self._console.print(summary)

    def _draw(self, row: dict, total_steps: int, left: float) -> None:
        text = f"loss {row['loss']:.4f}  {speed(row['tokens_per_second'])}  ETA {duration(left)}"
        if self._bar is None:
            columns = (TextColumn("step {task.completed:,}/{task.total:,}"), BarColumn(),
                       TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, auto_refresh=False)
            self._bar.add_task(text, total=total_steps, completed=row["step"])
            self._bar.start()
            self._console.show_cursor(True)  # a killed run must not leave a terminal without one
        self._bar.update(self._bar.task_ids[0], completed=row["step"], description=text)
        now = time.monotonic()
        if now - self._drawn >= REDRAW_SECONDS or row["step"] == total_steps:
            self._drawn = now
            self._bar.refresh()


class NullConsole:
    """The console of ranks other than 0: the same methods, nothing shown."""

    def first_page(self, peak: tuple[float | None, str], start_step: int = 0,
                   extra: Mapping[str, str] | None = None) -> None:
        pass

    def step(self, row: dict, total_steps: int) -> None:
        pass

    def evaluation(self, step: int, split: str, loss: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self, summary: str = "") -> None:
        pass


def step_line(row: dict, total_steps: int, seconds_left: float) -> str:
    """A logged step as one plain line; MFU only where the peak is known."""
    parts = [f"step {row['step']:>{len(str(total_steps))}}/{total_steps}", f"loss {row['loss']:.4f}",
             f"lr {row['lr']:.3e}", f"grad norm {row['grad_norm']:.3f}",
             f"{speed(row['tokens_per_second']):>14}"]
    parts[2:2] = [f"{text} {row[name]:.4g}" for name, text in BESIDE.items() if name in row]
    if row["mfu"] is not None:
        parts.append(f"MFU {percent(row['mfu']):>5}")
    return " | ".join([*parts, f"{count(row['tokens'])} tokens", f"ETA {duration(seconds_left)}"])
