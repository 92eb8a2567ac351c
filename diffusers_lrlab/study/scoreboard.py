"""The scoreboard: the claims of the presets, judged by the published cards, for `lrlab list claims` and the docs.

`claims.json` is written from the cards by `python docs/generated.py`; no figure in it is written by hand.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.registry import markdown_table
from ..core.words import counted

FILE = Path(__file__).parent / "claims.json"
_TEXT_WIDTH = 22  # of a verdict in a terminal

Study = dict[str, Any]  # a preset with its claims, as `analysis.scoreboard.collect` makes it


def read_scoreboard() -> list[Study]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def as_text(studies: list[Study], width: int | None = None) -> str:
    """The scoreboard for a terminal: the claims of each study, with verdict and effects."""
    return "\n\n".join("\n".join(_text_of(study, width)) for study in studies)


def _text_of(study: Study, width: int | None) -> Iterator[str]:
    yield f"{study['title']}\n  {study['command']}\n  {study['own_data']}"
    for claim in study["claims"]:
        yield _wrapped(claim["verdict"], f"{claim['claim']} ({claim['source']})", width)
        effects = ", ".join(f"{each['dataset']} {each['text']}" for each in claim["datasets"])
        asked = f"{claim['arm']} against {claim['against']}, by {claim['metric']}, expected {claim['expected']}"
        yield _wrapped("", f"{asked}: {effects}" if effects else asked, width)
        for about in filter(None, ["; ".join(claim["limits"]), claim["note"]]):
            yield _wrapped("", about, width)


def _wrapped(start: str, text: str, width: int | None) -> str:
    first = f"  {start:<{_TEXT_WIDTH}}"
    if width is None:
        return first + text
    return textwrap.fill(text, max(width, 60), initial_indent=first, subsequent_indent=" " * len(first))


def overview(studies: list[Study]) -> str:
    """The table at the top of the page."""
    rows = [
        (
            f"{claim['claim']} ({_source(claim)})",
            f"[**{claim['verdict']}**](#{study['name']}) (`{study['name']}`)",
            _held(claim),
            "; ".join(claim["limits"]) or "–",
        )
        for study in studies
        for claim in study["claims"]
    ]
    return markdown_table(("claim", "verdict", "as claimed on", "limits"), rows)


def by_study(studies: list[Study]) -> str:
    """The sections of the page: for each study its command, and every claim in figures."""
    return "\n\n".join(_section(study) for study in studies)


def _section(study: Study) -> str:
    parts = [f"### {study['name']}", f"{study['title']}. {_tested(study)}", _commands(study)]
    if study["changed"]:
        parts.append(f"The preset has changed since this card: {', '.join(f'`{key}`' for key in study['changed'])}.")
    return "\n\n".join([*parts, *map(_figures_of, study["claims"])])


def _commands(study: Study) -> str:
    return f"```bash\n{study['command']}\n{study['own_data']}\n```"


def _figures_of(claim: dict[str, Any]) -> str:
    """A claim with its comparison, and a row for each data set."""
    asked = f"`{claim['arm']}` against `{claim['against']}` by `{claim['metric']}`, expected: {claim['expected']}"
    note = f" {claim['note']}" if claim["note"] else ""
    text = f"**{claim['claim']}:** {claim['verdict']}. {asked}.{note}"
    if not claim["datasets"]:
        return text
    rows = [
        (each["dataset"], each["text"], each["p_text"], each["detectable_text"], each["word"]) for each in claim["datasets"]
    ]
    return f"{text}\n\n{markdown_table(('data set', 'effect', 'adjusted p', 'detectable', 'outcome'), rows)}"


def _tested(study: Study) -> str:
    if study["card"] is None:
        return "Not run yet."
    data = ", ".join(f"`{name}`" for name in study["datasets"])
    return (
        f"{counted(len(study['arms']), 'arm')}, {counted(study['seeds'], 'seed')}, {data}: {counted(study['runs'], 'run')}, "
        f"{study['rates']} ([card](../{study['card']}/README.md))."
    )


def _held(claim: dict[str, Any]) -> str:
    """On how many data sets a claim held, and all of them: those on which it did in bold."""
    if not claim["datasets"]:
        return "–"
    held, names = claim["held_on"], [each["dataset"] for each in claim["datasets"]]
    return f"{len(held)} of {len(names)}: " + ", ".join(f"**{name}**" if name in held else name for name in names)


def _source(claim: dict[str, Any]) -> str:
    return f"[{claim['source']}]({claim['link']})" if claim["link"] else claim["source"].strip('"').join("“”")
