"""The `lrlab` command. A subcommand is a row of `COMMANDS`; its imports happen when it runs."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from .. import __version__
from ..core.environment import require_extra
from ..core.errors import LabError
from ..core.options import TextParser
from ..core.plugins import load_plugins
from ..core.program import exit_status
from . import add_import, announce_loading, folders, say, show, study, training


class Command(NamedTuple):
    """A subcommand, whose help is the docstring of its function."""

    example: str
    run: Callable[..., int | None]  # returns the exit status if that is not always 0
    add_arguments: Callable[[argparse.ArgumentParser], Any] = lambda parser: None

    @property
    def help(self) -> str:
        return (self.run.__doc__ or "").rstrip(".")


def complete(options: argparse.Namespace) -> None:
    """Complete commands, flags and names in the shell."""
    announce_loading()
    require_extra("train", "lrlab completion")  # for the training options
    try:
        import shtab
    except ImportError:
        raise LabError("lrlab completion needs shtab, which is not installed: pip install shtab") from None
    from ..core.options import options_of
    from ..training.arguments import make_parser
    from ..training.config import TrainingConfig

    parser = _parser()
    commands = _subparsers(parser)
    training = [action for action in make_parser("")._actions if action.dest != "help"]
    for action in training:
        if (known := options_of(TrainingConfig).get(action.dest)) is not None and known.registry:
            action.choices = [*known.entries, *known.entries.aliases]
    for name in REST:
        commands[name]._actions += training
    say(shtab.complete(parser, shell=options.shell))  # the script starts no Python: it has the names that are known now


def _add_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS)}.")


SHELLS = ("bash", "zsh", "tcsh")
_PREVIEWED = "lrlab preview --lr_scheduler cosine --lr_scheduler rex:d=0.9 --num_training_steps 10000 --num_warmup_steps 500"
_AUDITED = "lrlab audit -- python train.py --lr_scheduler cosine"
_EXPORTED = "lrlab data export dino dino-points --n 100000 --seed 42"
_AVERAGED = "lrlab ema dino-run --sigma_rel 0.075 --out dino-run-ema"
_PUSHED = "lrlab push ddpm-digits-8 --repo_id USER/ddpm-digits-8"
_EXTENDED = "lrlab extend ddpm-digits-8 --max_train_steps 20000"
COMMANDS = {
    "train": Command("lrlab train --dataset_name dino --lr_scheduler cosine", training.train),
    "find-lr": Command("lrlab find-lr --dataset_name dino", training.find_lr),
    "extend": Command(_EXTENDED, training.extend, training.extend_arguments),
    "list": Command("lrlab list schedulers", show.list_names, show.list_arguments),
    "preview": Command(_PREVIEWED, show.preview, show.preview_arguments),
    "audit": Command(_AUDITED, show.audit, show.audit_arguments),
    "data": Command(_EXPORTED, folders.data, folders.data_arguments),
    "plan": Command("lrlab plan --dataset_name dino --optimizer sgd", training.plan, training.plan_arguments),
    "study": Command("lrlab study run quick --out first-study", study.command, study.add_arguments),
    "ema": Command(_AVERAGED, training.ema, training.ema_arguments),
    "check": Command("lrlab check ddpm-digits-8", folders.check, folders.check_arguments),
    "push": Command(_PUSHED, folders.push, folders.push_arguments),
    "pull": Command("lrlab pull USER/ddpm-digits-8", folders.pull, folders.pull_arguments),
    "completion": Command("lrlab completion bash", complete, _add_shell),
}
# Commands that leave all their arguments to the parser of the training scripts, and one that leaves it the unknown ones.
SCRIPTS = ("train", "find-lr")
REST = (*SCRIPTS, "plan")
# Commands with --import besides `study` and those of REST.
TAKES_NAMES = ("list", "preview", "push", "extend")


def _parser() -> TextParser:
    parser = TextParser(prog="lrlab", description="Training dynamics of diffusion models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"diffusers_lrlab {__version__}", help="Show the version.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description, example = f"{command.help}.", f"Example: {command.example}"
        subparser = commands.add_parser(name, help=command.help, description=description, epilog=example, allow_abbrev=False)
        command.add_arguments(subparser)
        if name in TAKES_NAMES:
            add_import(subparser)
    return parser


def _subparsers(parser: TextParser) -> dict[str, TextParser]:
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return cast("dict[str, TextParser]", commands)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    if arguments and arguments[0] in SCRIPTS:
        return argparse.Namespace(command=arguments[0], rest=list(arguments[1:]))
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)  # as argparse does for missing arguments
    options, unknown = parser.parse_known_args(arguments)
    if options.command in REST:
        options.rest = unknown
    else:
        keys = " Seeds, metrics, arms and options of `lrlab train` are keys of the study file, not flags."
        used = (options.command, getattr(options, "action", None))
        for name in filter(None, used):
            parser = _subparsers(parser)[name]
        parser.refuse(unknown, otherwise=keys if used == ("study", "run") else "")
    load_plugins(getattr(options, "plugins", None))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    # Imported by transformers by way of peft, it warns of a 4-bit kernel that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    def run() -> int:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        command, name = COMMANDS[options.command], options.command
        return (command.run(options.rest, f"lrlab {name}") if name in SCRIPTS else command.run(options)) or 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
