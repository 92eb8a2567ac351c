"""The plan of a run, made before it starts."""

import dataclasses
import math
import sys
from dataclasses import dataclass
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
from ..data.loading import TrainingData
from ..data.options import BatchLayout
from ..models.loading import StartWeights
from ..models.width import Width
from ..objective.process import NoiseProcess
from ..optimizers.entries import OPTIMIZERS
from ..optimizers.timescales import DecayTimescale, per_update
from ..schedules.expected import schedule_curves
from ..schedules.schedule import Schedule
from .combinations import check_floor
from .config import ResolvedConfig
from .kinds import DataKind, kind_of, row_for
from .model import build_model, classes_of, model_arguments, planned_width
from .resolve import objective_spec

# Most previews and validations, and their share of the training time; cost of a pass without gradients.
_MOST_PREVIEWS, _PREVIEW_SHARE = 4, 0.05
_MOST_VALIDATIONS, _VALIDATION_SHARE, _FORWARD_SHARE = 20, 0.1, 1 / 3
_SAMPLING_COSTS = {"points": 0.3}  # a step of sampling over the training of an item, measured; 0.4 for other kinds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided about a run before it starts."""

    config: ResolvedConfig
    kind: DataKind
    layout: BatchLayout
    num_updates: int
    # Data.
    data_shape: str  # of an image or point, in words
    item_shape: tuple[int, ...]
    num_images: int | None  # to train on; None for a stream
    num_held_out: int
    num_epochs: float | None  # passes over the data, which need not be whole
    num_workers: int  # that read and decode images
    autoencoder: dict[str, Any] | None  # that encoded the data
    conditions: Conditions  # of the model, for no images: `(0, ...)` each
    classes: Classes | None  # of labelled data
    # Model.
    model_config: dict[str, Any]
    start: StartWeights | None  # the weights that the model starts from
    width: Width | None  # with --width_base
    process: NoiseProcess
    # Rates.
    schedule: Schedule
    warmup_updates: int
    learning_rate: float  # the peak, for this batch
    lrs: np.ndarray  # of each update, float64; only an upper bound for a schedule that follows the validation loss
    momenta: np.ndarray  # likewise; NaN for an optimizer without momentum
    lr_factors: np.ndarray | None  # on the learning rate of each update, by its band of timesteps
    optimizer_kwargs: dict[str, Any]  # those in images turned into those of its updates
    decay_timescale: DecayTimescale | None  # the effect of weight decay that is decoupled from the gradient
    ema_forms: list[EMAForm]  # of the averages, one of each width for post-hoc averages
    # Between updates.
    validation_updates: int  # from one validation to the next
    num_validations: int  # including the one at the end
    num_previews: int  # without `save_images_epochs`
    snapshot_updates: list[int]  # the updates with a snapshot of the post-hoc averages
    warnings: list[str]  # of data and length

    @property
    def ema_form(self) -> EMAForm:
        """The decay of the EMA that is validated, sampled and saved as the pipeline."""
        return self.ema_forms[0]

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
    def num_parameters(self) -> int:
        """Parameters of the model, which is built without numbers."""
        import torch

        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build_model(self.config, self.model_config).parameters())


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
    kind, layout, shape = kind_of(config), config.layout(num_processes, rank), data.image_shape
    batch, num_images, num_held_out = layout.global_batch, data.num_images, len(data.held_out)
    num_updates = config.max_train_steps or math.ceil((config.num_epochs or 0) * (num_images or 0) / batch)
    if not num_updates:
        raise LabError("The run has no length. Give --max_train_steps, or --num_epochs for data that are not a stream.")
    if config.distance_samples is None:
        samples = kind.measured_samples(sys.maxsize if measures_in_full else num_updates * batch, num_held_out, num_images)
        config = dataclasses.replace(config, distance_samples=samples)
    _check_data(config, layout, num_images, num_held_out)
    arguments, process = model_arguments(config, model_config, data), objective_spec(config).make_process()
    validation_updates = updates_between_validations(config, layout, num_updates, num_held_out)
    return Plan(
        config=config,
        kind=kind,
        layout=layout,
        num_updates=num_updates,
        data_shape=" x ".join(map(str, shape)) if len(shape) > 1 else counted(shape[0], "dimension"),
        item_shape=shape,
        num_images=num_images,
        num_held_out=num_held_out,
        num_epochs=num_updates * batch / num_images if num_images else None,
        num_workers=num_workers(data, config.dataloader_num_workers, num_updates * batch),
        autoencoder=data.autoencoder,
        conditions=data.held_out[:0].conditions,
        classes=classes_of(config, data),
        model_config=arguments,
        start=start,
        width=planned_width(config, arguments),
        process=process,
        **_rates(config, batch, num_updates),
        ema_forms=[form.with_images(batch) for form in config.ema_form.tracks],
        validation_updates=validation_updates,
        num_validations=math.ceil(num_updates / validation_updates) if num_held_out else 0,
        num_previews=_num_previews(config, kind, layout, num_updates),
        snapshot_updates=[] if config.posthoc is None else snapshot_updates(num_updates, **config.posthoc.kwargs),
        warnings=[*_scale_warnings(data, kind), *_length_warnings(config, process, layout, num_updates)],
    )


