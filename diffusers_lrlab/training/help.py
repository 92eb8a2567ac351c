"""`--help` of training: the options that people use first; `--help all`: every option, by group."""

import argparse
import copy
import sys
from collections.abc import Set
from typing import Any

from ..core.errors import must_be


class Formatter(argparse.HelpFormatter):
    """One spelling of each flag, and a switch that is on by default beside its `--no_...`."""

    def add_argument(self, action: argparse.Action) -> None:
        if not _is_negation(action):  # shown beside its switch
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        flags = [*action.option_strings] if action.dest == "help" else _spellings(action)[:1]
        if is_switch(action):  # which takes a value only in YAML files
            shown.nargs = 0
            if action.default is True:
                flags.append(f"--no_{action.dest}")
        shown.option_strings = flags
        return super()._format_action_invocation(shown)


class ShowHelp(argparse.Action):
    """`--help` shows the options whose names are in `first`, `--help all` every one; then the program ends."""

    def __init__(self, *args: Any, first: Set[str], **kwargs: Any):
        super().__init__(*args, **{**kwargs, "default": argparse.SUPPRESS, "metavar": "all"})
        self._first = first

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if values not in (None, "all"):
            raise must_be("--help", values, "all or left out", "--help shows the first options, --help all every one")
        sys.stdout.write(_all_options(parser) if values else _first_options(parser, self._first))
        parser.exit()


def _first_options(parser: argparse.ArgumentParser, first: Set[str]) -> str:
    formatter, others = parser._get_formatter(), []
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.dest in first]
        if shown:
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        hidden = [action for action in group._group_actions if action not in shown and _is_listed(action)]
        others += [f"{group.title} ({len(hidden)})"] if hidden else []
    formatter.add_text(f"--help all also shows the other options: {'; '.join(others)}.")
    return formatter.format_help()


def _all_options(parser: argparse.ArgumentParser) -> str:
    """Every option, then the spellings that also work: those of older records, and of diffusers."""
    also = [
        f"{other} for {flag}" for action in parser._actions for flag, *others in [_spellings(action)] for other in others
    ]
    ending = f" These also work: {', '.join(also)}." if also else ""
    formatter = parser._get_formatter()
    formatter.add_text(f"Each option may be written with hyphens in place of underscores.{ending}")
    return f"{parser.format_help()}\n{formatter.format_help()}"


def is_switch(action: argparse.Action) -> bool:
    return action.nargs == "?" and action.const is True


def _is_negation(action: argparse.Action) -> bool:
    """Whether this is the `--no_x` that `HfArgumentParser` adds to a switch `--x`."""
    return isinstance(action, argparse._StoreFalseAction) and action.option_strings[0] == f"--no_{action.dest}"


def _is_listed(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not _is_negation(action)


def _spellings(action: argparse.Action) -> list[str]:
    """The flags without those spelled with hyphens, which work for every option: first the one that the help shows."""
    flags = [flag for flag in action.option_strings if flag.startswith("--") and "-" not in flag[2:]]
    return sorted(flags, key=lambda flag: flag != getattr(action, "spelling", ""))
