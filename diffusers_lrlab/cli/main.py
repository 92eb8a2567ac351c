"""The `lrlab` command. A subcommand is a row of `COMMANDS`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..core.errors import Interrupted, LabError, did_you_mean
from ..core.listing import as_json, as_markdown, as_text

# Where each kind of thing that has a name is registered, and the option of the training script that takes the name.
KINDS = {
    "schedulers": ("schedules.registries", "SCHEDULERS", "--lr_scheduler"),
    "momentum": ("schedules.registries", "MOMENTUM_SCHEDULERS", "--momentum_scheduler"),
    "timesteps": ("timesteps.registries", "TIMESTEP_SAMPLERS", "--timestep_sampler"),
    "weightings": ("timesteps.registries", "LOSS_WEIGHTINGS", "--loss_weighting"),
    "timestep_lrs": ("timesteps.registries", "TIMESTEP_LRS", "--timestep_lr"),
    "noises": ("objective.noise", "NOISES", "--noise"),
    "optimizers": ("optimizers.entries", "OPTIMIZERS", "--optimizer"),
    "datasets": ("data.toy2d_entries", "TOY_DATASETS", "--dataset_name"),
}


class Command(NamedTuple):
    """A subcommand: what it does in a line, an example, its options, and the function that does it."""

    help: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LabError(f"{message}. See {self.prog} --help.")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _say_json(value: Any, indent: int | None = None) -> None:
    _say(json.dumps(value, indent=indent, allow_nan=False))


# --- list ------------------------------------------------------------------------------------------------------------


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(KINDS)}; all of them if not given")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    form.add_argument("--markdown", action="store_true", help="tables with all arguments, as in the README")


def _list(options: argparse.Namespace) -> None:
    if options.kind is not None and options.kind not in KINDS:
        raise LabError(
            f"There is no kind {options.kind!r} of things to list.{did_you_mean(options.kind, KINDS)} "
            f"Known: {', '.join(KINDS)}."
        )
    registries = {}
    for kind in [options.kind] if options.kind else KINDS:
        module, name, _ = KINDS[kind]
        registries[kind] = getattr(importlib.import_module(f"diffusers_lrlab.{module}"), name)
    if options.json:
        _say_json({kind: as_json(registry) for kind, registry in registries.items()}, indent=2)
    elif options.markdown:
        _say("\n\n".join(map(as_markdown, registries.values())))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        _say("\n\n".join(as_text(registry, KINDS[kind][2], width) for kind, registry in registries.items()))


# --- preview ---------------------------------------------------------------------------------------------------------


def number(text: str) -> float:
    """A whole number as `int`, another one as `float`; argparse makes an error of a `ValueError`."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return int(value) if value.is_integer() else value


PREDICTIONS = ("epsilon", "sample", "v_prediction")
_TIMESTEP_OPTIONS = (
    *("timestep_sampler", "loss_weighting", "ddpm_num_steps", "prediction_type"),
    *("num_training_steps", "out", "json"),
)


def _preview_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lr_scheduler", action="append", metavar="NAME", help="name or spec string; several are drawn over each other")
    add("--lr_scheduler_kwargs", metavar="JSON", help="arguments of the schedule")
    add("--momentum_scheduler", metavar="NAME", help="name or spec string")
    add("--momentum_scheduler_kwargs", metavar="JSON", help="arguments of the momentum schedule")
    add(
        "--timestep_sampler",
        action="append",
        metavar="NAME",
        help="instead of schedules: a density over timesteps, or all",
    )
    add(
        "--loss_weighting",
        action="append",
        metavar="NAME",
        help="instead of schedules: weights of timesteps, or all",
    )
    add("--ddpm_num_steps", type=int, metavar="T", help="timesteps, for these two; 1000 if not given")
    add("--prediction_type", choices=PREDICTIONS, help="what the weighted error is of; epsilon if not given")
    add("--num_training_steps", type=int, metavar="N", help="optimizer updates of the run")
    add("--num_warmup_steps", type=number, default=0, metavar="W", help="of them warm-up, or a fraction of the run below 1")
    add("--learning_rate", type=float, default=1e-4, metavar="LR", help="of the optimizer; default: %(default)s")
    add("--beta1", type=float, default=0.95, help="of the optimizer; default: %(default)s, as in the training script")
    more = "more than 1 shows what diffusers' own train_unconditional.py would make of it, too"
    add("--num_processes", type=int, default=1, metavar="n", help=more)
    add("--gradient_accumulation_steps", type=int, default=1, metavar="g", help=more)
    add("--out", metavar="FILE.png", help="draws a picture (also .svg, .pdf) instead of a plot in the terminal")
    add("--json", action="store_true", help="prints the values at every update as JSON")
    add("--all", action="store_true", help="draws every schedule there is, side by side, into --out")


