"""Tables of texts, and their forms in Markdown and LaTeX (with booktabs); HTML is in `report.html`. Texts are escaped."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..analysis.statistics import LEVEL

NONE = "–"


class Table(NamedTuple):
    """A table of texts, as many in each row as there are columns."""

    name: str  # for files and links
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""  # below it
    groups: Sequence[tuple[str, int]] = ()  # headings over headings, with the number of columns of each
    labels: int = 1  # how many of the first columns are names rather than figures
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column) of what should catch the eye


def without_empty(table: Table) -> Table:
    """The table without empty columns of figures; for tables without groups, in which only names are strong."""
    columns = [
        column
        for column in range(len(table.columns))
        if column < table.labels or not table.rows or any(row[column] not in (NONE, "") for row in table.rows)
    ]
    rows = [[row[column] for column in columns] for row in table.rows]
    return table._replace(columns=[table.columns[column] for column in columns], rows=rows)


def number(value: float | None, form: str = ".4g") -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:{form}}".replace("-", "−")


def interval(low: float | None, high: float | None) -> str:
    """Both ends, to two digits of the width where that is readable."""
    if low is None or high is None:
        return NONE
    form = _form(max(abs(low), abs(high)), high - low) or ".4g"
    return f"{number(low, form)} to {number(high, form)}"


def _form(value: float, width: float) -> str | None:
    """The format that shows two digits of `width`; `None` if that takes too many decimals or the number is large."""
    if not (math.isfinite(value) and math.isfinite(width) and width > 0) or value >= 1e6:
        return None
    decimals = max(1 - math.floor(math.log10(width)), 0)
    return f".{decimals}f" if decimals <= 6 else None


def plus_minus(mean: float | None, std: float | None) -> str:
    """A mean with its standard deviation, to two digits of the latter where that is readable."""
    if mean is None or not math.isfinite(mean) or not std or not math.isfinite(std):
        return number(mean)
    form = _form(abs(mean), std)
    return f"{number(mean, form or '.4g')} ± {number(std, form or '.2g')}"


def probability(value: float | None) -> str:
    """A p-value; below the level of the tests it never reads as the level."""
    if value is None:
        return NONE
    text = f"{value:.3f}"
    if value < LEVEL <= float(text):
        return f"< {LEVEL:g}"
    return "< 0.001" if value < 0.001 else text


def to_markdown(table: Table) -> str:
    """A GitHub table; group headings are put before the headings of columns."""
    over = [text for text, width in table.groups for _ in range(width)] or [""] * len(table.columns)
    heads = [f"{group} {column}".strip() for group, column in zip(over, table.columns, strict=True)]
    marks = ["---" if column < table.labels else "---:" for column in range(len(table.columns))]
    lines = [[markdown_text(head) for head in heads], marks, *_cells(table, markdown_text, "**{}**")]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + (f"\n\n{markdown_text(table.note)}" if table.note else "")


def to_latex(table: Table) -> str:
    """A `tabular` for a paper, without the float around it."""
    marks = "l" * table.labels + "r" * (len(table.columns) - table.labels)
    lines = [f"% {_one_line(table.title)}; needs \\usepackage{{booktabs}}", rf"\begin{{tabular}}{{{marks}}}", r"\toprule"]
    if table.groups:
        lines.append(" & ".join(rf"\multicolumn{{{n}}}{{c}}{{{latex_text(text)}}}" for text, n in table.groups) + r" \\")
    lines += [" & ".join(map(latex_text, table.columns)) + r" \\", r"\midrule"]
    lines += [" & ".join(cells) + r" \\" for cells in _cells(table, latex_text, r"\textbf{{{}}}")]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [f"% {_one_line(table.note)}"] if table.note else []
    return "\n".join(lines) + "\n"


def _cells(table: Table, escape: Callable[[str], str], strong: str) -> Iterator[list[str]]:
    """Rows of escaped texts, those that should catch the eye in the form `strong`."""
    for place, row in enumerate(table.rows):
        cells = map(escape, row)
        yield [strong.format(cell) if (place, column) in table.strong else cell for column, cell in enumerate(cells)]


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
