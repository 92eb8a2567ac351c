"""Adds a schedule to diffusers' files: at places found in the syntax tree of the code, and at the tutorial's example."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ..core.errors import LabError
from . import render, render_tests

OPTIMIZATION = "src/diffusers/optimization.py"
TESTS = "tests/others/test_optimization.py"
TUTORIAL = "docs/source/en/tutorials/basic_training.md"
FILES = (OPTIMIZATION, TESTS, TUTORIAL)

_LIST_HEAD = (
    "More learning rate schedules are available by name, with `diffusers.optimization.get_scheduler` or as the "
    "`--lr_scheduler` of most training scripts:"
)


def add_schedule(name: str, read: Callable[[str], str | None]) -> dict[str, str]:
    """The new text of the files of diffusers that change for a schedule; `read` returns that of a file, or `None`."""
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
        f"There is {what} of this checkout, where the schedule would go: diffusers has changed there. Take a commit near "
        "v0.42.1 as the base, or a newer diffusers_lrlab."
    )


def _parse(path: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise LabError(f"{path} of this checkout is not valid Python (line {error.lineno}). Mend it first.") from None


def _insert(text: str, insertions: dict[int, str]) -> str:
    """`text` with something added after the lines of these numbers."""
    lines = text.splitlines(keepends=True)
    for number in sorted(insertions, reverse=True):
        lines.insert(number, insertions[number])
    return "".join(lines)


def _in_optimization(name: str, text: str) -> str:
    body = _parse(OPTIMIZATION, text).body
    names = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == "SchedulerType"), None)
    members = [n for n in names.body if isinstance(n, ast.Assign)] if names else []
    if not members:
        raise _anchor_error(OPTIMIZATION, "class SchedulerType with members")
    table = next((n for n in body if "TYPE_TO_SCHEDULER_FUNCTION" in _assigned(n)), ast.Pass())
    entries = getattr(table, "value", None)
    if not isinstance(entries, ast.Dict) or not entries.values or not _ends_its_line(entries.values[-1], text):
        raise _anchor_error(OPTIMIZATION, "dictionary TYPE_TO_SCHEDULER_FUNCTION with one entry and a comma a line")

    function, member = render.function_name(name), name.upper()
    known = {n.name for n in body if isinstance(n, ast.FunctionDef)} | {t for m in members for t in _assigned(m)}
    values = {m.value.value for m in members if isinstance(m.value, ast.Constant)}
    if name in values or {function, member} & known:
        raise LabError(f"This checkout's {OPTIMIZATION} already has the schedule {name!r}: there is nothing to add.")
    return _insert(
        text,
        {
            _last_line(members[-1]): f'    {member} = "{name}"\n',
            table.lineno - 1: render.function_source(name) + "\n\n",
            _last_line(entries.values[-1]): f"    SchedulerType.{member}: {function},\n",
        },
    )


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _ends_its_line(value: ast.expr, text: str) -> bool:
    """Whether only a comma and a comment follow, as in a dictionary that their formatter spread over several lines."""
    line = text.splitlines()[_last_line(value) - 1].encode()
    return line[value.end_col_offset :].startswith(b",") and b"}" not in line[value.end_col_offset :]


def _last_line(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _in_tests(name: str, text: str) -> str:
    body = _parse(TESTS, text).body
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
    """The import in the form and order of their formatter: constants, classes, functions."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from diffusers.optimization import {', '.join(ordered)}\n"
    if len(line) <= render.WIDTH:
        return line
    return "from diffusers.optimization import (\n" + "".join(f"    {name},\n" for name in ordered) + ")\n"


def _in_tutorial(name: str, text: str) -> str:
    lines = text.splitlines()
    if _LIST_HEAD in lines:
        end = lines.index(_LIST_HEAD) + 2
        while end < len(lines) and lines[end].startswith("- "):
            end += 1
        return _insert(text, {end: render.documentation(name) + "\n"})
    try:
        example = next(i for i, line in enumerate(lines) if "from diffusers.optimization import" in line)
        end = lines.index("```", example) + 1
    except (StopIteration, ValueError):
        raise _anchor_error(TUTORIAL, "example with a learning rate scheduler") from None
    return _insert(text, {end: f"\n{_LIST_HEAD}\n\n{render.documentation(name)}\n"})
