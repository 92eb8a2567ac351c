"""`lrlab completion`: the script by which a shell completes commands, flags and names, made by shtab."""

import argparse

from ..core.errors import LabError
from ..core.extras import require_extra
from . import study
from .lists import LISTED
from .output import say

SHELLS = ("bash", "zsh", "tcsh")


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS)}.")


def completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Prints the script of a shell, which starts no Python: it completes the names that are known now."""
    require_extra("train", "lrlab completion")  # for the training options
    try:
        import shtab
    except ImportError:
        raise LabError("lrlab completion needs shtab, which is not installed: pip install shtab") from None
    from ..core.options import options_of
    from ..training.arguments import make_parser
    from ..training.config import TrainingConfig

    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    training = [action for action in make_parser("")._actions if action.dest != "help"]
    for action in training:
        if (known := options_of(TrainingConfig).get(action.dest)) is not None and known.registry:
            action.choices = [*known.entries, *known.entries.aliases]
    for name in ("train", "find-lr", "plan"):
        commands[name]._actions += training
    for command, argument, names in (("list", "kind", LISTED), ("study", "action", study.ACTIONS)):
        (action,) = (action for action in commands[command]._actions if action.dest == argument)
        action.choices = list(names)
    say(shtab.complete(parser, shell=options.shell))
