"""What the commands ``megnorm fit``, ``report`` and ``sweep`` do once their arguments are read."""

import json
from pathlib import Path

from megnorm.scaling.fit import analyse
from megnorm.scaling.results import read_results
from megnorm.scaling.words import lines


def fit_command(
    path: str, form: str, budgets: list[float] | None, draws: int, output: str | None
) -> list[str]:
    """Lines to print; the whole analysis goes to ``output`` as JSON."""
    results, notes = read_results(path)
    analysis = analyse(results, form, budgets, draws, notes)
    if output is not None:
        Path(output).write_text(json.dumps(analysis, indent=1), encoding="utf-8")
    return lines(analysis)
