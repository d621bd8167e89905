"""How far the preprocessing is: a bar on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_LINE_SECONDS = 30.0


class Progress:
    """Shows bytes read of the inputs' total, and rates of text, documents and tokens. A context manager."""

    def __init__(self, total_bytes: int) -> None:
        self._total = max(total_bytes, 1)
        self._finished = self._position = 0
        self._text_bytes = self._documents = self._tokens = 0
        self._started = self._last_line = time.perf_counter()
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None

    def _make_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("tokenizing"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%  {task.fields[rates]}  ETA"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True))
        bar.add_task("tokenizing", total=self._total, rates="")
        return bar

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def read(self, position: int) -> None:
        """The bytes on disk that were read of the piece being read."""
        self._position = position

    def piece_done(self, disk_bytes: int) -> None:
        """The next piece begins."""
        self._finished += disk_bytes
        self._position = 0

    def update(self, text_bytes: int, documents: int, tokens: int) -> None:
        """Counts of one more chunk."""
        self._text_bytes += text_bytes
        self._documents += documents
        self._tokens += tokens
        if self._terminal:
            if self._bar is None:  # only now, since it starts a thread and the workers are forked before
                self._bar = self._make_bar()
                self._bar.start()
            done = min(self._finished + self._position, self._total)
            self._bar.update(self._bar.task_ids[0], completed=done, rates=self._rates())
        elif time.perf_counter() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.perf_counter()
            print(self._line(), file=sys.stderr, flush=True)

    def _rates(self) -> str:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        return (
            f"{self._text_bytes / seconds / 1e6:.1f} MB/s  {self._documents / seconds:,.0f} docs/s  "
            f"{self._tokens / seconds:,.0f} tokens/s"
        )

    def _line(self) -> str:
        share = min(1.0, (self._finished + self._position) / self._total)
        seconds = time.perf_counter() - self._started
        left = f"{seconds * (1 - share) / share:.0f} s" if share else "unknown"
        return f"{share:.0%}  {self._rates()}  ETA {left}"
