"""Errors that name options which the running command does not have."""

import argparse
import re

from ..core.errors import LabError

_FLAG = re.compile(r"(?<![\w-])--[a-z]\w*")
_COMMAND_LINE = re.compile(r"(--\w+ of )?`[^`]*`")


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of subcommands, by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: subparser for action in actions for name, subparser in action.choices.items()}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a parser and of its subcommands."""
    return set(parser._option_string_actions).union(*map(flags_of, subparsers_of(parser).values()))


def foreign_flags(text: str, flags: set[str]) -> list[str]:
    """The options of training in a text that are not among `flags`, apart from those of commands in backticks."""
    if not (named := {flag: None for flag in _FLAG.findall(_COMMAND_LINE.sub("", text)) if flag not in flags}):
        return []
    from ..core.options import options_of
    from ..training.config import TrainingConfig

    return [flag for flag in named if flag.removeprefix("--") in options_of(TrainingConfig)]


def note_owner(error: LabError, command: str, parser: argparse.ArgumentParser) -> None:
    """Adds a note to the error of a command if it names options that only training has."""
    if foreign := foreign_flags(str(error), flags_of(parser)):
        are = "is an option" if len(foreign) == 1 else "are options"
        instead = "; a study file has such options as keys" if command == "study" else ""
        note = f"{', '.join(foreign)} {are} of `lrlab train`, not of `lrlab {command}`{instead}."
        error.args = (f"{error} Note: {note}",)
