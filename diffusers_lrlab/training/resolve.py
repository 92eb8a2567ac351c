"""Completes and checks a configuration, once: from a [`TrainingConfig`] to a [`ResolvedConfig`], without data or model.

Choices by name are resolved here, from spec strings, `--..._kwargs` and flags of diffusers' script.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..averaging.forms import EMAForm
from ..core.errors import LabError, must_be
from ..core.errors import given as as_given
from ..core.options import check_ranges, defaults_of, options_of
from ..core.plugins import load_plugins
from ..core.progress import Progress
from ..core.spec import Choice, choose, format_spec, parse_json_kwargs
from ..data.latents import latents_folder
from ..data.sources import has_points
from ..objective.process import NoiseProcess, make_process
from ..optimizers.build import check_installed
from ..schedules.expected import resolve_length
from ..schedules.momentum import momentum_groups, read_momentum
from ..schedules.schedule import with_floor
from .combinations import check_combinations, check_source
from .config import ResolvedConfig, TrainingConfig, complete_options
from .kinds import kind_of
from .learning_options import OBJECTIVE_OPTIONS

if TYPE_CHECKING:
    from ..objective.objective import ObjectiveSpec

# Options of timesteps, loss and noise, resolved by their registries alone.
LEARNED_FROM = ("timestep_sampler", "loss_weighting", "timestep_lr", "noise")
# Parameters of Adam-like optimizers, and the flags of diffusers' script that set them.
ADAM_OPTIONS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "weight_decay": "adam_weight_decay", "eps": "adam_epsilon"}


def resolve_config(config: TrainingConfig) -> ResolvedConfig:
    """
    Fills in defaults, and checks everything that can be checked without data or model. Reads the columns of a data set whose
    kind is not known otherwise, which may need the network.
    """
    load_plugins(config.plugins)
    check_ranges(config, TrainingConfig)  # before anything asks the network
    check_source(config)
    draft: Any = SimpleNamespace(**{name: getattr(config, name) for name in defaults_of(TrainingConfig)})
    for step in (_name_data, _resolve_optimizer, _resolve_objective, _resolve_lr_schedule, _resolve_names, _resolve_rest):
        vars(draft).update(step(draft))
    for name, hint in ResolvedConfig.__annotations__.items():
        if getattr(draft, name) is None and "None" not in str(hint):
            raise LabError(f"--{name} is missing, and its kind of data has no default for it. Give it.")
    resolved = ResolvedConfig(**vars(draft))
    check_combinations(resolved)
    return resolved


# --- steps: the options, completed so far, to what is found next -----------------------------------------------------


def _name_data(config: TrainingConfig) -> dict[str, Any]:
    """The data set and its kind, as given or found from the data; no kind for images."""
    kind = config.data_kind
    if latents_folder(config) is not None:
        if kind in ("images", "points"):
            raise must_be("--data_kind", kind, "latents, or left out", "the data are a folder of latents")
        kind = kind or "latents"
    elif kind is None and has_points(config):
        kind = "points"
    finds = config.learning_rate == "auto"
    return {
        "data_kind": None if kind == "images" else kind,
        **({"dataset_name": "digits"} if config.dataset_name is config.train_data_dir is None else {}),
        "finds_learning_rate": finds,
        "learning_rate": None if finds else config.learning_rate,
    }


def _resolve_optimizer(config: TrainingConfig) -> dict[str, Any]:
    """Name and parameters, with the defaults of the kind of data; Adam-like optimizers take flags of diffusers' script."""
    choice = _choice(config, "optimizer")
    kwargs = _with_flags(config, "optimizer", choice, ADAM_OPTIONS, takes="adam" in choice.entry.traits)
    check_installed(choice.entry)
    replaced = {key for key in ADAM_OPTIONS for other in choice.entry.replacing(key) if kwargs.get(other) is not None}
    taken = {key: flag for key, flag in ADAM_OPTIONS.items() if "adam" in choice.entry.traits and key not in replaced}
    kwargs = {key: getattr(config, flag) for key, flag in taken.items()} | kwargs
    defaults, facts = {**kind_of(config).defaults(config)}, choice.entry.facts  # a copy: the defaults are shared
    defaults["learning_rate"] = facts.get("learning_rate", defaults["learning_rate"] * facts.get("learning_rate_factor", 1))
    if config.num_epochs is not None or config.max_train_steps is not None:
        defaults = {name: value for name, value in defaults.items() if name not in ("num_epochs", "max_train_steps")}
    return {
        **{name: value for name, value in defaults.items() if getattr(config, name) is None},
        **{flag: float(kwargs[key]) for key, flag in taken.items()},
        "optimizer": choice.name,
        "optimizer_kwargs": choice.entry.resolve(kwargs),
    }


