"""The options of the launcher's hooks, from the rows of [`hook_table.HOOKS`]: parsed, checked, explained and in a table."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from ..core.environment import require_extra
from ..core.errors import LabError, warn
from ..core.words import markdown_table
from .hook_table import HOOKS, HookEntry, HookOption
from .host.faults import find_faults
from .host.source import HostScript, NotRecognised


def all_options() -> Iterator[tuple[HookEntry, HookOption]]:
    for entry in HOOKS.values():
        for option in (entry.option, *entry.settings):
            yield entry, option


class _Once(argparse._StoreAction):
    """An option whose first value would otherwise be ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            parser.error(f"{option_string} {values}: must be given once, got {first} before. Hint: leave one out")
        super().__call__(parser, namespace, values, option_string)


def add_options(parser: argparse.ArgumentParser) -> None:
    for _, option in all_options():
        kwargs: dict[str, Any] = {"action": "store_true"}
        if option.value_type is not bool:
            kwargs = {"type": option.value_type, "metavar": option.metavar, "action": _Once}
        parser.add_argument(f"--{option.name}", help=option.help, **kwargs)


def check_numbers(options: argparse.Namespace) -> None:
    for _, option in all_options():
        option.check(getattr(options, option.name))


def check(options: argparse.Namespace) -> None:
    """Raises a `LabError` for a number out of range, an option without effect, and a package that is not installed."""
    check_numbers(options)
    for entry, option in all_options():
        if option.is_given(options) and not entry.is_always_there and not entry.is_asked(options):
            value, needed = f"--{option.name} {getattr(options, option.name)}", f"--{entry.option.name}"
            raise LabError(f"{value} has no effect without {needed}. Add it, or remove --{option.name}.")
    optional = [entry for entry in HOOKS.values() if not entry.is_always_there]
    if options.strict and not any(entry.is_asked(options) for entry in optional):
        needed = ", ".join(f"--{entry.option.name}" for entry in optional)
        raise LabError(f"--strict has no effect without one of {needed}. Add one, or remove --strict.")
    active = _without_idle(options) if options.find_lr else options
    for entry in HOOKS.values():
        if entry.extra and entry.is_asked(active):
            require_extra(entry.extra, f"--{entry.option.name}")


def options_of_test(options: argparse.Namespace) -> argparse.Namespace:
    """The options that act in a range test. A warning names the others."""
    if idle := _idle(options):
        warn(f"--find_lr does not train: {', '.join(f'--{name}' for name in idle)} has no effect on the test.")
    return _without_idle(options)


def _idle(options: argparse.Namespace) -> list[str]:
    return [option.name for _, option in all_options() if not option.acts_in_range_test and option.is_given(options)]


def _without_idle(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | dict.fromkeys(_idle(options)))


def options_table() -> str:
    """All options of the launcher's hooks as a Markdown table."""
    rows = []
    for _, option in all_options():
        value = "" if option.value_type is bool else f" {option.metavar}"
        rows.append((f"`--{option.name}{value}`", option.help, "yes" if option.acts_in_range_test else "–"))
    return markdown_table(("option, before the script's name", "effect", "with `--find_lr`"), rows)


# --- --explain --------------------------------------------------------------------------------------------------------


def recognisers() -> dict[str, Callable[[HostScript], str]]:
    """Functions that describe what an option acts on or raise [`NotRecognised`], by option."""
    return {f"--{entry.option.name}": entry.recognise for entry in HOOKS.values()}


def explain(script: HostScript) -> str:
    """What each option acts on in a script, and the script's own faults, a line each, from its text alone."""
    width = max(map(len, recognisers()))
    lines = [script.path]
    for option, recognise in recognisers().items():
        try:
            found = recognise(script)
        except NotRecognised as reason:
            found = f"not here: {reason}"
        lines.append(f"  {option:<{width}}  {found}")
    faults = [f"  {fault.text}" for fault in find_faults(script)]
    return "\n".join([*lines, "By itself, this script", *(faults or ["  has no known fault"])])
