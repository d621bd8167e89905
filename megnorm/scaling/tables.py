"""Tables of a sweep for a terminal: what it would cost, and where it stands."""

import math

from rich.table import Table

from megnorm.observe.humanize import count, duration
from megnorm.scaling.cells import Cell, progress, read_status
from megnorm.scaling.sweep import Cost, SweepFile

STYLES = {"done": "green", "failed": "red", "running": "cyan", "lost": "yellow", "stopped": "yellow"}


def device_hours(cell: Cell, cost: Cost) -> float | None:
    """Estimate from ``cost.tflops``; None without it."""
    if cost.tflops is None:
        return None
    devices = cell.nproc * cell.nnodes
    return cell.own_flops / (cost.tflops * 1e12) / 3600 + devices * cost.start_seconds / 3600


def price(hours: float | None, cost: Cost) -> str:
    """The price of so many device-hours."""
    return "-" if hours is None or cost.price is None else f"{cost.currency}{hours * cost.price:,.2f}"


def plan_table(cells: list[Cell], sweep: SweepFile) -> Table:
    """Every cell with its FLOPs (its own, without its trunk's), device-hours and price, and their sum."""
    table = Table(title=f"{sweep.dir}: {len(cells)} cells")
    for name in ("cell", "state", "N", "N without emb.", "tokens", "steps", "FLOPs", "device-hours", "cost"):
        table.add_column(name, justify="left" if name in ("cell", "state") else "right", no_wrap=name == "cell")
    total, flops = 0.0, 0
    for cell in cells:
        hours = device_hours(cell, sweep.cost)
        state = read_status(cell.path).state
        steps = f"{cell.first_step:,}-{cell.steps:,}" if cell.first_step else f"{cell.steps:,}"
        table.add_row(
            cell.name,
            state,
            count(cell.parameters),
            count(cell.non_embedding),
            count(cell.tokens),
            steps,
            f"{cell.own_flops:.2e}",
            "-" if hours is None else f"{hours:,.3g}",
            price(hours, sweep.cost),
        )
        total += hours or 0.0
        flops += cell.own_flops
    known = sweep.cost.tflops is not None
    table.add_section()
    table.add_row(
        "all",
        "",
        "",
        "",
        "",
        "",
        f"{flops:.2e}",
        f"{total:,.3g}" if known else "-",
        price(total if known else None, sweep.cost),
    )
    if not known:
        table.caption = "for device-hours give cost.tflops (what a device sustains), for the cost also cost.price"
    return table


def status_table(cells: list[Cell]) -> Table:
    """Every cell's state, steps, loss, attempts, time, and the last error of failed ones."""
    states: dict[str, int] = {}
    table = Table()
    for name in ("cell", "state", "steps", "loss", "attempts", "time", "last error"):
        table.add_column(
            name,
            justify="right" if name in ("steps", "loss", "attempts", "time") else "left",
            overflow="fold",
        )
    for cell in cells:
        status = read_status(cell.path)
        queued = status.state == "pending" and (cell.path / "queued.json").exists()
        state = "lost" if status.lost else "queued" if queued else status.state
        step, loss = progress(cell) if status.attempts else (cell.first_step, math.nan)
        states[state] = states.get(state, 0) + 1
        table.add_row(
            cell.name,
            f"[{STYLES.get(state, 'dim')}]{state}[/]",
            f"{step:,}/{cell.steps:,}",
            "-" if status.attempts == 0 else f"{loss:.4f}",
            str(status.attempts),
            duration(status.seconds),
            status.error if state == "failed" else "",
        )
    table.title = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return table
