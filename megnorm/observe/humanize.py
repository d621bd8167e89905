"""Numbers as people read them."""

import math


def count(number: float) -> str:
    """151_400_000 -> "151.4M"; below ten thousand with all digits: "8,500"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if abs(number) >= size * 0.99995:
            return f"{number / (1e3 if letter == 'K' else size):.1f}{letter}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """200 -> "3 min 20 s"; 0.25 -> "0.25 s"; 90_000 -> "1 d 1 h"; the two largest units."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left = round(seconds)
    largest = next(n for n, (_, size) in enumerate(units) if left >= size)
    smallest = units[min(largest + 1, 3)][1]
    left = round(left / smallest) * smallest
    parts = []
    for name, size in units:
        amount, left = divmod(left, size)
        if amount:
            parts.append(f"{amount} {name}")
    return " ".join(parts)


def speed(tokens_per_second: float) -> str:
    """8500.3 -> "8,500 tokens/s"; two digits after the point below 10."""
    digits = 0 if tokens_per_second >= 10 else 2
    return f"{tokens_per_second:,.{digits}f} tokens/s"


def percent(share: float) -> str:
    """0.4123 -> "41.2%"."""
    return f"{100 * share:.1f}%"
