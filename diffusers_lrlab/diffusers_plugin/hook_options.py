"""The options of the launcher's hooks, from the rows of [`hook_table.HOOKS`]."""

import argparse
from collections.abc import Iterator
from typing import Any

from ..core.errors import LabError, warn
from ..core.extras import require_extra
from ..core.registry import markdown_table
from .hook_table import HOOKS, HookEntry, HookOption


def all_options() -> Iterator[tuple[HookEntry, HookOption]]:
    for entry in HOOKS.values():
        for option in (*entry.options, *entry.settings):
            yield entry, option


class _Once(argparse._StoreAction):
    """An option whose first value would otherwise be ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            parser.error(f"{option_string} {values}: must be given once, got {first} before. Hint: leave one out.")
        super().__call__(parser, namespace, values, option_string)


def add_options(parser: argparse.ArgumentParser) -> None:
    for _, option in all_options():
        kwargs: dict[str, Any] = {"action": "store_true"}
        if option.value_type is not bool:
            kwargs = {"type": option.value_type, "metavar": option.metavar, "action": _Once}
        parser.add_argument(f"--{option.name}", help=option.help, **kwargs)


def shown(options: argparse.Namespace, rows: list[str]) -> str:
    """The given options of these rows, such as `"--timestep_sampler and --loss_weighting"`."""
    given = [option.name for name in rows for option in HOOKS[name].options if option.is_given(options)]
    return " and ".join(f"--{name}" for name in given)


def check_numbers(options: argparse.Namespace) -> None:
    for _, option in all_options():
        option.check(getattr(options, option.name))


def check(options: argparse.Namespace) -> None:
    """Raises a `LabError` for a number out of range, an option without effect, and a package that is not installed."""
    check_numbers(options)
    for entry, option in all_options():
        if option.is_given(options) and (needed := _missing(entry, option, options)):
            value = "" if option.value_type is bool else f" {getattr(options, option.name)}"
            raise LabError(f"--{option.name}{value} has no effect without {needed}. Add it, or remove --{option.name}.")
    optional = [entry for entry in HOOKS.values() if not entry.is_always_there]
    if options.strict and not any(entry.is_asked(options) for entry in optional):
        needed = ", ".join(f"--{option.name}" for entry in optional for option in entry.options)
        raise LabError(f"--strict has no effect without one of {needed}. Add one, or remove --strict.")
    active = _without_idle(options) if options.find_lr else options
    for name, entry in HOOKS.items():
        if entry.extra and entry.is_asked(active):
            require_extra(entry.extra, shown(options, [name]))


def _missing(entry: HookEntry, option: HookOption, options: argparse.Namespace) -> str:
    """The options of which one is needed and none is given, joined by "or"; empty if nothing is missing."""
    if option not in entry.settings or entry.is_always_there or entry.is_asked(options):
        return ""
    return " or ".join(f"--{each.name}" for each in entry.options)


def options_of_test(options: argparse.Namespace) -> argparse.Namespace:
    """The options that act in a range test. A warning names the others."""
    if idle := _idle(options):
        warn(f"--find_lr does not train: {', '.join(f'--{name}' for name in idle)} has no effect on the test.")
    return _without_idle(options)


def _idle(options: argparse.Namespace) -> list[str]:
    return [option.name for _, option in all_options() if not option.acts_in_range_test and option.is_given(options)]


def _without_idle(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | dict.fromkeys(_idle(options)))


def requested_groups(options: argparse.Namespace) -> list[list[str]]:
    """
    The names of the rows to make hooks of, in the order of the table.

    Rows that need each other are one group, which is made as a whole or not at all: a sampler whose losses cannot be
    weighted as it requires would bias the training.
    """
    rows = [*HOOKS]
    wanted = {name for name, entry in HOOKS.items() if entry.is_asked(options)}
    for name in reversed(rows):  # a row needs only earlier ones
        wanted |= {*HOOKS[name].needs} if name in wanted else set()
    groups: list[list[str]] = []
    for name in (name for name in rows if name in wanted):
        joined = [group for group in groups if {*group} & {*HOOKS[name].needs}]
        if joined:  # at the position of the first
            joined[0].extend([*(other for group in joined[1:] for other in group), name])
            groups = [group for group in groups if group not in joined[1:]]
        else:
            groups.append([name])
    return [sorted(group, key=rows.index) for group in groups]


def options_table() -> str:
    """All options of the launcher's hooks as a Markdown table."""
    rows = []
    for _, option in all_options():
        value = "" if option.value_type is bool else f" {option.metavar}"
        rows.append((f"`--{option.name}{value}`", option.help, "yes" if option.acts_in_range_test else "–"))
    return markdown_table(("option, before the script's name", "effect", "with `--find_lr`"), rows)
