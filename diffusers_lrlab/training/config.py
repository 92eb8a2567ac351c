"""The configuration of a run, as given and as resolved: the fields of command line, YAML files and `run.json`."""

import dataclasses
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..averaging.forms import EMAForm
from ..core.errors import must_be
from ..core.options import check_types, defaults_of
from ..data.options import BatchLayout, DataConfig
from ..optimizers.timescales import scaled_learning_rate
from ..schedules.schedule import Schedule
from ..timesteps.bands import TimestepLR
from .learning_options import EMA_OPTIONS, ModelConfig, OptimizerConfig, ScheduleConfig, TimestepConfig
from .run_options import LoopConfig, OutputConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(DataConfig, ModelConfig, ScheduleConfig, TimestepConfig, OptimizerConfig, LoopConfig, OutputConfig):
    """
    The options of a run. `None` stands for a default that depends on other options or the data.

    Every field is a flag of `lrlab train`, whose `--help` describes it.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        check_types(self)
        if isinstance(self.learning_rate, str) and self.learning_rate != "auto":
            hint = "auto finds one before the run"
            raise must_be("learning_rate", self.learning_rate, "a number or 'auto'", hint, of="TrainingConfig()")

    def to_dict(self) -> dict[str, Any]:
        """The options as data, without the token."""
        options = dataclasses.asdict(self)
        return {name: options[name] for name in defaults_of(TrainingConfig) if name != "hub_token"}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainingConfig):
    """
    A configuration with all defaults that do not depend on the data, and with names separate from their parameters.

    Made by [`resolve_config`]; [`Plan`] adds what depends on the data.
    """

    learning_rate: float
    finds_learning_rate: bool = False  # --learning_rate auto; until the rate is found, the default one is planned with
    num_validation_images: int
    objective_kwargs: dict[str, Any]
    num_inference_steps: int
    denoiser_kwargs: dict[str, Any] | None
    lr_scheduler_kwargs: dict[str, Any]
    lr_warmup_steps: float
    momentum_scheduler_kwargs: dict[str, Any]
    timestep_sampler_kwargs: dict[str, Any]
    loss_weighting_kwargs: dict[str, Any]
    timestep_lr_kwargs: dict[str, Any]
    noise_kwargs: dict[str, Any]
    log_timestep_bins: int
    optimizer_kwargs: dict[str, Any]
    train_batch_size: int
    output_dir: str
    eval_batch_size: int

    def __post_init__(self) -> None:
        """Nothing: `resolve_config` has checked the options, and a copy by `dataclasses.replace` changes resolved ones."""

    @property
    def num_train_timesteps(self) -> int:
        return self.objective_kwargs["num_steps"]

    @cached_property
    def schedule(self) -> Schedule:
        """Learning rate and momentum as functions of the clock."""
        return Schedule(self.lr_scheduler, self.lr_scheduler_kwargs, self.momentum_scheduler, self.momentum_scheduler_kwargs)

    def rates_for(self, global_batch: int) -> tuple[Schedule, float]:
        """The schedule, with the number of images per update if it counts images; and its peak, scaled to that number."""
        schedule = self.schedule
        if "images_per_update" in schedule.kwargs and schedule.kwargs["images_per_update"] is None:
            schedule = dataclasses.replace(schedule, kwargs={**schedule.kwargs, "images_per_update": global_batch})
        return schedule, scaled_learning_rate(self.learning_rate, self.scale_lr, global_batch)

    @cached_property
    def timestep_lr_form(self) -> TimestepLR | None:
        """The learning rate per timestep, if any."""
        return None if self.timestep_lr is None else TimestepLR(self.timestep_lr, **self.timestep_lr_kwargs)

    @property
    def given_model(self) -> str | None:
        """Where the configuration of the model comes from, with or without weights; `None` if it is made for the data."""
        return self.pretrained_model_name_or_path or self.model_config_name_or_path

    def layout(self, num_processes: int = 1, rank: int = 0) -> BatchLayout:
        return BatchLayout(self.train_batch_size, self.gradient_accumulation_steps, num_processes, rank)

    @cached_property
    def ema_form(self) -> EMAForm:
        """The average of the weights, by --ema or by the options of diffusers' script."""
        if self.ema is not None:
            return EMAForm.of(self.ema)
        return EMAForm.of("warmup_power", **{name: getattr(self, f"ema_{name}") for name in EMA_OPTIONS})

    @property
    def posthoc(self) -> EMAForm | None:
        """The form of the averages of which snapshots are taken, if any."""
        return self.ema_form if self.use_ema and self.ema_form.name == "posthoc" else None

    @property
    def start_momentum(self) -> float | None:
        """The initial momentum of the optimizer, if it has one."""
        return self.optimizer_kwargs.get("momentum", self.optimizer_kwargs.get("beta1"))


def complete_options(recorded: dict[str, Any]) -> dict[str, Any]:
    """The options of a record or a checkpoint; options that were added since then have their defaults."""
    return {**defaults_of(TrainingConfig), **recorded}


CONFIG_GROUPS: tuple[Any, ...] = TrainingConfig.__bases__


def as_call(config: TrainingConfig, function: str = "train", settings: Any = None) -> str:
    """The Python call with the same options, without the token; `settings` are its second argument."""
    given: list[tuple[Any, dict[str, Any]]] = [(TrainingConfig, config.to_dict())]
    given += [] if settings is None else [(type(settings), vars(settings))]
    arguments = []
    for known, options in given:
        changed = {name: value for name, value in options.items() if value != defaults_of(known)[name]}
        changed.pop("local_rank", None)
        arguments.append(f"{known.__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})")
    return f"{function}({', '.join(arguments)})"
