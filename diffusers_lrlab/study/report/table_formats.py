"""Tables of texts, and their forms in Markdown and LaTeX (with booktabs); HTML is in `report.html`. Texts are escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..analysis.statistics import LEVEL

NONE = "–"


class Table(NamedTuple):
    """
    A table of texts.

    Args:
        name (`str`): For files and links.
        title (`str`): What it shows.
        columns (`list` of `str`): Headings.
        rows (`list` of `list` of `str`): As many texts each as there are columns.
        note (`str`): Below it.
        groups (`list` of `tuple`): Headings over headings: (text, how many columns).
        labels (`int`): How many of the first columns are names rather than figures.
        strong (`frozenset`): (row, column) of what should catch the eye.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    groups: Sequence[tuple[str, int]] = ()
    labels: int = 1
    strong: frozenset[tuple[int, int]] = frozenset()


def without_empty(table: Table) -> Table:
    """The table without empty columns of figures; for tables without groups, in which only names are strong."""
    columns = [
        column
        for column in range(len(table.columns))
        if column < table.labels or not table.rows or any(row[column] not in (NONE, "") for row in table.rows)
    ]
    rows = [[row[column] for column in columns] for row in table.rows]
    return table._replace(columns=[table.columns[column] for column in columns], rows=rows)


# --- numbers ---------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.4g}".replace("-", "−")


def interval(low: float | None, high: float | None) -> str:
    """Both ends, to two digits of the width where that is readable."""
    if low is None or high is None:
        return NONE
    decimals = _decimals(max(abs(low), abs(high)), high - low)
    if decimals is None:
        return f"{number(low)} to {number(high)}"
    return f"{low:.{decimals}f} to {high:.{decimals}f}".replace("-", "−")


def _decimals(value: float, width: float) -> int | None:
    """Decimals that show two digits of `width`, unless that takes too many or the number is large."""
    if not (math.isfinite(value) and math.isfinite(width) and width > 0) or value >= 1e6:
        return None
    decimals = max(1 - math.floor(math.log10(width)), 0)
    return decimals if decimals <= 6 else None


def plus_minus(mean: float | None, std: float | None) -> str:
    """A mean with its standard deviation, to two digits of the latter where that is readable."""
    if mean is None or not math.isfinite(mean):
        return NONE
    if not std or not math.isfinite(std):
        return number(mean)
    decimals = _decimals(abs(mean), std)
    if decimals is None:
        return f"{number(mean)} ± {std:.2g}".replace("-", "−")
    return f"{mean:.{decimals}f} ± {std:.{decimals}f}".replace("-", "−")


def probability(value: float | None) -> str:
    """A p-value; below the level of the tests it never reads as the level."""
    if value is None:
        return NONE
    text = f"{value:.3f}"
    if value < LEVEL <= float(text):
        return f"< {LEVEL:g}"
    return "< 0.001" if value < 0.001 else text


# --- forms -----------------------------------------------------------------------------------------------------------


def to_markdown(table: Table) -> str:
    """A GitHub table; group headings are put before the headings of columns."""
    over = [text for text, width in table.groups for _ in range(width)] or [""] * len(table.columns)
    heads = [f"{group} {column}".strip() for group, column in zip(over, table.columns, strict=True)]
    marks = ["---" if column < table.labels else "---:" for column in range(len(table.columns))]
    lines = [[markdown_text(head) for head in heads], marks]
    for place, row in enumerate(table.rows):
        cells = [markdown_text(text) for text in row]
        lines.append([f"**{cell}**" if (place, column) in table.strong else cell for column, cell in enumerate(cells)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + (f"\n\n{markdown_text(table.note)}" if table.note else "")


def to_latex(table: Table) -> str:
    """A `tabular` for a paper, without the float around it."""
    marks = "l" * table.labels + "r" * (len(table.columns) - table.labels)
    lines = [f"% {_one_line(table.title)}; needs \\usepackage{{booktabs}}", rf"\begin{{tabular}}{{{marks}}}", r"\toprule"]
    if table.groups:
        lines.append(" & ".join(rf"\multicolumn{{{n}}}{{c}}{{{latex_text(text)}}}" for text, n in table.groups) + r" \\")
    lines += [" & ".join(map(latex_text, table.columns)) + r" \\", r"\midrule"]
    for place, row in enumerate(table.rows):
        cells = [latex_text(text) for text in row]
        cells = [rf"\textbf{{{cell}}}" if (place, column) in table.strong else cell for column, cell in enumerate(cells)]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [f"% {_one_line(table.note)}"] if table.note else []
    return "\n".join(lines) + "\n"


# --- texts -----------------------------------------------------------------------------------------------------------

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&$])")
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"},
    **{"±": r"$\pm$", "−": "$-$", "–": "--", "‖": r"$\|$", "×": r"$\times$", "≤": r"$\le$", "“": "``", "”": "''"},
}


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def markdown_text(text: str) -> str:
    """A text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text))


def latex_text(text: str) -> str:
    """A text that LaTeX shows as it is, on one line."""
    return "".join(_LATEX.get(character, character) for character in _one_line(text))
