"""Commands that only show something: `lrlab list`, `lrlab preview` and `lrlab audit`."""

import argparse
import importlib
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.registry import Entry, Parameter, Registry
from ..core.spec import choose
from ..objective.process import DEFAULT_OBJECTIVE, OBJECTIVES, NoiseProcess, make_process
from ..timesteps.noise_levels import PREDICTIONS
from . import say, say_json

# The registry of each word that `lrlab list` takes, and the training option that takes its names.
LISTED = {
    "schedulers": ("schedules.registries", "SCHEDULERS", "--lr_scheduler"),
    "momentum": ("schedules.registries", "MOMENTUM_SCHEDULERS", "--momentum_scheduler"),
    "timesteps": ("timesteps.registries", "TIMESTEP_SAMPLERS", "--timestep_sampler"),
    "weightings": ("timesteps.registries", "LOSS_WEIGHTINGS", "--loss_weighting"),
    "timestep_lrs": ("timesteps.bands", "TIMESTEP_LRS", "--timestep_lr"),
    "objectives": ("objective.process", "OBJECTIVES", "--objective"),
    "noises": ("objective.noise", "NOISES", "--noise"),
    "optimizers": ("optimizers.entries", "OPTIMIZERS", "--optimizer"),
    "ema_forms": ("averaging.forms", "EMA_FORMS", "--ema"),
    "denoisers": ("models.registry", "DENOISERS", "--denoiser"),
    "images": ("data.image_sets", "IMAGE_DATASETS", "--dataset_name"),
    "datasets": ("data.toy2d", "TOY_DATASETS", "--dataset_name"),
}


def list_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = f"{', '.join(LISTED)} (default: all of them)."
    parser.add_argument("kind", nargs="?", metavar="KIND", choices=tuple(LISTED), help=kinds)
    parser.add_argument("--json", action="store_true", help="Print everything that is known, as JSON.")


def list_names(options: argparse.Namespace) -> None:
    """List everything that is chosen by name: schedules, samplers, optimizers and more."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    registries = {}
    for word in [options.kind] if options.kind else LISTED:
        module, name, _ = LISTED[word]
        registries[word] = getattr(importlib.import_module(f"diffusers_lrlab.{module}"), name)
    if options.json:
        say_json({word: _as_json(registry) for word, registry in registries.items()}, indent=2)
    else:
        say("\n\n".join(as_text(registry, LISTED[word][2], width) for word, registry in registries.items()))


def _as_json(registry: Registry) -> list[dict[str, Any]]:
    def parameter(p: Parameter) -> dict[str, Any]:
        return {"name": p.name, "kind": p.kind.__name__, "default": p.default, "allowed": p.allowed, "help": p.help}

    return [
        {
            "name": entry.name,
            "aliases": registry.aliases_of(entry),
            "description": entry.description,
            "source": entry.source,
            "parameters": [parameter(p) for p in entry.parameters],
            "common_parameters": [parameter(p) for p in entry.common],
            "traits": sorted(entry.traits),
            "facts": dict(entry.facts),
        }
        for entry in registry.values()
    ]


def as_text(registry: Registry, flag: str, width: int | None) -> str:
    """A table of names, aliases, descriptions and arguments, wrapped if a width is given."""

    def argument(p: Parameter) -> str:
        return p.name if p.default is None else f"{p.name}={json.dumps(p.default)}"

    def description(entry: Entry) -> str:
        shown = {heading: entry.facts.get(fact) for fact, heading in registry.shown_facts.items()}
        return entry.description + "".join(f"; {heading}: {value}" for heading, value in shown.items() if value is not None)

    rows = [
        (entry.name, ", ".join(registry.aliases_of(entry)), description(entry), ", ".join(map(argument, entry.parameters)))
        for entry in registry.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{registry.noun}s ({flag})"]
    for name, alias, text, arguments in rows:
        start = f"  {name:<{widths[0]}}  " + (f"{alias:<{widths[1]}}  " if widths[1] else "")
        if width is None:
            lines.append(f"{start}{text:<{widths[2]}}  {arguments}".rstrip())
            continue
        room = max(30, width - len(start))
        wrapped = textwrap.wrap(text, room) + textwrap.wrap(f"({arguments})", room) * bool(arguments)
        lines += [(start if index == 0 else " " * len(start)) + part for index, part in enumerate(wrapped)]
    if registry.common:
        takers = "All" if all(entry.common == registry.common for entry in registry.values()) else "All but a few"
        lines.append(f"  {takers} also take: {', '.join(map(argument, registry.common))}")
    return "\n".join(lines)


def number(text: str) -> float:
    """A finite number, a whole one as `int`; argparse turns a `ValueError` into its error."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return int(value) if value.is_integer() else value


_OF_TIMESTEPS = ("timestep_sampler", "loss_weighting", "objective", "num_train_timesteps", "prediction_type")
_RUN = ("num_warmup_steps", "learning_rate", "beta1")  # of schedules, with the defaults of `preview.schedules.Run`


