"""Tables as text for a terminal; registries as text, Markdown and JSON."""

import json
import textwrap
from typing import Any

from .registry import Entry, Parameter, Registry


def aligned(rows: list[list[str]]) -> str:
    """A table as text: the first column left-aligned, the others right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        row[0].ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], others, strict=True))
        for row in rows
    )


def as_markdown(registry: Registry) -> str:
    """The tables of the docs: entries, and the arguments that they share."""
    return "\n\n".join([registry.table(), *([registry.common_table()] if registry.common else [])])


def as_json(registry: Registry) -> list[dict[str, Any]]:
    def parameter(p: Parameter) -> dict[str, Any]:
        return {"name": p.name, "kind": p.kind.__name__, "default": p.default, "allowed": p.allowed, "help": p.help}

    return [
        {
            "name": entry.name,
            "aliases": registry.aliases_of(entry),
            "description": entry.description,
            "source": entry.source,
            "parameters": [parameter(p) for p in entry.parameters],
            "common_parameters": [parameter(p) for p in entry.common],
            "traits": sorted(entry.traits),
            "facts": dict(entry.facts),
        }
        for entry in registry.values()
    ]


def as_text(registry: Registry, flag: str, width: int | None) -> str:
    """A table of names, aliases, descriptions and arguments, wrapped if a width is given."""

    def argument(p: Parameter) -> str:
        return p.name if p.default is None else f"{p.name}={json.dumps(p.default)}"

    def description(entry: Entry) -> str:
        shown = {heading: entry.facts.get(fact) for fact, heading in registry.shown_facts.items()}
        return entry.description + "".join(f"; {heading}: {value}" for heading, value in shown.items() if value is not None)

    rows = [
        (entry.name, ", ".join(registry.aliases_of(entry)), description(entry), ", ".join(map(argument, entry.parameters)))
        for entry in registry.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{registry.noun}s ({flag})"]
    for name, alias, text, arguments in rows:
        start = f"  {name:<{widths[0]}}  " + (f"{alias:<{widths[1]}}  " if widths[1] else "")
        if width is None:
            lines.append(f"{start}{text:<{widths[2]}}  {arguments}".rstrip())
            continue
        room = max(30, width - len(start))
        wrapped = textwrap.wrap(text, room) + textwrap.wrap(f"({arguments})", room) * bool(arguments)
        lines += [(start if index == 0 else " " * len(start)) + part for index, part in enumerate(wrapped)]
    if registry.common:
        takers = "All" if all(entry.common == registry.common for entry in registry.values()) else "All but a few"
        lines.append(f"  {takers} also take: {', '.join(map(argument, registry.common))}")
    return "\n".join(lines)
