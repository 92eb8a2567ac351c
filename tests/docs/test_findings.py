"""The figures of docs/findings.md are those of the cards beside them."""

import json
import re
from pathlib import Path

from tables import cases

ROOT = Path(__file__).parents[2]
_NUMBER = re.compile(r"(?<![\w.-])\d+\.\d+(?![\w.]*\d)")
_ELSEWHERE = {"0.0003", "0.1", "0.99", "0.98", "0.75"}  # of specifications


def sections():
    """The sections of the findings that refer to cards, by title: the cards, and the text without versions and links."""
    found = {}
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if cards := set(re.findall(r"model_cards/([\w-]+)/", section)):
            title, _, rest = section.partition("\n")
            found[title] = sorted(cards), re.sub(r"torch\s[\d.]+|arXiv [\d.]+|\(https:[^)]*\)", "", rest)
    return found


def summary_of(card):
    return json.loads((ROOT / "model_cards" / card / "summary.json").read_text())


def numbers(value):
    """All numbers of a summary but p before it was adjusted."""
    if isinstance(value, dict):
        return [number for key, item in value.items() if key != "p" for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


def unknown(text, values):
    """The decimal numbers of a text that are no rounded value, nor one as a percentage."""
    known = [abs(factor * value) for value in values for factor in (1, 100)]
    found = [number for number in _NUMBER.findall(text) if number not in _ELSEWHERE]
    return [number for number in found if number not in {f"{value:.{len(number.split('.')[1])}f}" for value in known}]


def of_paper():
    """The figures of the paper, as the card that compares them prints them."""
    text = (ROOT / "model_cards" / "lr-study-2d" / "tables" / "paper.tex").read_text(encoding="utf-8")
    return list(map(float, _NUMBER.findall(text)))


@cases("title", sorted(sections()))
def test_every_figure_of_a_finding_is_in_its_cards(title):
    """Loosely: it is a figure of them, if not that of its row."""
    cards, text = sections()[title]
    assert unknown(text, [*numbers(list(map(summary_of, cards))), *of_paper()]) == []


def test_a_figure_that_is_not_in_the_card_is_found():
    assert unknown("2.36 instead of 3.31, by 12.5 %", [2.36453, 3.31278, 0.125]) == []
    assert unknown("2.37 instead of 3.31", [2.36453, 3.31278]) == ["2.37"]
