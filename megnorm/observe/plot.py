"""Loss curves of runs as a picture. matplotlib (the extra "plot") is imported when one is drawn."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megnorm.config import load_config
from megnorm.observe.humanize import count
from megnorm.observe.metrics import read_metrics
from megnorm.plan.parameters import count_parameters

COLOURS = ("#2f6fd0", "#e0552b", "#1f9d84", "#8a56c2", "#d9952a", "#c0417f")
INK, MUTED = "#22272e", "#7a828c"
STYLE = {"font.size": 12, "axes.edgecolor": "#c9ced6", "axes.labelcolor": INK, "text.color": INK,
         "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False,
         "font.family": "sans-serif", "axes.linewidth": 1.0}
LABEL_GAP = 0.052


@dataclass
class Curve:
    """One run: tokens seen and loss in nats per token, of training and of the validation set."""

    name: str
    title: str
    tokens: np.ndarray
    loss: np.ndarray
    valid: list[tuple[int, float]]
    baselines: dict[str, float] = field(default_factory=dict)


def read_curve(run_dir: str | Path) -> Curve:
    """Metrics, configuration and, where it lies there, report.json of a run. ValueError without rows."""
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    steps = [row for row in rows if "split" not in row and np.isfinite(row["loss"])]
    if not steps:
        raise ValueError(f"{run_dir}: metrics.jsonl holds no training step; is it the directory of a run?")
    per_step = steps[-1]["tokens"] / steps[-1]["step"]
    valid = [(round(row["step"] * per_step), row["loss"]) for row in rows
             if row.get("split") == "valid" and np.isfinite(row["loss"])]
    report = run_dir / "report.json"
    baselines = json.loads(report.read_text())["baselines"] if report.exists() else {}
    return Curve(run_dir.name, _title(run_dir), np.array([row["tokens"] for row in steps]),
                 np.array([row["loss"] for row in steps]), valid,
                 {name: baselines[name] for name in ("unigram", "bigram") if name in baselines})


def smooth(values: np.ndarray, half: int) -> np.ndarray:
    """Mean over up to 2 half + 1 values around each; symmetric at the start, where the loss falls fastest."""
    at = np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(at - half, 0)
    high = np.minimum(at + np.minimum(half, at), len(values) - 1) + 1
    return (sums[high] - sums[low]) / (high - low)


def plot_runs(run_dirs: list[str | Path], output: str | Path) -> None:
    """Draw the runs' loss over tokens into ``output`` (PNG, or what its suffix says).

    Faint: each logged step; bold: smoothed; dots: validation; dashed: the counting models of report.json.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError('plots need matplotlib: pip install "megnorm[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = [read_curve(run_dir) for run_dir in run_dirs]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(9.6, 5.4), dpi=160)
        labels = [label for n, curve in enumerate(curves) for label in _draw(axes, curve, n, len(curves))]
        labels += _draw_baselines(axes, curves)
        _dress(axes, curves)
        _write_labels(axes, labels)
        room = 0.03 + 0.0112 * max(len(text) for _, text, _ in labels)
        figure.subplots_adjust(left=0.075, right=1 - room, top=0.86, bottom=0.12)
        figure.savefig(output)
        pyplot.close(figure)


def _draw(axes, curve: Curve, number: int, curves: int) -> list[tuple[float, str, str]]:
    """One run; returns its labels as (loss, text, colour)."""
    colour = COLOURS[number % len(COLOURS)]
    line = smooth(curve.loss, max(1, len(curve.loss) // 60))
    axes.plot(curve.tokens, curve.loss, color=colour, alpha=0.22, linewidth=0.9, zorder=2)
    axes.plot(curve.tokens, line, color=colour, linewidth=2.2, zorder=3, solid_capstyle="round")
    if curve.valid:
        tokens, losses = zip(*curve.valid, strict=True)
        face = INK if curves == 1 else colour
        size = 7 if curves == 1 else 5.5
        axes.plot(tokens, losses, "o", color=face, markersize=size, markeredgecolor="white",
                  markeredgewidth=1.2, zorder=4, clip_on=False)
    if curves > 1:
        last = curve.valid[-1][1] if curve.valid else line[-1]
        return [(line[-1], f"{curve.name}  {last:.3f}", colour)]
    labels = [(line[-1], f"training  {line[-1]:.2f}", colour)]
    if curve.valid:
        labels.append((curve.valid[-1][1], f"validation  {curve.valid[-1][1]:.2f}", INK))
    return labels


def _draw_baselines(axes, curves: list[Curve]) -> list[tuple[float, str, str]]:
    """Dashed lines of the first run that has them."""
    baselines = next((curve.baselines for curve in curves if curve.baselines), {})
    for loss in baselines.values():
        axes.axhline(loss, color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)), zorder=1)
    return [(loss, f"{name}  {loss:.2f}", MUTED) for name, loss in baselines.items()]


def _dress(axes, curves: list[Curve]) -> None:
    """Axes, limits and title."""
    others = [loss for c in curves for loss in (*c.baselines.values(), *(loss for _, loss in c.valid))]
    low = min(min(c.loss.min() for c in curves), *others, np.inf)
    high = max(max(_top(c, len(curves)) for c in curves), *others, -np.inf)
    pad = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - pad, high + pad / 2)
    axes.set_xlim(0, max(curve.tokens[-1] for curve in curves))
    axes.grid(axis="y", color="#eceff3", linewidth=1.0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6)
    axes.xaxis.set_major_formatter(lambda tokens, _: "0" if tokens == 0 else count(tokens).replace(".0", ""))
    axes.set_xlabel("tokens seen", labelpad=8)
    title = curves[0].title if len(curves) == 1 else f"Loss of {len(curves)} runs"
    axes.text(0, 1.105, title, transform=axes.transAxes, fontsize=15, fontweight="bold", va="bottom")
    axes.text(0, 1.04, "loss in nats per token; dots: validation", transform=axes.transAxes, color=MUTED,
              va="bottom")


def _top(curve: Curve, curves: int) -> float:
    """The whole fall of a single run; of several what comes after 5 %, where their differences show."""
    return float(curve.loss[0 if curves == 1 else len(curve.loss) // 20])


def _write_labels(axes, labels: list[tuple[float, str, str]]) -> None:
    """Each label to the right of its line's end, moved apart where two would touch."""
    bottom, top = axes.get_ylim()
    places = sorted(((loss - bottom) / (top - bottom), text, colour) for loss, text, colour in labels)
    heights = [place for place, _, _ in places]
    for _ in range(100):
        for i in range(len(heights) - 1):
            short = LABEL_GAP - (heights[i + 1] - heights[i])
            if short > 1e-6:
                heights[i] -= short / 2
                heights[i + 1] += short / 2
    for height, (_, text, colour) in zip(heights, places, strict=True):
        axes.text(1.015, height, text, transform=axes.transAxes, color=colour, va="center", fontsize=12,
                  fontweight="normal" if colour == MUTED else "bold")


def _title(run_dir: Path) -> str:
    """What was trained, from the run's configuration where it lies beside the metrics."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return run_dir.name
    config = load_config(path)
    model = config.model
    size = f"{count(count_parameters(config)['total'])} parameters, " if model.vocab_size else ""
    return f"{run_dir.name}: {model.norm.scheme}, {size}{model.layers} layers"