def preview_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("schedules").add_argument
    add("--lr_scheduler", action="append", metavar="NAME", help="Name or spec string; repeat it to compare several.")
    add("--momentum_scheduler", metavar="NAME", help="Name or spec string (default: constant momentum).")
    warmup = "Warm-up in updates, or below 1 as a fraction of the run (default: 0)."
    add("--num_warmup_steps", type=number, metavar="W", help=warmup)
    add("--learning_rate", type=number, metavar="LR", help="Peak learning rate (default: 0.0001).")
    add("--beta1", type=number, metavar="X", help="Momentum of the optimizer (default: 0.95).")
    add = parser.add_argument_group("timesteps, instead of schedules").add_argument
    add("--timestep_sampler", action="append", metavar="NAME", help="Density of timesteps, or all; repeat it for several.")
    add("--loss_weighting", action="append", metavar="NAME", help="Weights of losses, or all; repeat it for several.")
    add("--objective", metavar="NAME", help="Objective, by name or spec string (default: linear betas).")
    timesteps = "Number of timesteps (default: 1000)."
    add("--num_train_timesteps", "--ddpm_num_steps", type=int, metavar="T", help=timesteps)
    prediction = "Prediction type that --loss_weighting applies to (default: epsilon)."
    add("--prediction_type", choices=tuple(PREDICTIONS), help=prediction)
    add = parser.add_argument
    add("--num_training_steps", type=int, metavar="N", help="Optimizer updates of the run.")
    add("--out", metavar="FILE", help="Save a plot as .png, .svg or .pdf.")
    add("--json", action="store_true", help="Print the values at every update, or timestep, as JSON.")


def preview(options: argparse.Namespace) -> None:
    """Show schedules over a run, or densities and weights over timesteps, as a table or a plot."""
    out = plot_path(options.out)
    if options.timestep_sampler or options.loss_weighting:
        _preview_timesteps(options, out)
    else:
        _preview_schedules(options, out)


def _preview_schedules(options: argparse.Namespace, out: Path | None) -> None:
    _refuse(options, _OF_TIMESTEPS, "without --timestep_sampler or --loss_weighting")
    if not options.lr_scheduler:
        raise LabError("Which schedule? Give --lr_scheduler NAME (`lrlab list schedulers` shows them).")
    if options.num_training_steps is None:
        raise LabError("How long is the run? Give --num_training_steps, its optimizer updates, such as 10000.")
    from ..preview import schedules

    given = {name: value for name in _RUN if (value := getattr(options, name)) is not None}
    run = schedules.Run(options.num_training_steps, **given)
    previews = [schedules.preview(spec, run, momentum=options.momentum_scheduler) for spec in options.lr_scheduler]
    if out:
        schedules.plot_previews(previews, out)
    if options.json:
        say_json({"updates": run.num_updates, "schedules": [each.as_json() for each in previews]})
    else:
        _say_with(out, schedules.describe(previews, run))


def _preview_timesteps(options: argparse.Namespace, out: Path | None) -> None:
    _refuse(options, ("lr_scheduler", "momentum_scheduler", *_RUN), "beside --timestep_sampler and --loss_weighting")
    from ..preview.timesteps import as_json as timesteps_as_json
    from ..preview.timesteps import describe_timesteps, plot_timestep_previews, preview_timesteps

    names = options.timestep_sampler or [], options.loss_weighting or []
    num_timesteps = 1000 if options.num_train_timesteps is None else options.num_train_timesteps
    process = None if options.objective is None else _process(options)
    prediction = process.prediction_type if process else options.prediction_type or "epsilon"
    levels = process.levels if process else None
    if process:
        num_timesteps = process.num_train_timesteps
    objective = options.objective or DEFAULT_OBJECTIVE
    previews = preview_timesteps(*names, options.num_training_steps, num_timesteps, prediction, levels)
    if out:
        plot_timestep_previews(previews, objective, out)
    if options.json:
        say(timesteps_as_json(previews))
    else:
        _say_with(out, describe_timesteps(previews, objective))


def _process(options: argparse.Namespace) -> NoiseProcess:
    """The noise process of an objective, without data."""
    for flag, parameter in (("prediction_type", "prediction_type"), ("num_train_timesteps", "num_steps")):
        if (value := getattr(options, flag)) is not None:
            raise LabError(
                f"--{flag} {value}: must be left out beside --objective {options.objective}. Hint: it is {parameter} of "
                "objectives that have the choice, as in --objective NAME:key=value."
            )
    choice = choose(options.objective, None, OBJECTIVES)
    resolved = choice.entry.resolve({"num_steps": 1000, **choice.given})
    if resolved.pop("base_resolution", None) is not None:
        raise LabError(f"--objective {options.objective}: base_resolution must be left out without data. Hint: give shift.")
    return make_process(choice.name, is_bounded=False, **resolved)


def _say_with(out: Path | None, text: str) -> None:
    say(f"{text}\nWrote {out}." if out else text)


def _refuse(options: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Raises a `LabError` for the first of these options that was given and would have no effect."""
    for name in names:
        if getattr(options, name) is not None:
            raise LabError(f"--{name} has no effect {where}. Leave it out.")


def plot_path(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabError(f"--out {text!r} must end in .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise LabError(f"--out {text!r}: the folder {str(path.parent)!r} does not exist. Make it, or choose another.")
    return path


# --- lrlab audit ----------------------------------------------------------------------------------------------------


def audit_arguments(parser: argparse.ArgumentParser) -> None:
    from ..audit.run import add_options

    parser.usage = "lrlab audit [options] -- PROGRAM [its own arguments]"
    add_options(parser)


def audit(options: argparse.Namespace) -> int:
    """Show which learning rate any torch program really uses, without changing it."""
    from ..audit.run import options_of

    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        raise LabError("Which program? Give it after the options: lrlab audit -- python train.py --its_own_option.")
    if command[0].endswith(".py"):
        raise LabError(f"{command[0]!r} is not a program. Hint: lrlab audit -- python {command[0]} ...")
    checked = options_of(options)
    from ..audit.run import run_audited

    return run_audited(command, checked)