def _rates(config: ResolvedConfig, batch: int, num_updates: int) -> dict[str, Any]:
    """The fields of a plan about rates: the curves, and the optimizer that has them."""
    schedule, peak, lr_form = *config.rates_for(batch), config.timestep_lr_form
    if not config.finds_learning_rate:
        check_floor(config, peak)
    lrs, momenta = schedule_curves(schedule, peak, config.start_momentum, config.lr_warmup_steps, num_updates)
    optimizer = OPTIMIZERS[config.optimizer]
    kwargs = per_update(optimizer, config.optimizer_kwargs, peak, batch)
    decay = kwargs.get("weight_decay") if "decoupled" in optimizer.traits else None
    return {
        "schedule": schedule,
        "warmup_updates": resolve_warmup_updates(config.lr_warmup_steps, num_updates),
        "learning_rate": peak,
        "lrs": lrs,
        "momenta": momenta,
        "lr_factors": lr_form and lr_form.lr_factors(np.arange(num_updates), config.num_train_timesteps),
        "optimizer_kwargs": kwargs,
        "decay_timescale": DecayTimescale.of(peak, decay, lrs) if decay else None,
    }


def _length_warnings(config: ResolvedConfig, process: NoiseProcess, layout: BatchLayout, num_updates: int) -> list[str]:
    """Those of a density of the timesteps that waits for losses; a `LabError` if the run is too short for it."""
    if "before" not in config.timestep_sampler_kwargs:
        return []
    import torch  # heavy, as is what follows

    from ..objective.objective import Objective

    spec, cpu = objective_spec(config), torch.device("cpu")
    objective = Objective.of(spec, process, layout, num_updates, cpu, gather=lambda values: values)
    warning = objective.sampler.check_length(num_updates, layout.global_batch)
    return [warning] if warning else []


def _num_previews(config: ResolvedConfig, kind: DataKind, layout: BatchLayout, num_updates: int) -> int:
    """4 if they take 5 % of the run at most."""
    if not config.evaluation:
        return 0
    step = row_for(kind, _SAMPLING_COSTS, 0.4) * (1 if config.guidance_scale == 1 else 2)  # guidance calls the model twice
    cost = step * config.eval_batch_size * config.num_inference_steps
    num_trained = num_updates * layout.micro_batch * layout.accumulation  # items of each process, with repetitions
    return min(_MOST_PREVIEWS, num_updates - 1, int(_PREVIEW_SHARE * num_trained / cost))


def updates_between_validations(config: ResolvedConfig, layout: BatchLayout, num_updates: int, num_held_out: int) -> int:
    """`validation_steps`, or the interval of 20 validations in the run if they take 10 % of it at most."""
    if config.validation_steps:
        return config.validation_steps
    usual = max(1, num_updates // _MOST_VALIDATIONS)
    if config.schedule.follows_metric or not num_held_out:
        return usual
    cost = _FORWARD_SHARE * num_held_out * (2 if config.use_ema else 1)
    affordable = int(_VALIDATION_SHARE * num_updates * layout.micro_batch * layout.accumulation / cost)
    return max(usual, math.ceil(num_updates / max(1, affordable)))


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
    if config.schedule.follows_metric:
        needing["--lr_scheduler"] = config.lr_scheduler
    for name, value in needing.items():
        if value and not num_held_out:
            hint = "at most a fifth of the images is held out; leave it out, or use more images"
            raise must_be(name, value, "left out without a validation set", hint, got="fewer than five images")
