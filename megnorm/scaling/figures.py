"""The report's figures: drawn once with matplotlib, as PNG files and as SVG whose colours follow the page."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megnorm.observe.humanize import count
from megnorm.observe.metrics import read_metrics
from megnorm.observe.plot import COLOURS, INK, MUTED, STYLE, smooth
from megnorm.scaling.bootstrap import interval
from megnorm.scaling.cells import Cell, read_cell
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.fit import law_of
from megnorm.scaling.optimum import optimum
from megnorm.scaling.results import Result

GRID = "#eceff3"
EDGE = "#c9ced6"
# Colours of the drawing, and the page's names for them.
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    EDGE: "--edge",
    **{colour: f"--series-{n}" for n, colour in enumerate(COLOURS)},
}
MAX_POINTS = 400
BAND_DRAWS = 60


@dataclass(frozen=True)
class Figure:
    """A picture: file name without suffix, caption, SVG for the page, PNG bytes."""

    name: str
    caption: str
    svg: str
    png: bytes


def draw(name: str, caption: str, paint: Callable[[Any], None]) -> Figure:
    """Draw on axes of the size of a phone's width. Raises ScalingError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ScalingError('reports need matplotlib: pip install "megnorm[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {**STYLE, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": name, "axes.linewidth": 0.8}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(5.2, 3.5), layout="constrained")
        paint(axes)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, which="both")
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(png, format="png", dpi=160)
        pyplot.close(figure)
    return Figure(name, caption, for_page(svg.getvalue(), caption), png.getvalue())