def _preview(options: argparse.Namespace) -> None:
    out = _picture_path(options.out)
    if options.all:
        _gallery(options, out)
        return
    if options.timestep_sampler or options.loss_weighting:
        _preview_timesteps(options, out)
        return
    for name in ("ddpm_num_steps", "prediction_type"):
        if getattr(options, name) is not None:
            raise LabError(f"--{name} has no effect without --timestep_sampler or --loss_weighting. Leave it out.")
    if not options.lr_scheduler:
        raise LabError("Which schedule? Give --lr_scheduler NAME (`lrlab list schedulers` shows them), or --all.")
    if options.num_training_steps is None:
        raise LabError("How long is the run? Give --num_training_steps, its optimizer updates, such as 10000.")
    if options.lr_scheduler_kwargs and len(options.lr_scheduler) > 1:
        raise LabError(
            f"--lr_scheduler_kwargs {options.lr_scheduler_kwargs!r} is for one --lr_scheduler, and there are "
            f"{len(options.lr_scheduler)}. Use spec strings: --lr_scheduler step:gamma=0.5 --lr_scheduler rex:d=0.9."
        )
    if options.momentum_scheduler_kwargs and not options.momentum_scheduler:
        raise LabError("--momentum_scheduler_kwargs has no effect without --momentum_scheduler. Add that or leave it out.")
    from ..preview.schedules import Run, preview

    run = Run(
        options.num_training_steps,
        options.num_warmup_steps,
        options.learning_rate,
        options.beta1,
        options.num_processes,
        options.gradient_accumulation_steps,
    )
    kwargs, momentum_kwargs = _json(options, "lr_scheduler_kwargs"), _json(options, "momentum_scheduler_kwargs")
    previews = [preview(spec, run, kwargs, options.momentum_scheduler, momentum_kwargs) for spec in options.lr_scheduler]
    if out:
        from ..preview.plots import plot_previews

        plot_previews(previews, run, out)
    if options.json:
        asked_for_host = run.num_processes * run.accumulation > 1
        _say_json({"updates": run.num_updates, "schedules": [shown.as_json(asked_for_host) for shown in previews]})
    else:
        from ..preview.text import describe

        _say(describe(previews, run, None if out else _terminal()))
        _say_written(out)


def _preview_timesteps(options: argparse.Namespace, out: Path | None) -> None:
    _refuse_others(options, _TIMESTEP_OPTIONS, "beside --timestep_sampler and --loss_weighting")
    from ..preview.timesteps import as_json, describe_timesteps, plot_timestep_previews, preview_timesteps

    previews = preview_timesteps(
        options.timestep_sampler or [],
        options.loss_weighting or [],
        options.num_training_steps,
        1000 if options.ddpm_num_steps is None else options.ddpm_num_steps,
        options.prediction_type or "epsilon",
    )
    if out:
        plot_timestep_previews(previews, out)
    if options.json:
        _say(as_json(previews))
    else:
        _say(describe_timesteps(previews))
        _say_written(out)


def _refuse_others(options: argparse.Namespace, allowed: tuple[str, ...], where: str) -> None:
    """An error for the first option of the preview that is given and would have no effect."""
    plain = vars(_parser().parse_args(["preview"]))
    for name, value in vars(options).items():
        if name not in allowed and value != plain[name]:
            raise LabError(f"--{name} has no effect {where}. Leave it out.")


