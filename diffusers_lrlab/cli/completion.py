"""`lrlab completion`: the script by which a shell completes commands, flags and names."""

import argparse
from typing import Any

from ..core.errors import LabError
from ..core.extras import require_extra
from . import study
from .lists import KINDS
from .output import say

SHELLS = ("bash", "zsh", "tcsh")


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS)}.")


def print_completion(shell: str, parser: argparse.ArgumentParser) -> None:
    """Prints the script, which starts no Python: it completes the names that are known now."""
    require_extra("train", "lrlab completion")  # for the training options
    try:
        import shtab
    except ImportError:
        raise LabError("lrlab completion needs shtab, which is not installed: pip install shtab") from None
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    for name, options in _training_options(shtab.FILE).items():
        known = commands[name]._option_string_actions
        for action in options:
            if not any(flag in known for flag in action.option_strings):
                commands[name]._add_action(action)
    for command, argument, names in (("list", "kind", KINDS), ("study", "action", study.ACTIONS)):
        (action,) = (action for action in commands[command]._actions if action.dest == argument)
        action.choices = list(names)
    say(shtab.complete(parser, shell=shell))


def _training_options(file: Any) -> dict[str, list[argparse.Action]]:
    """The training options of each command that takes them, with their names or `file` to complete."""
    from ..core.options import options_of
    from ..finder.range_test import FinderConfig
    from ..training.arguments import make_parser
    from ..training.config import TrainingConfig

    known = options_of(TrainingConfig)
    found = {}
    for command, more in {"train": [], "find-lr": [FinderConfig], "plan": [], "floor": [], "rerun": []}.items():
        found[command] = [action for action in make_parser("", more)._actions if "--help" not in action.option_strings]
        for action in found[command]:
            action.option_strings = [flag for flag in action.option_strings if "-" not in flag[2:]]  # without hyphens
            option = known.get(action.dest)
            if option is not None and option.registry:
                action.choices = [*option.entries, *option.entries.aliases]
            elif action.dest in ("config", "output_dir") or (option is not None and option.is_path):
                action.complete = file  # type: ignore[attr-defined]
    return found
