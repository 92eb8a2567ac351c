"""`--help` of training: the options that most runs need, then all others by group."""

import argparse
import copy
from collections.abc import Set


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


def help_of(parser: argparse.ArgumentParser, first: Set[str]) -> str:
    """The options whose names are in `first`, the others by group, then spellings of older records and of diffusers."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    sections = [("what most runs need", [action for action in parser._actions if action.dest in first])]
    sections += [
        (str(group.title), [action for action in group._group_actions if action.dest not in first])
        for group in parser._action_groups
    ]
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    also = [
        f"{other} for {flag}" for action in parser._actions for flag, *others in [_spellings(action)] for other in others
    ]
    ending = f" These also work: {', '.join(also)}." if also else ""
    formatter.add_text(f"Each option may be written with hyphens in place of underscores.{ending}")
    return formatter.format_help()


def is_switch(action: argparse.Action) -> bool:
    return action.nargs == "?" and action.const is True


def _is_negation(action: argparse.Action) -> bool:
    """Whether this is the `--no_x` that `HfArgumentParser` adds to a switch `--x`."""
    return isinstance(action, argparse._StoreFalseAction) and action.option_strings[0] == f"--no_{action.dest}"


def _spellings(action: argparse.Action) -> list[str]:
    """The flags without those spelled with hyphens, which work for every option: first the one that the help shows."""
    flags = [flag for flag in action.option_strings if flag.startswith("--") and "-" not in flag[2:]]
    return sorted(flags, key=lambda flag: flag != getattr(action, "spelling", ""))
