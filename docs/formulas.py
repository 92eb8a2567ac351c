r"""Formulas of pages (`$...$`, `$$...$$`) and of docstrings (`\(...\)`) as MathML, which browsers draw without scripts."""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

from diffusers_lrlab.averaging.forms import EMA_FORMS
from diffusers_lrlab.core.registry import Entry
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

OF_TABLES = {
    "schedules": SCHEDULERS,
    "momentum": MOMENTUM_SCHEDULERS,
    "timesteps": TIMESTEP_SAMPLERS,
    "weightings": LOSS_WEIGHTINGS,
    "ema-forms": EMA_FORMS,
}
_FORMULA = r"(?<![\\$\w])(?:\$\$(?P<block>[^$]+)\$\$|\$(?=\S)(?P<inline>[^$]+)(?<=\S)\$(?![\w$])|\\\((?P<docstring>.+?)\\\))"
_ROW = re.compile(r"^\| `([\w-]+)`[^|]*\| (?:\\\||[^|])*(?= \|)", re.MULTILINE)


class _Formulas(InlineProcessor):
    """Before what else is marked inside a line, so that `_`, `*` and backslashes are those of the formula."""

    def handleMatch(self, match: re.Match[str], data: str) -> tuple[Any, int, int]:
        found = {name: text for name, text in match.groupdict().items() if text}
        ((name, latex),) = found.items()
        return self.md.htmlStash.store(mathml(latex, is_block=name == "block")), match.start(), match.end()


class Formulas(Extension):
    """Of Markdown, for pages and docstrings alike."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(_Formulas(_FORMULA, md), "formulas", 185)  # after code (190), before escapes (180)


def mathml(latex: str, is_block: bool = False) -> str:
    html = convert(" ".join(latex.split()), display="block" if is_block else "inline")
    html = re.sub(r"<mo>(\w+)</mo>", r"<mi>\1</mi>", html)  # min and max are functions, with no space around them
    return f'<span class="formula">{html}</span>' if is_block else html


def of_entry(entry: Entry) -> str:
    r"""The first paragraph of the docstring of an entry's function if it has a formula, as \(s = 1 - p\); else ""."""
    text = " ".join((entry.function.__doc__ or "").strip().partition("\n\n")[0].split())
    return text if r"\(" in text else ""


def beside_descriptions(markdown: str) -> str:
    """A page with the formula of each entry under its description in tables of names."""
    for table, registry in OF_TABLES.items():

        def with_formula(row: re.Match[str], registry: Any = registry) -> str:
            formula = of_entry(registry[row[1]])
            return f"{row[0]}<br>{formula}" if formula else row[0]

        markdown = re.sub(
            f"<!-- {table}: .*?<!-- end of {table} -->",
            lambda marked: _ROW.sub(with_formula, marked[0]),
            markdown,
            flags=re.DOTALL,
        )
    return markdown
