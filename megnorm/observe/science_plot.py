"""The science experiments as pictures. matplotlib (the extra "plot") is imported when one is drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megnorm.observe.plot import INK, MUTED, STYLE

COLOURS = {"post": "#d1495b", "deepnorm": "#8d6a9f", "pre": "#2f6fd0", "lns": "#66a5ad", "peri": "#1f9d84",
           "normformer": "#d9952a", "hybrid": "#7a4fc0", "hybrid_star": "#22272e"}
NAMES = {"post": "Post", "deepnorm": "DeepNorm", "pre": "Pre", "lns": "LNS", "peri": "Peri", "normformer": "NormFormer",
         "hybrid": "Hybrid", "hybrid_star": "Hybrid*"}
MOMENTS = {"start": "step 1", "end": "step 100"}
GAP = 0.047  # of the axes' height, between two labels


def draw(name: str, result: dict[str, Any], output: str | Path) -> None:
    """The picture of an experiment (PNG, or what the suffix says). ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError('plots need matplotlib: pip install "megnorm[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = PICTURES[name](pyplot, result)
        figure.savefig(output, dpi=160)
        pyplot.close(figure)


def draw_gradients(pyplot, result: dict[str, Any]):
    """The norm of each layer's gradient, in the first step and after training."""
    figure, axes = _two_panels(pyplot, "Where the gradient goes",
                               "norm of each layer's gradient, log scale; 16 layers, hidden 128")
    for panel, (when, title) in zip(axes, MOMENTS.items(), strict=True):
        lines = {scheme: (np.arange(1, len(found[when]) + 1), found[when]) for scheme, found in result.items()}
        _log_lines(panel, lines, title, "layer")
    _name_lines(axes)
    return figure


def draw_stream(pyplot, result: dict[str, Any]):
    """The size of the residual stream over the depth."""
    figure, axes = _two_panels(pyplot, "How the residual stream grows",
                               "root mean square of the stream after each block, log scale; 64 layers, hidden 64")
    for panel, (when, title) in zip(axes, MOMENTS.items(), strict=True):
        lines = {scheme: (np.arange(len(found[when])), found[when]) for scheme, found in result.items()}
        _log_lines(panel, lines, title, "blocks passed")
    _name_lines(axes)
    return figure


def draw_depth(pyplot, result: dict[str, Any]):
    """Loss curves without warm-up, a panel for each learning rate."""
    schemes = result["schemes"]
    rates = list(next(iter(schemes.values())))
    figure, axes = pyplot.subplots(1, len(rates), figsize=(14.0, 5.0), sharey=True)
    figure.subplots_adjust(left=0.05, right=0.88, top=0.79, bottom=0.125, wspace=0.58)
    _title(figure, "64 layers without warm-up",
           "training loss in nats per token over steps, constant learning rate, hidden 64; "
           "dashed: what token frequencies alone give")
    low = min(loss for runs in schemes.values() for run in runs.values() for loss in run["losses"] if loss is not None)
    for panel, rate in zip(axes, rates, strict=True):
        labels = []
        for scheme, runs in schemes.items():
            losses = _smooth(np.array([np.nan if loss is None else loss for loss in runs[rate]["losses"]], float))
            seen = np.flatnonzero(np.isfinite(losses))
            panel.plot(np.arange(1, len(losses) + 1), losses, color=COLOURS[scheme], linewidth=2.0, clip_on=True)
            end = losses[seen[-1]] if runs[rate]["state"] != "diverged" else np.inf
            mark = {"learned": "", "stuck": " stuck", "diverged": " diverged"}[runs[rate]["state"]]
            labels.append((end, NAMES[scheme] + mark, COLOURS[scheme]))
        panel.axhline(result["unigram"], color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)), zorder=1)
        panel.set_ylim(low - 0.15, result["uniform"] + 0.5)
        panel.set_xlim(1, max(run["steps"] for runs in schemes.values() for run in runs.values()))
        _dress(panel, f"learning rate {rate}")
        _labels(panel, labels, lambda loss, panel=panel: _share(loss, *panel.get_ylim()))
    return figure


PICTURES: dict[str, Callable] = {"gradients": draw_gradients, "depth": draw_depth, "stream": draw_stream}


def _two_panels(pyplot, title: str, subtitle: str):
    figure, axes = pyplot.subplots(1, 2, figsize=(12.4, 5.0), sharey=True)
    figure.subplots_adjust(left=0.06, right=0.9, top=0.79, bottom=0.125, wspace=0.26)
    _title(figure, title, subtitle)
    return figure, axes


def _title(figure, title: str, subtitle: str) -> None:
    left = figure.subplotpars.left
    figure.text(left, 0.945, title, fontsize=16, fontweight="bold", color=INK, va="center")
    figure.text(left, 0.892, subtitle, color=MUTED, va="center")


def _log_lines(panel, lines: dict[str, tuple[np.ndarray, list]], title: str, xlabel: str) -> None:
    """Lines by scheme on a logarithmic axis."""
    for scheme, (at, values) in lines.items():
        values = np.array([np.nan if value is None else value for value in values], float)
        panel.plot(at, values, color=COLOURS[scheme], linewidth=2.2, solid_capstyle="round", label=scheme)
        panel.set_xlim(at[0], at[-1])
    panel.set_yscale("log")
    panel.set_xlabel(xlabel, labelpad=6)
    _dress(panel, title)


def _name_lines(axes) -> None:
    """Ticks as plain numbers, and each line's name at its end; once the shared limits hold all panels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes[0].get_ylim()
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,), numticks=20))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set_ylim(low, high)
    for panel in axes:
        ends = [(line.get_ydata()[-1], NAMES[line.get_label()], line.get_color()) for line in panel.get_lines()]
        _labels(panel, ends, lambda value: _share(np.log(value), np.log(low), np.log(high)))


def _dress(panel, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=12, color=INK, pad=8)
    panel.grid(axis="y", color="#eceff3", linewidth=1.0)
    panel.set_axisbelow(True)
    panel.tick_params(length=0, pad=6, which="both")


def _share(value: float, low: float, high: float) -> float:
    return float(min(max((value - low) / (high - low), 0.0), 1.0))


def _labels(panel, labels: list[tuple[float, str, str]], height: Callable[[float], float]) -> None:
    """Each name at the right of its line's end, moved apart where two would touch."""
    places = sorted((height(value) if np.isfinite(value) else 1.0, text, colour) for value, text, colour in labels)
    heights = [place for place, _, _ in places]
    for _ in range(200):
        for i in range(len(heights) - 1):
            short = GAP - (heights[i + 1] - heights[i])
            if short > 1e-6:
                heights[i] -= short / 2
                heights[i + 1] += short / 2
    for at, (_, text, colour) in zip(heights, places, strict=True):
        panel.text(1.02, at, text, transform=panel.transAxes, color=colour, va="center", fontsize=11, fontweight="bold")


def _smooth(values: np.ndarray, half: int = 3) -> np.ndarray:
    """Mean over up to 2 half + 1 steps around each, symmetric at both ends."""
    reach = np.minimum(np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]), half)
    return np.array([values[i - r:i + r + 1].mean() for i, r in enumerate(reach)])