def _resolve_objective(config: TrainingConfig) -> dict[str, Any]:
    """The objective's name and parameters, some of which have their own options."""
    choice = _choice(config, "objective")
    kwargs = choice.given
    filled: dict[str, None] = {}
    for objective, flags in OBJECTIVE_OPTIONS.items():
        filled |= dict.fromkeys(flags.values())
        kwargs |= _with_flags(config, "objective", choice, flags, takes=objective == choice.name)
    return {**filled, "objective": choice.name, "objective_kwargs": resolved_parameters(config, choice.entry, kwargs)}


def resolved_parameters(config: TrainingConfig, objective: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All parameters of an objective, by its entry, with defaults of the kind of data."""
    resolved = objective.resolve(kwargs)
    if resolved["num_steps"] is None:
        resolved["num_steps"] = kind_of(config).num_train_timesteps
    base_resolution = resolved.pop("base_resolution", None)
    if base_resolution is not None:
        # The root of the ratio of pixels (arXiv 2403.03206, section 5.3.2): one number, with which the pipeline samples too.
        if config.resolution is None or kwargs.get("shift") is not None:
            without = (
                "data without a resolution, such as points" if config.resolution is None else f"shift={kwargs['shift']:g}"
            )
            raise LabError(
                f"base_resolution={base_resolution} of --objective {config.objective}: must be left out beside {without}. "
                "Hint: it sets shift to --resolution / base_resolution."
            )
        resolved["shift"] = config.resolution / base_resolution
    return resolved


def _resolve_lr_schedule(config: TrainingConfig) -> dict[str, Any]:
    """The schedule with all its parameters and its warm-up, in updates or as a fraction of the run."""
    choice, warmup = _choice(config, "lr_scheduler"), config.lr_warmup_steps
    if "no_warmup" in choice.entry.traits:
        warmup = warmup or 0
    elif warmup is None:
        warmup = 0 if "rises" in choice.entry.traits else 0.05
    kwargs = with_floor(choice.entry, choice.kwargs)
    return {"lr_scheduler": choice.name, "lr_scheduler_kwargs": kwargs, "lr_warmup_steps": warmup}


def _resolve_names(config: TrainingConfig) -> dict[str, Any]:
    """Momentum, timesteps, loss, noise, denoiser and EMA."""
    resolved: dict[str, Any] = {}
    for option in ("momentum_scheduler", *LEARNED_FROM, "denoiser"):
        if getattr(config, option) is None:
            if kwargs := given_kwargs(config, option):
                asked = as_given(f"--{option}_kwargs", kwargs)
                raise LabError(f"{asked} has no effect without --{option}. Hint: add that, or leave it out.")
            resolved |= {} if option == "denoiser" else {f"{option}_kwargs": {}}
            continue
        choice = _choice(config, option)
        resolved |= {option: choice.name, f"{option}_kwargs": choice.kwargs}
        if option == "denoiser" and config.pretrained_model_name_or_path is not None:  # the weights have its parameters
            if choice.given:
                wanted = "given without parameters beside --pretrained_model_name_or_path"
                hint = "the weights determine them"
                raise must_be("--denoiser", config.denoiser, wanted, hint, got=", ".join(choice.given))
            resolved |= {"denoiser": config.denoiser, "denoiser_kwargs": {}}
    return resolved if config.ema is None else {**resolved, "ema": str(EMAForm.of(config.ema))}


def _resolve_rest(config: TrainingConfig) -> dict[str, Any]:
    """Sampling steps, bins and the folder."""
    resolved: dict[str, Any] = {}
    steps = given_kwargs(config, "objective")["num_steps"]
    for name, most in (("num_inference_steps", 100), ("log_timestep_bins", 10)):
        if getattr(config, name) is None:
            resolved[name] = min(most, steps)
    if config.output_dir is None:
        resumed = Path(config.resume_from_checkpoint or "latest")
        dataset = Path(config.dataset_name or config.train_data_dir or "").resolve().name
        resolution = "" if config.resolution is None else f"-{config.resolution}"
        of_checkpoint = (resumed / "trainer.json").is_file()
        own = f"{config.objective}-{dataset}{resolution}"
        resolved["output_dir"] = str(resumed.parent) if of_checkpoint else own
    return resolved


# --- choices by name -------------------------------------------------------------------------------------------------


def given_kwargs(config: TrainingConfig, option: str) -> dict[str, Any]:
    """The `--..._kwargs` of an option, as a dictionary."""
    kwargs = getattr(config, f"{option}_kwargs")
    return parse_json_kwargs(kwargs, f"--{option}_kwargs") if isinstance(kwargs, str) else kwargs or {}


def _choice(config: TrainingConfig, option: str) -> Choice:
    return choose(getattr(config, option), given_kwargs(config, option), options_of(TrainingConfig)[option].entries)


def _with_flags(
    config: TrainingConfig, option: str, choice: Choice, flags: Mapping[str, str], takes: bool
) -> dict[str, Any]:
    """
    The parameters of a choice with those that were given by flags of their own; a `LabError` for one with two values, or
    for a flag that has no effect, since the name does not take it or a parameter replaces it.
    """
    kwargs, defaults = dict(choice.given), defaults_of(TrainingConfig)
    for parameter, flag in flags.items():
        value = getattr(config, flag)
        if value == defaults[flag]:
            continue
        asked = as_given(f"--{flag}", value)
        replacing = [f" with {other}" for other in choice.entry.replacing(parameter) if kwargs.get(other) is not None]
        if replacing or not takes:
            own = "" if takes else ", ".join(each.name for each in choice.entry.parameters)
            remedy = f", or give parameters as --{option} {choice.name}:key=value; it takes {own}" if own else ""
            name = choice.name + "".join(replacing[:1])
            raise LabError(f"{asked} has no effect on --{option} {name}. Hint: leave it out{remedy}.")
        if kwargs.setdefault(parameter, value) != value:
            raise LabError(
                f"{parameter!r} of --{option} {choice.name} is given twice: as {asked} and as "
                f"{parameter}={kwargs[parameter]!r}. Hint: leave one of them out."
            )
    return kwargs


def describe_choices(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """The options of timesteps, loss and noise with their spec strings, without parameters at their defaults."""
    described, fields = [], complete_options(fields)
    for option in LEARNED_FROM:
        if (name := fields[option]) is not None:
            defaults = options_of(TrainingConfig)[option].entries[name].resolve({})
            changed = {key: value for key, value in (fields[f"{option}_kwargs"] or {}).items() if value != defaults[key]}
            described.append((option, format_spec(name, changed)))
    return described


def objective_spec(config: ResolvedConfig) -> ObjectiveSpec:
    """The objective of a run by its configuration."""
    from ..objective.objective import ObjectiveSpec  # heavy

    own: dict[str, Any] = {"timestep_lr": config.timestep_lr_form, "is_bounded": kind_of(config).is_bounded}
    names = (each.name for each in dataclasses.fields(ObjectiveSpec) if each.name not in own)
    return ObjectiveSpec(**{name: getattr(config, name) for name in names}, **own)


def recorded_process(fields: dict[str, Any]) -> NoiseProcess:
    """The noise process of a run by the configuration in its record."""
    return make_process(fields["objective"], is_bounded=kind_of(fields).is_bounded, **fields["objective_kwargs"])


# --- what is tried once, for errors of its own code --------------------------------------------------------------------


def check_timesteps(config: ResolvedConfig) -> None:
    """Builds sampler and weighting once."""
    spec = objective_spec(config)
    process = spec.make_process()
    spec.make_sampler(process, config.max_train_steps or 1000)
    spec.make_weighting(process)


def check_schedule(config: ResolvedConfig) -> None:
    """Makes the optimizer once, and the first rate and momentum; the real length may be unknown."""
    from ..optimizers.build import tried_optimizer
    from ..schedules.scheduler import build

    # WORLD_SIZE is the number of processes of the launcher.
    batch = config.train_batch_size * config.gradient_accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
    schedule, peak = config.rates_for(batch)
    optimizer = tried_optimizer(config.optimizer, config.optimizer_kwargs, [(2, 2), (2,)], peak, batch)
    length = config.max_train_steps or max(1000, 2 * int(config.lr_warmup_steps) + 2)
    warmup, length = resolve_length(schedule, config.lr_warmup_steps, length)
    if schedule.momentum_schedule is not None:
        momentum_groups(optimizer, *schedule.momentum_schedule)
    if schedule.follows_metric:
        followed, schedule = schedule.parts
        build(followed, optimizer, warmup, length)
    lr, _ = schedule.at(Progress(0, length, warmup), peak, read_momentum(optimizer.param_groups[0]))
    if not lr >= 0:
        entry = schedule.entries[0]
        raise LabError(f"{entry.title} gives a learning rate of {lr:g} at update 0; use 0 or more.{entry.where}")
