"""One table, three forms: Markdown, LaTeX (with booktabs) and HTML. Every text is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from ..analysis.statistics import LEVEL

NONE = "–"
_LONG = 30
_CELL = Markup("<td>{}</td>")


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
    """The table without the columns of figures in which no row has one. It has no groups, and only names are strong."""
    kept = [
        column
        for column in range(len(table.columns))
        if column < table.labels or not table.rows or any(row[column] not in (NONE, "") for row in table.rows)
    ]
    rows = [[row[column] for column in kept] for row in table.rows]
    return table._replace(columns=[table.columns[column] for column in kept], rows=rows)


# --- numbers ---------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Four significant digits."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.4g}".replace("-", "−")


def interval(low: float | None, high: float | None) -> str:
    """Both ends, to two digits of the width where that is readable; or nothing."""
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
    """A p-value, which never reads as the level of the tests if it is below it."""
    if value is None:
        return NONE
    text = f"{value:.3f}"
    if value < LEVEL <= float(text):
        return f"< {LEVEL:g}"
    return "< 0.001" if value < 0.001 else text


# --- forms -----------------------------------------------------------------------------------------------------------


def to_markdown(table: Table) -> str:
    """A GitHub table; headings over headings are put before the headings themselves."""
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


def to_html(table: Table, caption: bool = True) -> Markup:
    """A table in a box that scrolls by itself, so that a narrow page does not; its title is heard even if it is not seen."""
    heads = Markup("").join(
        Markup("<th scope=col{}>{}</th>").format(Markup(" class=label") if column < table.labels else "", text)
        for column, text in enumerate(table.columns)
    )
    over = Markup("").join(Markup("<th colspan={} scope=colgroup>{}</th>").format(n, text) for text, n in table.groups)
    body = Markup("").join(_html_row(table, place) for place in range(len(table.rows)))
    above = Markup("<caption>{}</caption>").format(table.title) if caption else ""
    note = Markup("<p class=note>{}</p>").format(table.note) if table.note else ""
    return Markup(
        '<div class=scroll tabindex=0 role=region aria-label="{}"><table>{}<thead>{}<tr>{}</tr></thead>'
        "<tbody>{}</tbody></table></div>{}"
    ).format(table.title, above, Markup("<tr>{}</tr>").format(over) if over else "", heads, body, note)


def _html_row(table: Table, place: int) -> Markup:
    cells = []
    for column, text in enumerate(table.rows[place]):
        inner = Markup("<strong>{}</strong>").format(text) if (place, column) in table.strong else escape(text)
        # A long name is cut by the style, and read by pointing at it; a sentence has lines.
        title = Markup(' title="{}"').format(text) if len(text) > _LONG else ""
        title = Markup(" class=sentence") if len(text) > 2 * _LONG else title
        cells.append(
            Markup("<th scope=row{}>{}</th>").format(title, inner) if column < table.labels else _CELL.format(inner)
        )
    # A line above each row that begins something new.
    before = table.rows[place - 1][0] if place else None
    starts = Markup(" class=start") if table.rows[place][0] not in (before, "") else ""
    return Markup("<tr{}>{}</tr>").format(starts, Markup("").join(cells))


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
