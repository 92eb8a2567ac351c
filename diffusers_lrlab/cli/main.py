"""The `lrlab` command. A subcommand is a row of `COMMANDS`; what it needs is imported when it runs."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import __version__
from ..core.errors import LabError, did_you_mean, exit_status, shortened
from ..core.plugins import load_plugins
from . import check, completion, hub, lists, preview, study, tools, training
from .output import LabParser, add_import


class Command(NamedTuple):
    """A subcommand: what it does in a line, an example, its options, and the function that does it."""

    help: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]  # its exit status, if that is not always 0


# Those that leave all their arguments to the parser of the training scripts.
SCRIPTS = {"train": training.train, "find-lr": training.find_lr}


def _script(name: str, help: str, example: str) -> Command:
    return Command(help, example, lambda parser: None, lambda options: SCRIPTS[name](options.rest, f"lrlab {name}"))


COMMANDS = {
    "train": _script(
        "train",
        "trains a diffusion pipeline; with several processes: accelerate launch -m diffusers_lrlab.train",
        "lrlab train --dataset_name dino --lr_scheduler cosine",
    ),
    "find-lr": _script(
        "find-lr", "finds the learning rate of a training run before it", "lrlab find-lr --dataset_name dino"
    ),
    "list": Command("shows what can be chosen by name", "lrlab list schedulers", lists.list_arguments, lists.list_names),
    "preview": Command(
        "draws schedules over a run, or densities and weights over timesteps",
        "lrlab preview --lr_scheduler cosine --lr_scheduler rex:d=0.9 --num_training_steps 10000 --num_warmup_steps 500",
        preview.preview_arguments,
        preview.preview,
    ),
    "data": Command(
        "writes a toy dataset as files that load anywhere",
        "lrlab data export dino dino-points --n 100000 --seed 42",
        tools.data_arguments,
        tools.data,
    ),
    "plan": Command(
        "shows what a training run will do, and its time and memory",
        "lrlab plan --dataset_name dino --optimizer sgd",
        tools.plan_arguments,
        tools.plan,
    ),
    "scale": Command(
        "shows learning rates for other batch sizes",
        "lrlab scale --learning_rate 1e-4 --base_batch_size 64 --train_batch_size 128 --num_processes 8",
        tools.scale_arguments,
        tools.scale,
    ),
    "study": Command(
        "compares schedules, optimizers or any other setting of a run over data sets and seeds",
        "lrlab study run quick --out first-study",
        study.add_arguments,
        study.command,
    ),
    "check": Command(
        "verifies a run, a study, a data set or a download, and says what is damaged and from where it goes on",
        "lrlab check ddpm-digits-8",
        check.check_arguments,
        check.check,
    ),
    "schedule": Command(
        "writes a schedule as a folder to publish",
        "lrlab schedule my-schedule --lr_scheduler wsd:decay_type=1-sqrt,num_decay_steps=0.3",
        hub.schedule_arguments,
        hub.schedule,
    ),
    "push": Command(
        "uploads a run, a study, a toy dataset or a schedule to the Hub",
        "lrlab push ddpm-digits-8 --repo_id USER/ddpm-digits-8",
        hub.push_arguments,
        hub.push,
    ),
    "pull": Command("downloads what somebody published", "lrlab pull USER/ddpm-digits-8", hub.pull_arguments, hub.pull),
    "rerun": Command(
        "repeats a run from its record, and says whether the two agree",
        "lrlab rerun USER/ddpm-digits-8 --compare",
        hub.rerun_arguments,
        hub.rerun,
    ),
    "upstream-patch": Command(
        "makes patches for diffusers: a schedule, or schedules of the right length in its training scripts",
        "lrlab upstream-patch rex --diffusers ~/diffusers --out rex.patch",
        tools.upstream_patch_arguments,
        tools.upstream_patch,
    ),
    "env": Command(
        "shows versions, devices and what is not installed, for bug reports",
        "lrlab env",
        tools.environment_arguments,
        tools.environment,
    ),
    "completion": Command(
        "prints a script by which a shell completes commands, flags and names",
        "lrlab completion bash",
        completion.completion_arguments,
        lambda options: completion.print_completion(options.shell, _parser()),
    ),
}


REST = (*SCRIPTS, "plan", "rerun")  # what is left of their arguments is for the training script's parser
TAKES_NAMES = ("list", "preview", "study", "schedule", "push")  # that may be of plug-ins; REST has the training's --import


def _parser() -> LabParser:
    parser = LabParser(prog="lrlab", description="Training dynamics of diffusion models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"diffusers_lrlab {__version__}", help="shows the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description, example = f"{command.help[0].upper()}{command.help[1:]}.", f"Example: {command.example}"
        of_command = commands.add_parser(
            name, help=command.help, description=description, epilog=example, allow_abbrev=False
        )
        command.add_arguments(of_command)
        if name in TAKES_NAMES:
            add_import(of_command)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    if arguments and arguments[0] in SCRIPTS:
        return argparse.Namespace(command=arguments[0], rest=list(arguments[1:]))
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)  # as argparse does for a call that lacks something
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise LabError(
            f"Unknown command {shortened(arguments[0])}.{did_you_mean(arguments[0], COMMANDS)} Known: {', '.join(COMMANDS)}."
        )
    options, unknown = parser.parse_known_args(arguments)
    if options.command in REST:
        options.rest = unknown
    elif unknown:
        flags = [f"--{name}" for name in vars(options) if name != "command"]
        hint = did_you_mean(unknown[0].split("=")[0], flags)
        raise LabError(f"Unknown argument {shortened(unknown[0])}.{hint} See lrlab {options.command} --help.")
    load_plugins(getattr(options, "plugins", None))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets another one, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    def run() -> int:
        try:
            options = _parse(sys.argv[1:] if arguments is None else arguments)
            status = COMMANDS[options.command].run(options)
            sys.stdout.flush()
        except BrokenPipeError:
            # `lrlab list | head`: nobody reads on, which Python must not report again when it ends.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return status or 0

    return exit_status(run, (LabError, OSError))


if __name__ == "__main__":
    sys.exit(main())
