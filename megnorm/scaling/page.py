"""The report of a sweep as one HTML file: figures as SVG in it, no script, nothing from elsewhere."""

from html import escape
from typing import Any

from megnorm.observe.humanize import count
from megnorm.scaling.figures import Figure
from megnorm.scaling.tables import price
from megnorm.scaling.words import between

SHORT = {"total": "with emb.", "non_embedding": "without emb.", "active": "active"}
STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f7f8fa; --ink: #22272e; --muted: #6b737d;
  --grid: #e6e9ee; --edge: #c9ced6; --series-0: #2f6fd0; --series-1: #d1481f; --series-2: #17806b;
  --series-3: #8a56c2; --series-4: #a86f10; --series-5: #c0417f; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --card: #1c2027; --ink: #e6e9ee; --muted: #9aa3ae;
  --grid: #2a3039; --edge: #444c57; --series-0: #6ea3f5; --series-1: #f58a66; --series-2: #4fc7ac;
  --series-3: #bd93ec; --series-4: #e0b04f; --series-5: #ec85b3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
p.muted, figcaption, caption { color: var(--muted); }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: 0.75rem; background: var(--card); border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; } svg text { font-family: inherit !important; }
figcaption { font-size: 0.9rem; margin-top: 0.5rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; white-space: nowrap; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; text-align: right; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; } th:first-child, td:first-child, td.text { text-align: left; }
td.text { white-space: normal; min-width: 14rem; } .failed { color: var(--series-1); }
"""


def page(
    title: str,
    rows: list[dict[str, Any]],
    analysis: dict[str, Any] | None,
    refusal: str,
    figures: list[Figure],
    cost: Any,
) -> str:
    """The whole file. rows: as ``cells.result_rows``; refusal: why there is no analysis, where there is none."""
    done = sum(row["state"] == "done" for row in rows)
    shown = "".join(
        f"<figure>{figure.svg}<figcaption>{escape(figure.caption)}</figcaption></figure>" for figure in figures
    )
    pictures = ["<h2>Figures</h2>", f'<div class="figures">{shown}</div>']
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="muted">{done} of {len(rows)} runs are done.</p>']
    if analysis is None:
        parts += [f"<h2>Fitted law</h2><p>None: {escape(refusal)}</p>", *pictures]
    else:
        parts += [
            f"<h2>Fitted law: {escape(analysis['formula'])}</h2>",
            *_laws(analysis),
            *pictures,
            *_comparisons(analysis),
            "<h2>The largest run, predicted without it</h2>",
            _held_out(analysis),
            "<h2>Best size and tokens for a budget</h2>",
            _optima(analysis),
            "<h2>Other ways to the best size: N grows as C to the</h2>",
            *_alternatives(analysis),
            "<h2>Notes</h2>",
            *(f"<p>{escape(note)}</p>" for note in analysis["notes"]),
        ]
    parts += ["<h2>Runs and cost</h2>", _runs(rows, cost)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def table(head: list[str], rows: list[list[str]], text: tuple[int, ...] = ()) -> str:
    """A table that scrolls by itself where it is too wide; text: columns of words."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=text' if n in text else ''}>{escape(cell)}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _each(analysis: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """Scheme and count of N, and the fit."""
    return [
        ([scheme, SHORT[counted]], fit) for scheme, fits in analysis["schemes"].items() for counted, fit in fits.items()
    ]


def _laws(analysis: dict[str, Any]) -> list[str]:
    every = _each(analysis)
    names = list(every[0][1]["constants"])
    rows = [
        [
            *who,
            *(between(fit["constants"][name]["value"], fit["constants"][name]["interval"], ".3g") for name in names),
            f"{100 * fit['typical_residual']:.2f} %",
            f"{fit['agreeing']}/{fit['starts']}",
        ]
        for who, fit in every
    ]
    about = "Each value with its 95 % interval from refits on runs drawn anew."
    if "a" in names:
        about += " The compute-optimal N grows as C to the a."
    return [
        table(["scheme", "N", *names, "typical residual", "starts that agree"], rows),
        f'<p class="muted">{about}</p>',
        *(
            f"<p>Warning: {escape(', '.join(who))}: {escape(text)}</p>"
            for who, fit in every
            for text in fit["warnings"]
        ),
    ]


def _held_out(analysis: dict[str, Any]) -> str:
    rows = []
    for who, fit in _each(analysis):
        held = fit["held_out"]
        if "reason" in held:
            rows.append([*who, held["run"], f"{held['loss']:.4g}", "-", held["reason"]])
        else:
            predicted = between(held["predicted"], held["interval"])
            rows.append(
                [*who, held["run"], f"{held['loss']:.4g}", predicted, "inside" if held["inside"] else "outside"]
            )
    return table(["scheme", "N", "run", "measured", "predicted", ""], rows, (5,))


def _comparisons(analysis: dict[str, Any]) -> list[str]:
    if not analysis["comparisons"]:
        return []
    rows = []
    for item in analysis["comparisons"]:
        pair = f"{item['first']} minus {item['second']}"
        if item["measured"] is None:
            rows.append([pair, "-", "-", "-", item["reason"]])
            continue
        rows.append(
            [
                pair,
                f"measured, {item['pairs']} pairs",
                between(item["measured"], item["measured_interval"], "+.4f"),
                "",
                item["reason"],
            ]
        )
        for at in item["at_budgets"]:
            sure = f"{at['winner']}, {100 * at['sure']:.0f} % of draws"
            open_ = at["interval"][0] <= 0 <= at["interval"][1]
            said = ("undecided: the interval holds 0. " if open_ else "") + (
                f"{at['beyond']:.3g} times the largest run" if at["beyond"] > 1.01 else ""
            )
            rows.append(
                [
                    pair,
                    f"fitted, {at['budget']:.2g} FLOPs",
                    between(at["difference"], at["interval"], "+.4f"),
                    sure,
                    said,
                ]
            )
    return [
        "<h2>Which scheme is better</h2>",
        table(["schemes", "where", "difference, nats per token", "better", ""], rows, (4,)),
        f'<p class="muted">Below 0 the first is better. {escape(analysis["compared_with"])}.</p>',
    ]


def _optima(analysis: dict[str, Any]) -> str:
    names = ("parameters", "tokens", "loss")
    rows = [
        [
            *who,
            f"{row['budget']:.2g}",
            *(between(row[name]["value"], row[name]["interval"], ".3g") for name in names),
        ]
        for who, fit in _each(analysis)
        for row in fit["optima"]
    ]
    return table(["scheme", "N", "FLOPs", "best N", "best D", "loss"], rows)


def _alternatives(analysis: dict[str, Any]) -> list[str]:
    rows, caveats = [], {}
    for who, fit in _each(analysis):
        for name in ("IsoFLOP", "envelope"):
            other = fit[name.lower()]
            value = "-" if other["exponent"] is None else f"{other['exponent']:.3f}"
            rows.append([*who, name, value, other["reason"]])
            caveats[name] = other["caveat"].partition(";")[0]
    notes = [f"<p>{name}: {escape(caveat)}.</p>" for name, caveat in caveats.items()]
    return [table(["scheme", "N", "way", "exponent", ""], rows, (4,)), *notes]


def _runs(rows: list[dict[str, Any]], cost: Any) -> str:
    lines = []
    for row in rows:
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        lines.append(
            [
                row["name"],
                row["state"],
                count(row["parameters"]),
                count(row["non_embedding"]),
                count(row["tokens"]),
                f"{row['own_flops']:.2e}",
                loss,
                f"{row['device_hours']:.3g}",
                price(row["device_hours"], cost),
                row["error"] if row["state"] == "failed" else "",
            ]
        )
    hours = sum(row["device_hours"] for row in rows)
    lines.append(
        [
            "all",
            "",
            "",
            "",
            "",
            f"{sum(row['own_flops'] for row in rows):.2e}",
            "",
            f"{hours:.3g}",
            price(hours, cost),
            "",
        ]
    )
    return table(
        ["run", "state", "N", "N without emb.", "tokens", "FLOPs spent", "loss", "device-hours", "cost", "error"],
        lines,
        (9,),
    )
