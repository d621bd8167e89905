"""An analysis as text for a terminal."""

from typing import Any


def lines(analysis: dict[str, Any]) -> list[str]:
    """The whole of it, a paragraph a scheme."""
    out = [f"{analysis['formula']}; {analysis['runs']} runs; intervals hold 95 % of refits on runs drawn anew"]
    out += [f"note: {note}" for note in analysis["notes"]]
    for scheme, fits in analysis["schemes"].items():
        for count, fit in fits.items():
            out += ["", f"{scheme}, {analysis['counts'][count]}", *_law(fit, analysis)]
    for item in analysis["comparisons"]:
        out += ["", *_comparison(item, analysis["compared_with"])]
    return out


def between(value: float, low_high: tuple[float, float], form: str = ".4g") -> str:
    """A value with its interval."""
    return f"{value:{form}} [{low_high[0]:{form}}, {low_high[1]:{form}}]"


def _law(fit: dict[str, Any], analysis: dict[str, Any]) -> list[str]:
    out = [
        "  "
        + "   ".join(f"{name} = {between(item['value'], item['interval'])}" for name, item in fit["constants"].items())
    ]
    out.append(
        f"  {fit['agreeing']} of {fit['starts']} starts agree, relative gradient {fit['slope']:.0e}, typical "
        f"residual {100 * fit['typical_residual']:.2f} %"
    )
    out += [f"  WARNING: {text}" for text in fit["warnings"]]
    held = fit["held_out"]
    if "reason" in held:
        out.append(f"  largest run held out: {held['reason']}")
    else:
        predicted = between(held["predicted"], held["interval"])
        out.append(
            f"  largest run held out ({held['run']}): predicted {predicted}, measured {held['loss']:.4g}, "
            f"{'inside' if held['inside'] else 'OUTSIDE'} the interval"
        )
    for row in fit["optima"]:
        size, tokens, loss = (
            between(row[name]["value"], row[name]["interval"], ".3g") for name in ("parameters", "tokens", "loss")
        )
        out.append(f"  best for {row['budget']:.2g} FLOPs: N {size}, D {tokens}, loss {loss}")
    for name in ("isoflop", "envelope"):
        other = fit[name]
        said = (
            f"N ~ C^{other['exponent']:.3f} ({other['caveat']})" if other["exponent"] is not None else other["reason"]
        )
        out.append(f"  {'IsoFLOP' if name == 'isoflop' else name}: {said}")
    return out


def _comparison(item: dict[str, Any], counted: str) -> list[str]:
    head = f"{item['first']} minus {item['second']}, nats per token"
    if item["measured"] is None:
        return [f"{head}: {item['reason']}"]
    measured = between(item["measured"], item["measured_interval"], "+.4f")
    out = [f"{head}: measured {measured} over {item['pairs']} pairs"]
    if item["reason"]:
        out.append(f"  {item['reason']}")
    for row in item["at_budgets"]:
        far = f", {row['beyond']:.3g} times the largest run" if row["beyond"] > 1.01 else ""
        doubt = "" if row["interval"][0] * row["interval"][1] > 0 else "; the interval holds 0: undecided"
        out.append(
            f"  at {row['budget']:.2g} FLOPs{far}: {between(row['difference'], row['interval'], '+.4f')}, "
            f"{row['winner']} wins in {100 * row['sure']:.0f} % of draws ({counted}){doubt}"
        )
    return out
