"""Tables of a report: data frames of text, as LaTeX and Markdown. The page formats them in `report.html`."""

import math
import re
from typing import NamedTuple

import pandas as pd

from ...core.registry import markdown_table
from ..analysis.figures import NONE


class Table(NamedTuple):
    """A table of formatted text."""

    name: str  # of its file and its link
    title: str
    frame: pd.DataFrame  # of strings
    note: str = ""  # below the table
    num_labels: int = 1  # leading columns that hold names, not numbers
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column) of emphasised cells

    @property
    def headings(self) -> list[str]:
        return list(self.frame.columns)


def without_empty(frame: pd.DataFrame, num_labels: int) -> pd.DataFrame:
    """The frame without columns of numbers that hold none."""
    is_kept = frame.ne(NONE).any() | frame.empty
    is_kept.iloc[:num_labels] = True
    return frame.loc[:, is_kept]


def number(value: float | None, spec: str = ".4g") -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:{spec}}".replace("-", "−")


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval, to two digits of its width where that is readable."""
    if low is None or high is None:
        return NONE
    spec = _two_digits_of(high - low, max(abs(low), abs(high))) or ".4g"
    return f"{number(low, spec)} to {number(high, spec)}"


def plus_minus(mean: float | None, std: float | None) -> str:
    """A mean with its standard deviation, to two digits of the latter where that is readable."""
    if mean is None or not math.isfinite(mean) or not std or not math.isfinite(std):
        return number(mean)
    spec = _two_digits_of(std, abs(mean))
    return f"{number(mean, spec or '.4g')} ± {number(std, spec or '.2g')}"


def _two_digits_of(width: float, value: float) -> str | None:
    """The format that shows two digits of `width`; `None` if that takes over 6 decimals, or the value is large."""
    if not (math.isfinite(value) and math.isfinite(width) and width > 0) or value >= 1e6:
        return None
    decimals = max(1 - math.floor(math.log10(width)), 0)
    return f".{decimals}f" if decimals <= 6 else None


def to_markdown(table: Table) -> str:
    """A GitHub table with its note."""
    cells = table.frame.map(markdown_text)
    for row, column in table.strong:
        cells.iat[row, column] = f"**{cells.iat[row, column]}**"
    text = markdown_table([*map(markdown_text, table.headings)], cells.to_numpy().tolist(), table.num_labels)
    return text + (f"\n\n{markdown_text(table.note)}" if table.note else "")


def to_latex(table: Table) -> str:
    """A `tabular` for booktabs, without a float around it."""
    bold = pd.DataFrame("", table.frame.index, table.frame.columns)
    for row, column in table.strong:
        bold.iat[row, column] = "textbf:--rwrap"
    style = table.frame.map(_one_line).style.hide(axis="index").apply(lambda _: bold, axis=None)
    style = style.format(escape="latex").format_index(escape="latex", axis="columns")
    alignment = "l" * table.num_labels + "r" * (len(table.headings) - table.num_labels)
    tabular = style.to_latex(column_format=alignment, hrules=True).translate(_LATEX)
    note = f"% {_one_line(table.note)}\n" if table.note else ""
    return f"% {_one_line(table.title)}; needs \\usepackage{{booktabs}}\n{tabular}{note}"


# What pandas does not escape.
_LATEX = str.maketrans({
    **{"<": "$<$", ">": "$>$", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "≤": r"$\le$", "‖": r"$\|$"},
    **{"–": "--", "“": "``", "”": "''"},
})  # fmt: skip
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&$])")


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def markdown_text(text: str) -> str:
    """Text that Markdown shows literally, on one line."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text))
