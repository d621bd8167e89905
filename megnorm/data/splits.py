"""Train, validation and test: ranges of whole documents."""

from __future__ import annotations

from megnorm.data.errors import DataError

DocumentRange = tuple[int, int]


def parse_split(text: str) -> tuple[float, float, float]:
    """Fractions (train, validation, test) that sum to 1, from Megatron's form "949,50,1" or "99,1"."""
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        raise DataError(f'split "{text}": must be numbers such as "949,50,1"') from None
    if not 1 <= len(parts) <= 3:
        raise DataError(f'split "{text}": {len(parts)} numbers, must be 1 to 3 (train, validation, test)')
    if not all(0 <= part < float("inf") for part in parts) or sum(parts) == 0:
        raise DataError(f'split "{text}": the numbers must be finite and >= 0, and one of them above 0')
    train, validation, test = (part / sum(parts) for part in (*parts, 0.0, 0.0)[:3])
    return train, validation, test


def split_documents(num_documents: int, split: str) -> tuple[DocumentRange, DocumentRange, DocumentRange]:
    """Ranges (first, last excluded) of train, validation and test. No document is cut or in two of them.

    Boundaries are the rounded cumulative fractions, as in Megatron. Raises DataError when a part with a
    fraction above 0 gets no document.
    """
    fractions = parse_split(split)
    cuts = (fractions[0], fractions[0] + fractions[1])
    bounds = [0, *(round(cut * num_documents) for cut in cuts), num_documents]
    ranges = []
    for name, fraction, first, last in zip(
        ("train", "validation", "test"), fractions, bounds, bounds[1:], strict=False
    ):
        if first == last and fraction > 0:
            raise DataError(
                f'split "{split}" of {num_documents} documents leaves none for {name}; give it a larger '
                f"number, or 0 to do without"
            )
        ranges.append((first, last))
    return ranges[0], ranges[1], ranges[2]
