"""`lrlab audit`, and `lrlab completion`, the script by which a shell completes commands, flags and names."""

import argparse

from ..core.environment import require_extra
from ..core.errors import LabError
from . import study
from .output import announce_loading, say
from .show import LISTED

SHELLS = ("bash", "zsh", "tcsh")


def audit_arguments(parser: argparse.ArgumentParser) -> None:
    from diffusers_lrlab.audit.run import add_options

    parser.usage = "lrlab audit [options] -- PROGRAM [its own arguments]"
    add_options(parser)


def audit(options: argparse.Namespace) -> int:
    from diffusers_lrlab.audit.run import options_of

    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        raise LabError("Which program? Give it after the options: lrlab audit -- python train.py --its_own_option.")
    if command[0].endswith(".py"):
        raise LabError(f"{command[0]!r} is not a program. Hint: lrlab audit -- python {command[0]} ...")
    checked = options_of(options)
    from ..audit.run import run_audited

    return run_audited(command, checked)


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS)}.")


def completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Prints the script of a shell, which starts no Python: it completes the names that are known now."""
    announce_loading()
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
