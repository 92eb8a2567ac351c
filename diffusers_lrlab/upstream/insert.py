"""Adds a schedule to diffusers' files: its names and table of schedules, its tests, and the tutorial's example."""

import ast
import re
from collections.abc import Callable

from ..core.errors import LabError
from . import render, render_tests
from .checkout import OPTIMIZATION, parse_python

TESTS = "tests/others/test_optimization.py"
TUTORIAL = "docs/source/en/tutorials/basic_training.md"
FILES = (OPTIMIZATION, TESTS, TUTORIAL)

_LIST_HEAD = (
    "More learning rate schedules are available by name, with `diffusers.optimization.get_scheduler` or as the "
    "`--lr_scheduler` of most training scripts:"
)


def add_schedule(name: str, read: Callable[[str], str | None]) -> dict[str, str]:
    """The new text of each file that changes for a schedule; `read` returns the old text, or `None`."""
    return {
        OPTIMIZATION: _in_optimization(name, _existing(OPTIMIZATION, read)),
        TESTS: _in_tests(name, read(TESTS) or render_tests.empty_test_file()),
        TUTORIAL: _in_tutorial(name, _existing(TUTORIAL, read)),
    }


def _existing(path: str, read: Callable[[str], str | None]) -> str:
    text = read(path)
    if text is None:
        raise _anchor_error(path)
    return text


def _anchor_error(path: str, anchor: str | None = None) -> LabError:
    what = f"no {anchor} in {path}" if anchor else f"no {path}"
    return LabError(
        f"There is {what} of this checkout, where the schedule would go: diffusers has changed there. Use a commit near "
        "v0.42.1 as the base, or a newer diffusers_lrlab."
    )


# With one entry per line, as diffusers' formatter writes it.
_MEMBERS = re.compile(r"^class SchedulerType\b.*:\n(?: {4}\w+ = .*\n)+", re.MULTILINE)
_TABLE = re.compile(r"^TYPE_TO_SCHEDULER_FUNCTION\b.*= \{\n(?: {4}SchedulerType\.\w+: \w+,[^}\n]*\n)+(?=\})", re.MULTILINE)


def _in_optimization(name: str, text: str) -> str:
    parse_python(OPTIMIZATION, text)
    members, table = _MEMBERS.search(text), _TABLE.search(text)
    if members is None:
        raise _anchor_error(OPTIMIZATION, "class SchedulerType with members")
    if table is None:
        raise _anchor_error(OPTIMIZATION, "dictionary TYPE_TO_SCHEDULER_FUNCTION with one entry per line")
    function, member = render.function_name(name), name.upper()
    if re.search(rf"^def {function}\(", text, re.MULTILINE) or re.search(rf' {member} = |"{name}"\n', members[0]):
        raise LabError(f"This checkout's {OPTIMIZATION} already has the schedule {name!r}: there is nothing to add.")
    pieces = (
        text[: members.end()],
        f'    {member} = "{name}"\n',
        text[members.end() : table.start()],
        render.function_source(name) + "\n\n",
        table[0],
        f"    SchedulerType.{member}: {function},\n",
        text[table.end() :],
    )
    return "".join(pieces)


def _in_tests(name: str, text: str) -> str:
    body = parse_python(TESTS, text).body
    found = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    found |= {alias.name for n in body if isinstance(n, ast.Import) for alias in n.names}
    for helper in render_tests.TEST_HELPERS:
        if helper not in found:
            raise _anchor_error(TESTS, f"{helper}, which the generated tests use,")
    source = next((n for n in body if isinstance(n, ast.ImportFrom) and n.module == "diffusers.optimization"), None)
    if source is None:
        raise _anchor_error(TESTS, "import from diffusers.optimization")
    names = {ast.unparse(alias) for alias in source.names} | {render.function_name(name), "get_scheduler"}
    lines = text.splitlines(keepends=True)
    lines[source.lineno - 1 : source.end_lineno] = [_import_line(names)]
    return "".join(lines).rstrip("\n") + "\n\n\n" + render_tests.tests_source(name)


def _import_line(names: set[str]) -> str:
    """The import in the order of diffusers' formatter: constants, classes, functions."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from diffusers.optimization import {', '.join(ordered)}\n"
    if len(line) <= render.WIDTH:
        return line
    return "from diffusers.optimization import (\n" + "".join(f"    {name},\n" for name in ordered) + ")\n"


def _in_tutorial(name: str, text: str) -> str:
    line = render.documentation(name) + "\n"
    if listed := re.search(rf"^{re.escape(_LIST_HEAD)}\n\n(?:- .*\n)*", text, re.MULTILINE):
        return text[: listed.end()] + line + text[listed.end() :]
    if example := re.search(r"from diffusers\.optimization import.*?\n```\n", text, re.DOTALL):
        return f"{text[: example.end()]}\n{_LIST_HEAD}\n\n{line}{text[example.end() :]}"
    raise _anchor_error(TUTORIAL, "example with a learning rate scheduler")
