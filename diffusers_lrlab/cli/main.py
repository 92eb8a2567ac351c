"""The `lrlab` command. A subcommand is a row of `COMMANDS`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..core.errors import LabError, did_you_mean, exit_status
from . import hub, lists, preview, study, tools
from .output import LabParser


class Command(NamedTuple):
    """A subcommand: what it does in a line, an example, its options, and the function that does it."""

    help: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS = {
    "list": Command("shows what can be chosen by name", "lrlab list schedulers", lists.list_arguments, lists.list_names),
    "preview": Command(
        "draws schedules over a run, or densities and weights over timesteps",
        "lrlab preview --lr_scheduler cosine --lr_scheduler rex:d=0.9 --num_training_steps 10000 --num_warmup_steps 500",
        preview.preview_arguments,
        preview.preview,
    ),
    "data": Command(
        "writes toy sets as data sets",
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
    "schedule": Command(
        "writes a schedule as a folder to publish",
        "lrlab schedule my-schedule --lr_scheduler wsd:decay_type=1-sqrt,num_decay_steps=0.3",
        hub.schedule_arguments,
        hub.schedule,
    ),
    "push": Command(
        "uploads a run, a study, a set of points or a schedule to the Hub",
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
        "makes a patch for diffusers of a schedule",
        "lrlab upstream-patch rex --diffusers ~/diffusers --out rex.patch",
        tools.upstream_patch_arguments,
        tools.upstream_patch,
    ),
}


def _parser() -> LabParser:
    parser = LabParser(prog="lrlab", description="Training dynamics of diffusion models.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description, example = f"{command.help[0].upper()}{command.help[1:]}.", f"Example: {command.example}"
        command.add_arguments(
            commands.add_parser(name, help=command.help, description=description, epilog=example, allow_abbrev=False)
        )
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise LabError(
            f"Unknown command {arguments[0]!r}.{did_you_mean(arguments[0], COMMANDS)} Known: {', '.join(COMMANDS)}."
        )
    options, unknown = parser.parse_known_args(arguments)
    if options.command in ("plan", "rerun"):
        options.rest = unknown  # the training script's parser knows them
    elif unknown:
        flags = [f"--{name}" for name in vars(options) if name != "command"]
        hint = did_you_mean(unknown[0].split("=")[0], flags)
        raise LabError(f"Unknown argument {unknown[0]!r}.{hint} See lrlab {options.command} --help.")
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
            COMMANDS[options.command].run(options)
            sys.stdout.flush()
        except BrokenPipeError:
            # `lrlab list | head`: nobody reads on, which Python must not report again when it ends.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return 0

    return exit_status(run, (LabError, OSError))


if __name__ == "__main__":
    sys.exit(main())
