"""Numbers with their nouns, durations and tables as text."""

from collections.abc import Iterable, Sequence


def counted(number: float, noun: str, form: str = "") -> str:
    """A number with a regular noun, such as "1 update" or "2 updates"; the format `","` gives 1,500."""
    return f"{number:{form}} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a regular noun."""
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "nch", "tch", "sh")) else f"{noun}s"


def singular(noun: str) -> str:
    """The singular of a regular plural in -s."""
    return noun.removesuffix("s")


def agreeing(number: int, singular: str, plural: str) -> str:
    """The verb that agrees with a number."""
    return singular if number == 1 else plural


def times(number: int) -> str:
    """A number of repetitions: "once", "2 times"."""
    return "once" if number == 1 else f"{number} times"


def duration(seconds: float) -> str:
    """A duration to three digits in a suitable unit: "43.2 s", "29.3 min", "2.5 h"."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 999.5 else f"{hours:,.0f} h"


def aligned(rows: list[list[str]]) -> str:
    """A table as text: the first column left-aligned, the others right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        row[0].ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], others, strict=True))
        for row in rows
    )


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], num_labels: int | None = None) -> str:
    """A table of escaped text; columns after the first `num_labels` are aligned to the right."""
    left = len(headings) if num_labels is None else num_labels
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    alignment = "|---" * left + "|---:" * (len(headings) - left) + "|"
    return "\n".join([f"| {' | '.join(headings)} |", alignment, *lines])