def _terminal() -> dict[str, Any]:
    """What can be drawn on."""
    from ..core.terminal_plot import can_encode

    return {
        "width": min(100, shutil.get_terminal_size().columns),
        "unicode": can_encode(sys.stdout.encoding),
        "color": sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    }


def _say_written(out: Path | None) -> None:
    if out is not None:
        _say(f"Wrote {out}.")


def _json(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    from ..core.spec import parse_json_kwargs

    text = getattr(options, name)
    return None if text is None else parse_json_kwargs(text, f"--{name}")


def _picture_path(text: str | None) -> Path | None:
    """Where to draw, checked before the work is done."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabError(f"--out {text!r} is no picture's name; end it in .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise LabError(f"--out {text!r}: the folder {str(path.parent)!r} does not exist. Make it first, or choose another.")
    return path


def _gallery(options: argparse.Namespace, out: Path | None) -> None:
    if out is None:
        raise LabError("--all draws a picture and needs to know where: add --out FILE.png.")
    _refuse_others(options, ("all", "out"), "beside --all, which shows every schedule as it is")
    from ..preview.plots import plot_gallery

    plot_gallery(out)
    _say_written(out)


# --- upstream-patch --------------------------------------------------------------------------------------------------


def _upstream_patch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the schedule")
    parser.add_argument("--diffusers", required=True, type=Path, metavar="CHECKOUT", help="a clone of diffusers")
    parser.add_argument("--out", type=Path, metavar="FILE.patch", help="a file for the patch; the clone stays as it is")
    parser.add_argument(
        "--branch", metavar="NAME", help="the branch to commit to otherwise; derived from the schedule's name"
    )


def _upstream_patch(options: argparse.Namespace) -> None:
    from ..upstream.patch import upstream_patch

    made = upstream_patch(options.name, options.diffusers, out=options.out, branch=options.branch)
    _say(f"Wrote {made}." if options.out else f"Committed to the new branch {made} of {options.diffusers}.")


# --- data ------------------------------------------------------------------------------------------------------------


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("export",), help="export: writes a toy set as a data set that loads anywhere")
    parser.add_argument("name", metavar="NAME", help="the toy set; `lrlab list datasets` shows them")
    parser.add_argument("dir", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--n", type=int, default=100_000, metavar="N", help="points to train on; default: %(default)s")
    parser.add_argument("--n_test", type=int, default=10_000, metavar="N", help="other points to test on, 0 for none")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="of the generator; default: %(default)s")


def _data(options: argparse.Namespace) -> None:
    from ..hub.dataset_folder import export_toy_dataset

    export_toy_dataset(options.name, options.dir, options.n, options.n_test, options.seed)
    _say(f"Wrote {options.dir}: load_dataset({str(options.dir)!r}), or --dataset_name {options.dir} to train on it.")


# --- plan ------------------------------------------------------------------------------------------------------------


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of training_scripts/train_ddpm.py", "All of them; its --help explains them.")


def _plan(options: argparse.Namespace) -> None:
    from ..training.arguments import parse_arguments

    config = parse_arguments([*options.rest, "--dry_run"], "The plan of a training run.")
    from ..run.train import train

    train(config)


# --- scale -----------------------------------------------------------------------------------------------------------


def _scale_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--learning_rate", type=float, required=True, metavar="LR", help="the rate that is known to be good")
    add("--base_batch_size", type=int, default=64, metavar="B", help="images of an update there; default: %(default)s")
    add("--train_batch_size", type=int, metavar="B", help="images per process and micro-batch of the run to come")
    add("--gradient_accumulation_steps", type=int, default=1, metavar="g", help="its micro-batches")
    add("--num_processes", type=int, default=1, metavar="n", help="its processes")


def _scale(options: argparse.Namespace) -> None:
    from ..optimizers.scaling import scaling_table

    sizes = (
        1 if options.train_batch_size is None else options.train_batch_size,
        options.gradient_accumulation_steps,
        options.num_processes,
    )
    for size in (*sizes, options.base_batch_size):
        if size < 1:
            raise LabError(f"A batch cannot have {size} parts or images. Give whole numbers, 1 or more.")
    if options.train_batch_size is None and sizes != (1, 1, 1):
        raise LabError(
            "--gradient_accumulation_steps and --num_processes have no effect without --train_batch_size. Add it."
        )
    _say(
        scaling_table(options.learning_rate, options.base_batch_size, math.prod(sizes) if options.train_batch_size else None)
    )


# --- study -----------------------------------------------------------------------------------------------------------


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    from .study import add_arguments

    add_arguments(parser)


def _study(options: argparse.Namespace) -> None:
    from .study import command

    command(options)


# --- the Hub ---------------------------------------------------------------------------------------------------------


def _hub(name: str) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]:
    """The two functions of a subcommand that lives in `cli/hub.py`, which is imported when they are called."""

    def call(function: str, argument: Any) -> None:
        getattr(importlib.import_module("diffusers_lrlab.cli.hub"), function)(argument)

    return functools.partial(call, f"{name}_arguments"), functools.partial(call, name)


# --- all of them -----------------------------------------------------------------------------------------------------

COMMANDS = {
    "list": Command("shows what can be chosen by name", "lrlab list schedulers", _list_arguments, _list),
    "preview": Command(
        "draws schedules over a run, or densities and weights over timesteps",
        "lrlab preview --lr_scheduler cosine --lr_scheduler rex:d=0.9 --num_training_steps 10000 --num_warmup_steps 500",
        _preview_arguments,
        _preview,
    ),
    "data": Command(
        "writes toy sets as data sets",
        "lrlab data export dino dino-points --n 100000 --seed 42",
        _data_arguments,
        _data,
    ),
    "plan": Command(
        "shows what a training run is going to do and to take",
        "lrlab plan --dataset_name dino --optimizer sgd",
        _plan_arguments,
        _plan,
    ),
    "scale": Command(
        "shows learning rates for other batch sizes",
        "lrlab scale --learning_rate 1e-4 --base_batch_size 64 --train_batch_size 128 --num_processes 8",
        _scale_arguments,
        _scale,
    ),
    "study": Command(
        "compares schedules, optimizers and whatever else a run is made of, over data sets and seeds",
        "lrlab study run quick --out first-study",
        _study_arguments,
        _study,
    ),
    "schedule": Command(
        "writes a schedule as a folder to publish",
        "lrlab schedule my-schedule --lr_scheduler wsd:decay_type=1-sqrt,num_decay_steps=0.3",
        *_hub("schedule"),
    ),
    "push": Command(
        "uploads a run, a study, a set of points or a schedule to the Hub",
        "lrlab push ddpm-digits-8 --repo_id USER/ddpm-digits-8",
        *_hub("push"),
    ),
    "pull": Command(
        "downloads what somebody published",
        "lrlab pull USER/ddpm-digits-8",
        *_hub("pull"),
    ),
    "rerun": Command(
        "does a run again from its record, and says whether the two agree",
        "lrlab rerun USER/ddpm-digits-8 --compare",
        *_hub("rerun"),
    ),
    "upstream-patch": Command(
        "makes a patch for diffusers of a schedule",
        "lrlab upstream-patch rex --diffusers ~/diffusers --out rex.patch",
        _upstream_patch_arguments,
        _upstream_patch,
    ),
}


def _parser() -> _Parser:
    parser = _Parser(prog="lrlab", description="Training dynamics of diffusion models.", allow_abbrev=False)
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
    """Runs a subcommand; errors that the user can mend become one message and the exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets another one, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # `lrlab list | head`: nobody reads on, and Python must not find that out once more when it ends.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Interrupted as interruption:
        sys.stderr.write(f"{interruption}\n")
        return 128 + interruption.signal_number
    except (LabError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
