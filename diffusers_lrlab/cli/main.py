"""The `lrlab` command. A subcommand is a row of `COMMANDS`; its imports happen when it runs."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from .. import __version__
from ..core.environment import require_extra
from ..core.errors import LabError, did_you_mean, shown
from ..core.options import TextParser
from ..core.plugins import load_plugins
from ..core.program import exit_status
from . import add_import, announce_loading, folders, say, show, study, training


class Command(NamedTuple):
    """A subcommand."""

    help: str  # in a line
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], int | None]  # returns the exit status if that is not always 0


SHELLS = ("bash", "zsh", "tcsh")
# Commands that leave all their arguments to the parser of the training scripts.
SCRIPTS = {"train": training.train, "find-lr": training.find_lr}


def _script(name: str, help: str, example: str) -> Command:
    return Command(help, example, lambda parser: None, lambda options: SCRIPTS[name](options.rest, f"lrlab {name}"))


_TRAIN = "Train a diffusion pipeline; for several processes: accelerate launch -m diffusers_lrlab.train"
_EXTEND = "Train a run for longer, or cool it down from a checkpoint, as a new run"
_LIST = "List everything that is chosen by name: schedules, samplers, optimizers and more"
_PREVIEW = "Show schedules over a run, or densities and weights over timesteps, as a table or a plot"
_PREVIEWED = "lrlab preview --lr_scheduler cosine --lr_scheduler rex:d=0.9 --num_training_steps 10000 --num_warmup_steps 500"
_AUDIT = "Show which learning rate any torch program really uses, without changing it"
_AUDITED = "lrlab audit -- python train.py --lr_scheduler cosine"
_DATA = "Export a toy dataset as files that load anywhere, or encode images to latents"
_EXPORTED = "lrlab data export dino dino-points --n 100000 --seed 42"
_PLAN = "Show what a training run will do, and its memory, time and disk space"
_STUDY = "Compare schedules, optimizers or any other setting over data sets and seeds"
_EMA = "Average the weights with any width, from the snapshots of a run"
_AVERAGED = "lrlab ema dino-run --sigma_rel 0.075 --out dino-run-ema"
_CHECK = "Verify a run, study, toy dataset or download: damaged files, and how to go on"
_PUSH = "Upload a run, study or toy dataset to the Hub"
_PUSHED = "lrlab push ddpm-digits-8 --repo_id USER/ddpm-digits-8"
_EXTENDED = "lrlab extend ddpm-digits-8 --max_train_steps 20000"
_PLANNED = "lrlab plan --dataset_name dino --optimizer sgd"
COMMANDS = {
    "train": _script("train", _TRAIN, "lrlab train --dataset_name dino --lr_scheduler cosine"),
    "find-lr": _script("find-lr", "Find a learning rate for a training run", "lrlab find-lr --dataset_name dino"),
    "extend": Command(_EXTEND, _EXTENDED, training.extend_arguments, training.extend),
    "list": Command(_LIST, "lrlab list schedulers", show.list_arguments, show.list_names),
    "preview": Command(_PREVIEW, _PREVIEWED, show.preview_arguments, show.preview),
    "audit": Command(_AUDIT, _AUDITED, show.audit_arguments, show.audit),
    "data": Command(_DATA, _EXPORTED, folders.data_arguments, folders.data),
    "plan": Command(_PLAN, _PLANNED, training.plan_arguments, training.plan),
    "study": Command(_STUDY, "lrlab study run quick --out first-study", study.add_arguments, study.command),
    "ema": Command(_EMA, _AVERAGED, training.ema_arguments, training.ema),
    "check": Command(_CHECK, "lrlab check ddpm-digits-8", folders.check_arguments, folders.check),
    "push": Command(_PUSH, _PUSHED, folders.push_arguments, folders.push),
    "pull": Command("Download a published result", "lrlab pull USER/ddpm-digits-8", folders.pull_arguments, folders.pull),
    "completion": Command(
        "Complete commands, flags and names in the shell",
        "lrlab completion bash",
        lambda parser: parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS)}."),
        lambda options: _complete(options.shell),
    ),
}
REST = (*SCRIPTS, "plan")  # commands that leave unknown arguments to the parser of training
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
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise LabError(
            f"Unknown command {shown(arguments[0])}.{did_you_mean(arguments[0], COMMANDS)} Known: {', '.join(COMMANDS)}."
        )
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


def _complete(shell: str) -> None:
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

    parser = _parser()
    commands = _subparsers(parser)
    training = [action for action in make_parser("")._actions if action.dest != "help"]
    for action in training:
        if (known := options_of(TrainingConfig).get(action.dest)) is not None and known.registry:
            action.choices = [*known.entries, *known.entries.aliases]
    for name in ("train", "find-lr", "plan"):
        commands[name]._actions += training
    (kind,) = (action for action in commands["list"]._actions if action.dest == "kind")
    kind.choices = list(show.LISTED)
    say(shtab.complete(parser, shell=shell))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    # Imported by transformers by way of peft, it warns of a 4-bit kernel that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    def run() -> int:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        return COMMANDS[options.command].run(options) or 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
