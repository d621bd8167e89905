"""The command ``megnorm report``: results, fit and figures of a sweep, in its folder."""

import json
from pathlib import Path

from megnorm.scaling.cells import read_cells, result_rows, write_json
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.figures import Figure, best_losses, fitted_curves, loss_curves, residuals, write_pngs
from megnorm.scaling.fit import analyse
from megnorm.scaling.page import page
from megnorm.scaling.results import by_scheme, read_results, usable
from megnorm.scaling.sweep import Cost


def write_report(directory: str | Path, form: str, budgets: list[float] | None, draws: int) -> list[Path]:
    """Write report.html, results.json, fit.json and figures/*.png into the folder; returns their paths.

    Where the results can't carry a fit, the report says why and has the rest. Raises ScalingError.
    """
    directory = Path(directory)
    read_results(directory)  # refuses a folder without cells
    rows, cells = result_rows(directory), read_cells(directory)
    results, notes = usable(rows)
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    figures: list[Figure] = loss_curves(cells, schemes)
    analysis, refusal = None, ""
    try:
        analysis = analyse(results, form, budgets, draws, notes)
    except ScalingError as error:
        refusal = str(error)
    if analysis is not None:
        runs, counted = by_scheme(results), list(analysis["counts"])[-1]
        figures = [
            best_losses(analysis, counted, runs),
            *fitted_curves(analysis, counted, runs),
            residuals(analysis, counted, runs),
            *figures,
        ]
        write_json(directory / "fit.json", analysis)
    write_json(directory / "results.json", {"results": [_plain(row) for row in rows]})
    text = page(
        f"Sweep {directory.name}", result_rows(directory, trunks=True), analysis, refusal, figures, _cost(directory)
    )
    (directory / "report.html").write_text(text, encoding="utf-8")
    files = ["report.html", "results.json", *(["fit.json"] if analysis is not None else [])]
    return [directory / name for name in files] + write_pngs(figures, directory / "figures")


def _cost(directory: Path) -> Cost:
    """The sweep's prices."""
    try:
        return Cost.model_validate(json.loads((directory / "sweep.json").read_text(encoding="utf-8"))["cost"])
    except (OSError, ValueError, KeyError):
        return Cost()


def _plain(row: dict) -> dict:
    """JSON has no NaN: such a loss is text, which is read back."""
    return {name: str(value) if isinstance(value, float) and value != value else value for name, value in row.items()}
