"""The plan of a run, made before it starts."""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..averaging.forms import EMAForm
from ..averaging.posthoc import snapshot_updates
from ..core.errors import LabError, must_be
from ..core.progress import resolve_warmup_updates
from ..core.words import counted
from ..data.batch import Conditions
from ..data.batches import num_workers
from ..data.labels import Classes
from ..data.layout import BatchLayout
from ..data.loading import TrainingData
from ..models.loading import StartWeights
from ..models.width import Width
from ..objective.process import NoiseProcess
from ..optimizers.entries import OPTIMIZERS
from ..optimizers.timescales import DecayTimescale, per_update
from ..schedules.expected import schedule_curves
from ..schedules.registries import SCHEDULERS
from ..schedules.resolve import describe_schedule
from ..schedules.schedule import Schedule
from ..timesteps.infonoise import Beginning
from .combinations import check_floor
from .config import ResolvedConfig
from .kinds import kind_of
from .kinds.base import DataKind
from .model import build_model, classes_of, model_arguments, model_class_of
from .resolve import objective_spec
from .width import planned_width

# Most previews and validations, and their share of the training time; cost of a pass without gradients.
_MOST_PREVIEWS, _PREVIEW_SHARE = 4, 0.05
_MOST_VALIDATIONS, _VALIDATION_SHARE = 20, 0.1
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Plan:
    """Everything that is decided about a run before it starts."""

    config: ResolvedConfig
    model_config: dict[str, Any]
    kind: DataKind
    data_shape: str  # of an image or point, in words
    item_shape: tuple[int, ...]
    layout: BatchLayout
    num_images: int | None  # to train on; None for a stream
    num_held_out: int
    num_updates: int
    schedule: Schedule
    lrs: np.ndarray  # of each update, float64
    momenta: np.ndarray  # likewise; NaN for an optimizer without momentum
    lr_factors: np.ndarray | None  # on the learning rate of each update, by its band of timesteps
    data_warnings: tuple[str, ...]
    num_workers: int  # that read and decode images
    autoencoder: dict[str, Any] | None = None  # that encoded the data
    conditions: Conditions = field(default_factory=dict)  # of the model, for no images: `(0, ...)` each
    classes: Classes | None = None  # of labelled data
    start: StartWeights | None = None  # the weights that the model starts from
    width: Width | None = None  # with --width_base

    @property
    def learning_rate(self) -> float:
        """The peak, for this batch."""
        return self.config.peak_learning_rate(self.layout.global_batch)

    @cached_property
    def optimizer_kwargs(self) -> dict[str, Any]:
        """The parameters of the optimizer, with those in images turned into those of its updates."""
        entry, given = OPTIMIZERS[self.config.optimizer], self.config.optimizer_kwargs
        return per_update(entry, given, self.learning_rate, self.layout.global_batch)

    @property
    def decay_timescale(self) -> DecayTimescale | None:
        """The effect of weight decay; `None` if there is none, or if it is not decoupled from the gradient."""
        decay = self.optimizer_kwargs.get("weight_decay")
        if not decay or "decoupled" not in OPTIMIZERS[self.config.optimizer].traits:
            return None
        return DecayTimescale.of(self.learning_rate, decay, self.lrs)

    @property
    def ema_forms(self) -> list[EMAForm]:
        """The averages that are run, one of each width for post-hoc averages; the first one is that of the run."""
        return [form.with_images(self.layout.global_batch) for form in self.config.ema_forms]

    @property
    def ema_form(self) -> EMAForm:
        """The decay of the EMA that is validated, sampled and saved as the pipeline."""
        return self.ema_forms[0]

    @property
    def warmup_updates(self) -> int:
        return resolve_warmup_updates(self.config.lr_warmup_steps, self.num_updates)

    @property
    def schedule_spec(self) -> str:
        """The schedule as a spec string, with parameters that are not at their defaults."""
        return describe_schedule(self.schedule)

    @property
    def follows_metric(self) -> bool:
        """Whether the learning rate also depends on the validation loss, so that `lrs` is only an upper bound."""
        return "feedback" in SCHEDULERS[self.config.lr_scheduler].traits

    @property
    def num_epochs(self) -> float | None:
        """Passes over the data, which need not be whole."""
        return self.num_updates * self.layout.global_batch / self.num_images if self.num_images else None

    @property
    def validation_updates(self) -> int:
        """Updates between validations: `validation_steps`, or 20 validations in the run if they take 10 % of it at most."""
        return updates_between_validations(self.config, self.layout, self.num_updates, self.num_held_out)

    @property
    def num_validations(self) -> int:
        """Number of validations, including the one at the end."""
        return math.ceil(self.num_updates / self.validation_updates) if self.num_held_out else 0

    @property
    def _num_trained(self) -> int:
        """Items that each process trains on, with repetitions."""
        return self.num_updates * self.layout.micro_batch * self.layout.accumulation

    @property
    def num_previews(self) -> int:
        """Number of previews without `save_images_epochs`: 4 if they take 5 % of the run at most."""
        config = self.config
        if not config.evaluation:
            return 0
        cost = self.sampling_cost * config.eval_batch_size * config.num_inference_steps
        return min(_MOST_PREVIEWS, self.num_updates - 1, int(_PREVIEW_SHARE * self._num_trained / cost))

    @property
    def sampling_cost(self) -> float:
        """Cost of a step of sampling relative to training on one item; guidance calls the model twice."""
        return self.kind.sampling_cost * (1 if self.config.guidance_scale == 1 else 2)

    @cached_property
    def snapshot_updates(self) -> list[int]:
        """The updates with a snapshot of the post-hoc averages."""
        if (posthoc := self.config.posthoc) is None:
            return []
        known = posthoc.kwargs
        return snapshot_updates(self.num_updates, known["snapshots"], known["start_update"], known["update_every"])

    @cached_property
    def beginning(self) -> Beginning | None:
        """When a density of the timesteps that waits for losses will begin."""
        import torch  # heavy, as is what follows

        from ..objective.objective import Objective

        spec, device = objective_spec(self.config), torch.device("cpu")
        objective = Objective.of(spec, self.process, self.layout, self.num_updates, device, gather=lambda values: values)
        return objective.sampler.beginning(self.layout.global_batch, self.num_updates)

    def due(self, epochs: int | None, update: int, default_times: int) -> bool:
        """Whether something that happens every `epochs` epochs, or `default_times` over the run, is due at `update`."""
        every = self._updates_between(epochs, default_times)
        return update == self.num_updates or update // every > (update - 1) // every

    @property
    def num_pictures(self) -> int:
        """Number of previews, including the samples at the end."""
        return 1 + int((self.num_updates - 1) // self._updates_between(self.config.save_images_epochs, self.num_previews))

    def _updates_between(self, epochs: int | None, default_times: int) -> float:
        if epochs is None:
            return self.num_updates / (default_times + 1)
        return epochs * (self.num_images or math.inf) / self.layout.global_batch

    @cached_property
    def process(self) -> NoiseProcess:
        return objective_spec(self.config).make_process()

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model, without building it."""
        return sum(parameter.numel() for parameter in self.model_on_meta.parameters())

    @property
    def model_on_meta(self) -> Any:
        """A model with shapes and no numbers."""
        import torch

        with torch.device("meta"):
            return self.new_model()

    def new_model(self) -> Any:
        """A model of these arguments, with random weights."""
        return build_model(self.config, self.model_config)

    @cached_property
    def model_class(self) -> Any:
        return model_class_of(self.config)


def updates_between_validations(config: ResolvedConfig, layout: BatchLayout, num_updates: int, num_held_out: int) -> int:
    """`validation_steps`, or the interval of 20 validations in the run if they take 10 % of it at most."""
    if config.validation_steps:
        return config.validation_steps
    usual = max(1, num_updates // _MOST_VALIDATIONS)
    if "feedback" in SCHEDULERS[config.lr_scheduler].traits or not num_held_out:
        return usual
    cost = FORWARD_SHARE * num_held_out * (2 if config.use_ema else 1)
    affordable = int(_VALIDATION_SHARE * num_updates * layout.micro_batch * layout.accumulation / cost)
    return max(usual, math.ceil(num_updates / max(1, affordable)))


def make_plan(
    config: ResolvedConfig,
    data: TrainingData,
    model_config: dict[str, Any] | None,
    num_processes: int = 1,
    rank: int = 0,
    measures_in_full: bool = False,
    start: StartWeights | None = None,
) -> Plan:
    """
    The plan of a run. Raises a `LabError` for a batch larger than the data, and for a schedule that does not fit the length.

    With `measures_in_full`, as many samples are measured as after a long run: runs of a study are compared.
    """
    layout, kind, lr_form = config.layout(num_processes, rank), kind_of(config), config.timestep_lr_form
    schedule, peak = config.schedule_for(layout.global_batch), config.peak_learning_rate(layout.global_batch)
    if not config.finds_learning_rate:
        check_floor(config, peak)
    num_images, num_held_out = data.num_images, len(data.held_out)
    _check_data(config, layout, num_images, num_held_out)
    num_updates = config.max_train_steps or math.ceil((config.num_epochs or 0) * (num_images or 0) / layout.global_batch)
    if not num_updates:
        raise LabError("The run has no length. Give --max_train_steps, or --num_epochs for data that are not a stream.")
    lrs, momenta = schedule_curves(schedule, peak, config.start_momentum, config.lr_warmup_steps, num_updates)
    images_seen = sys.maxsize if measures_in_full else num_updates * layout.global_batch
    if config.distance_samples is None:
        samples = kind.measured_samples(images_seen, num_held_out, num_images)
        config = dataclasses.replace(config, distance_samples=samples)
    arguments = model_arguments(config, model_config, data)
    plan = Plan(
        config=config,
        model_config=arguments,
        kind=kind,
        data_shape=_shape_in_words(data.image_shape),
        item_shape=data.image_shape,
        layout=layout,
        num_images=num_images,
        num_held_out=num_held_out,
        num_updates=num_updates,
        schedule=schedule,
        lrs=lrs,
        momenta=momenta,
        lr_factors=None if lr_form is None else lr_form.lr_factors(np.arange(num_updates), config.num_train_timesteps),
        data_warnings=_scale_warnings(data, kind),
        num_workers=num_workers(data, config.dataloader_num_workers, num_updates * layout.global_batch),
        autoencoder=data.autoencoder,
        conditions=data.held_out[:0].conditions,
        classes=classes_of(config, data),
        start=start,
        width=planned_width(config, arguments),
    )
    _ = plan.snapshot_updates  # an error if the run is too short for them
    if plan.beginning is not None:
        plan.beginning.check(config.timestep_sampler, str(config.timestep_sampler_kwargs["before"]))
    return plan


def _shape_in_words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if len(shape) > 1 else counted(shape[0], "dimension")


def _scale_warnings(data: TrainingData, kind: DataKind) -> tuple[str, ...]:
    """A warning for unbounded data with a spread far from that of the noise."""
    some = data.held_out if len(data.held_out) > 1 else data.in_memory
    if kind.is_bounded or some is None or len(some) < 2:
        return ()
    spread = float(some.data.std(dim=0).max())
    if 0.1 <= spread <= 10:
        return ()
    return (
        f"The {kind.name} have a standard deviation of up to {spread:.3g}, while the noise has 1. Rescale the {kind.name} "
        "to about 1, or the model learns little.",
    )


def _check_data(config: ResolvedConfig, layout: BatchLayout, num_images: int | None, num_held_out: int) -> None:
    """Raises a `LabError` if there are too few images for the given options."""
    if num_images is not None:
        layout.check_fits(num_images)
    needing: dict[str, Any] = {"--timestep_grad_every": config.timestep_grad_every}
    if "feedback" in SCHEDULERS[config.lr_scheduler].traits:
        needing["--lr_scheduler"] = config.lr_scheduler
    for name, value in needing.items():
        if value and not num_held_out:
            hint = "at most a fifth of the images is held out; leave it out, or use more images"
            raise must_be(name, value, "left out without a validation set", hint, got="fewer than five images")
