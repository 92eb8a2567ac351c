"""`lrlab preview`: schedules over a run, or densities and weights over timesteps."""

import argparse
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.spec import merge_spec, parse_json_kwargs
from ..core.terminal_plot import can_encode
from ..objective.process import OBJECTIVES, NoiseProcess, make_process
from ..timesteps.noise_levels import PREDICTIONS
from .output import say, say_json


def number(text: str) -> float:
    """A whole number as `int`, another one as `float`; argparse turns a `ValueError` into its error."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return int(value) if value.is_integer() else value


_TIMESTEP_OPTIONS = (
    *("timestep_sampler", "loss_weighting", "objective", "num_train_timesteps", "prediction_type"),
    *("num_training_steps", "out", "json"),
)


def preview_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lr_scheduler", action="append", metavar="NAME", help="name or spec string; several are drawn over each other")
    add("--lr_scheduler_kwargs", metavar="JSON", help="arguments of the schedule")
    add("--momentum_scheduler", metavar="NAME", help="name or spec string")
    add("--momentum_scheduler_kwargs", metavar="JSON", help="arguments of the momentum schedule")
    add("--timestep_sampler", action="append", metavar="NAME", help="instead of schedules: a density over timesteps, or all")
    add("--loss_weighting", action="append", metavar="NAME", help="instead of schedules: weights of timesteps, or all")
    add("--objective", metavar="NAME", help="name or spec string, for these two; linear betas if not given")
    timesteps = "timesteps, for these two; 1000 if not given"
    add("--num_train_timesteps", "--ddpm_num_steps", type=int, metavar="T", help=timesteps)
    add("--prediction_type", choices=tuple(PREDICTIONS), help="what the weighted error is of; epsilon if not given")
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


def preview(options: argparse.Namespace) -> None:
    out = _picture_path(options.out)
    if options.all:
        _gallery(options, out)
        return
    if options.timestep_sampler or options.loss_weighting:
        _preview_timesteps(options, out)
        return
    for name in ("objective", "num_train_timesteps", "prediction_type"):
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
    from ..preview import schedules

    for name in ("learning_rate", "beta1"):
        if math.isnan(value := getattr(options, name)):
            raise LabError(f"--{name} {value} is not allowed; give a number.")
    host = options.num_processes, options.gradient_accumulation_steps
    run = schedules.Run(options.num_training_steps, options.num_warmup_steps, options.learning_rate, options.beta1, *host)
    kwargs, momentum_kwargs = _json(options, "lr_scheduler_kwargs"), _json(options, "momentum_scheduler_kwargs")
    momentum = options.momentum_scheduler
    previews = [schedules.preview(spec, run, kwargs, momentum, momentum_kwargs) for spec in options.lr_scheduler]
    if out:
        from ..preview.plots import plot_previews

        plot_previews(previews, run, out)
    if options.json:
        asked_for_host = run.num_processes * run.accumulation > 1
        say_json({"updates": run.num_updates, "schedules": [shown.as_json(asked_for_host) for shown in previews]})
    else:
        say(schedules.describe(previews, run, None if out else _terminal()))
        if out:
            say(f"Wrote {out}.")


def _preview_timesteps(options: argparse.Namespace, out: Path | None) -> None:
    _refuse_others(options, _TIMESTEP_OPTIONS, "beside --timestep_sampler and --loss_weighting")
    from ..preview.timesteps import as_json, describe_timesteps, plot_timestep_previews, preview_timesteps

    names = options.timestep_sampler or [], options.loss_weighting or []
    num_timesteps = 1000 if options.num_train_timesteps is None else options.num_train_timesteps
    process = None if options.objective is None else _process(options)
    prediction = process.prediction_type if process else options.prediction_type or "epsilon"
    levels = process.levels if process else None
    if process:
        num_timesteps = process.num_train_timesteps
    previews = preview_timesteps(*names, options.num_training_steps, num_timesteps, prediction, levels)
    if out:
        plot_timestep_previews(previews, out)
    if options.json:
        say(as_json(previews))
    else:
        say(describe_timesteps(previews))
        if out:
            say(f"Wrote {out}.")


def _process(options: argparse.Namespace) -> NoiseProcess:
    """The noise process of an objective, without data."""
    for flag, parameter in (("prediction_type", "prediction_type"), ("num_train_timesteps", "num_steps")):
        if (value := getattr(options, flag)) is not None:
            raise LabError(
                f"--{flag} {value}: must be left out beside --objective {options.objective}. Hint: it is {parameter} of "
                "objectives that have the choice, as in --objective NAME:key=value."
            )
    name, given = merge_spec(options.objective, None, OBJECTIVES)
    resolved = OBJECTIVES[name].resolve({"num_steps": 1000, **given})
    if resolved.pop("base_resolution", None) is not None:
        raise LabError(f"--objective {options.objective}: base_resolution must be left out without data. Hint: give shift.")
    return make_process(name, is_bounded=False, **resolved)


def _refuse_others(options: argparse.Namespace, allowed: tuple[str, ...], where: str) -> None:
    """An error for the first given option that would have no effect."""
    parser = argparse.ArgumentParser()
    preview_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in allowed and getattr(options, name) != default:
            raise LabError(f"--{name} has no effect {where}. Leave it out.")


def _terminal() -> dict[str, Any]:
    width, color = min(100, shutil.get_terminal_size().columns), sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return {"width": width, "unicode": can_encode(sys.stdout.encoding), "color": color}


def _json(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    text = getattr(options, name)
    return None if text is None else parse_json_kwargs(text, f"--{name}")


def _picture_path(text: str | None) -> Path | None:
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
    say(f"Wrote {out}.")