def for_page(svg: str, caption: str) -> str:
    """The SVG without prolog, metadata and fixed size, its colours those of the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var({name})")
    label = caption.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def colour_of(schemes: list[str]) -> dict[str, str]:
    """A colour for each scheme."""
    return {scheme: COLOURS[n % len(COLOURS)] for n, scheme in enumerate(schemes)}


def loss_curves(cells: list[Cell], schemes: list[str]) -> list[Figure]:
    """Training loss over tokens, a figure a size, a line a scheme: its run with the most tokens, the first seed."""
    colours, figures = colour_of(schemes), []
    chosen: dict[tuple[float, str], Cell] = {}
    for cell in cells:
        key = (_size_of(cell, cells), cell.scheme)
        if not cell.trunk and (key not in chosen or cell.tokens > chosen[key].tokens):
            chosen[key] = cell
    for number, size in enumerate(sorted({size for size, _ in chosen})):
        lines = [(scheme, *curve(chosen[size, scheme])) for scheme in schemes if (size, scheme) in chosen]
        lines = [(scheme, tokens, loss) for scheme, tokens, loss in lines if len(tokens)]
        if lines:
            caption = f"Training loss, {count(size)} parameters: nats per token over tokens seen, smoothed"
            figures.append(draw(f"loss-{number + 1}", caption, lambda axes, lines=lines: _curves(axes, lines, colours)))
    return figures


def curve(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and training loss of a run from its first step, through its trunk; finite rows only, thinned."""
    rows: list[dict] = []
    here: Cell | None = cell
    while here is not None:
        rows = [row for row in read_metrics(here.path) if "split" not in row] + rows
        here = read_cell(here.parent) if here.parent else None
    rows = [row for row in rows if np.isfinite(row["loss"])]
    tokens, loss = np.array([row["tokens"] for row in rows]), np.array([row["loss"] for row in rows])
    thin = np.unique(np.linspace(0, len(rows) - 1, MAX_POINTS).astype(int)) if rows else []
    return (tokens[thin], smooth(loss, max(1, len(loss) // 60))[thin]) if rows else (tokens, loss)


def fitted_curves(analysis: dict[str, Any], counted: str, runs: dict[str, list[Result]]) -> list[Figure]:
    """A figure a scheme: the law over N (over C for ``power``) at each token budget, with its interval and the runs."""
    figures = []
    for scheme, results in runs.items():
        caption = f"{scheme}: runs (dots), fitted law and 95 % interval over {analysis['counts'][counted]}"
        if analysis["form"] == "power":
            caption = f"{scheme}: runs (dots), fitted law and 95 % interval over FLOPs"
        figures.append(
            draw(
                f"law-{scheme}",
                caption,
                lambda axes, scheme=scheme, results=results: _law(axes, analysis, scheme, counted, results),
            )
        )
    return figures


def residuals(analysis: dict[str, Any], counted: str, runs: dict[str, list[Result]]) -> Figure:
    """Measured over fitted loss, by FLOPs."""
    colours = colour_of(list(runs))

    def paint(axes: Any) -> None:
        for scheme, results in runs.items():
            axes.plot(
                [run.flops for run in results],
                100 * np.array(analysis["schemes"][scheme][counted]["residuals"]),
                "o",
                color=colours[scheme],
                markersize=4.5,
                label=scheme,
            )
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("FLOPs")
        axes.set_ylabel("measured over fitted loss, %")
        axes.legend(frameon=False)

    return draw("residuals", "Residuals: what the law misses, in per cent of the loss", paint)


def best_losses(analysis: dict[str, Any], counted: str, runs: dict[str, list[Result]]) -> Figure:
    """Loss at the compute-optimal N and D over compute, with intervals; beyond the largest run it is a forecast."""
    colours = colour_of(list(runs))
    every = [run.flops for results in runs.values() for run in results]
    budgets = np.geomspace(min(every), 100 * max(every), 30)

    def paint(axes: Any) -> None:
        for scheme in runs:
            fits = [law_of(analysis, scheme, counted)] + [
                law_of(analysis, scheme, counted, theta) for theta in _some_refits(analysis, scheme, counted)
            ]
            losses = np.array([[optimum(fit, budget).loss for budget in budgets] for fit in fits])
            _banded(axes, budgets, losses, colours[scheme], scheme)
        axes.axvline(max(every), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        axes.set_xlabel("FLOPs (dashed: the largest run)")
        axes.set_ylabel("loss at the best N and D")
        axes.legend(frameon=False)

    return draw("optimum", "Loss at the compute-optimal size and tokens, 95 % intervals", paint)


def write_pngs(figures: list[Figure], folder: Path) -> list[Path]:
    """The figures as files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures:
        paths.append(folder / f"{figure.name}.png")
        paths[-1].write_bytes(figure.png)
    return paths


def _size_of(cell: Cell, cells: list[Cell]) -> int:
    """The smallest N within 5 %: schemes change a model's N by less, and belong side by side."""
    return min(other.parameters for other in cells if other.parameters > cell.parameters / 1.05)


def _curves(axes: Any, lines: list[tuple[str, np.ndarray, np.ndarray]], colours: dict[str, str]) -> None:
    for scheme, tokens, loss in lines:
        axes.plot(tokens, loss, color=colours[scheme], linewidth=1.5, label=f"{scheme}  {loss[-1]:.3f}")
    high = max(float(loss[len(loss) // 20]) for _, _, loss in lines)
    low = min(float(loss.min()) for _, _, loss in lines)
    axes.set_ylim(low - 0.05 * (high - low), high)
    axes.xaxis.set_major_formatter(lambda tokens, _: count(tokens).replace(".0", "") if tokens else "0")
    axes.set_xlim(0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)


def _law(axes: Any, analysis: dict[str, Any], scheme: str, counted: str, runs: list[Result]) -> None:
    fit, power = law_of(analysis, scheme, counted), analysis["form"] == "power"
    refits = [law_of(analysis, scheme, counted, theta) for theta in _some_refits(analysis, scheme, counted)]
    budgets: dict[float, list[Result]] = {}
    for run in runs:
        budgets.setdefault(0 if power else float(f"{run.tokens:.1e}"), []).append(run)
    if len(budgets) > len(COLOURS):  # tokens follow the size: one line through the runs would mean nothing
        budgets = dict(sorted(budgets.items())[:: -(-len(budgets) // len(COLOURS))])
    for colour, (_, group) in zip(COLOURS, sorted(budgets.items()), strict=False):
        where = [run.flops if power else run.size(counted) for run in group]
        x = np.geomspace(min(where) / 1.3, max(where) * 1.3, 40)
        tokens = np.log(group[0].tokens)
        losses = np.exp([one.log_loss(np.log(x), tokens, np.log(x)) for one in [fit, *refits]])
        _banded(axes, x, losses, colour, None if power else f"{count(group[0].tokens)} tokens")
        axes.plot(where, [run.loss for run in group], "o", color=colour, markersize=4.5)
    losses = [run.loss for run in runs]
    room = 0.25 * (max(losses) - min(losses)) or 0.1
    axes.set_ylim(min(losses) - room, max(losses) + room)  # whatever a wide interval does outside
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs" if power else "parameters")
    axes.set_ylabel("loss")
    if not power:
        axes.legend(frameon=False)


def _banded(axes: Any, x: np.ndarray, losses: np.ndarray, colour: str, label: str | None) -> None:
    """The first row as a line, the interval of the others as a band."""
    axes.plot(x, losses[0], color=colour, linewidth=1.5, label=label)
    if len(losses) > 1:
        low, high = np.array([interval(column) for column in losses[1:].T]).T
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)


def _some_refits(analysis: dict[str, Any], scheme: str, counted: str) -> list[list[float]]:
    return analysis["schemes"][scheme][counted]["refits"][:BAND_DRAWS]
