"""The time of a run, from a short measured probe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from accelerate.utils import broadcast_object_list

from ..streams import stream_generator

if TYPE_CHECKING:
    from ..training.loop import Trainer
    from ..training.plan import Plan

_UPDATES, _WARM, _FEWEST = 40, 8, 8
_SECONDS = 20.0  # a probe ends here, if it has a few updates


class TimeForecast(NamedTuple):
    """
    Seconds.

    Args:
        update (`float`): Median of an update, with logging, EMA and diagnostics.
        update_low, update_high (`float`): A tenth of the updates was quicker, and a tenth slower.
        training, low, high (`float`): All updates, by each of these.
        validation (`float`): All validations.
        sampling (`float`): All pictures in between, and the samples at the end.
    """

    update: float
    update_low: float
    update_high: float
    training: float
    low: float
    high: float
    validation: float
    sampling: float

    @property
    def total(self) -> float:
        """Training, validation and sampling."""
        return self.training + self.validation + self.sampling


def forecast_time(trainer: Trainer) -> TimeForecast:
    """
    Measures a validation, some steps of sampling, and updates as they are done in the run.

    The trainer is used up by it. All processes call this.
    """
    config, plan = trainer.config, trainer.plan
    validation = 0.0
    if trainer.validation is not None:
        started = time.perf_counter()
        trainer.validation_losses()
        validation = (time.perf_counter() - started) * math.ceil(plan.num_updates / plan.validation_updates)
        trainer.validation = None  # it is not to be measured among the updates
    sampling = _seconds_of_samples(trainer)
    low, update, high = np.quantile(_times_of_updates(trainer), [0.1, 0.5, 0.9]).tolist()
    samples = config.frechet_samples
    if config.point_column is not None:
        samples = plan.num_held_out if config.distance_samples is None else config.distance_samples
    total = sampling(config.eval_batch_size) * num_pictures(plan) + (sampling(samples) if samples else 0.0)
    num = plan.num_updates
    return TimeForecast(update, low, high, update * num, low * num, high * num, validation, total)


def num_pictures(plan: Plan) -> int:
    """How often samples are drawn to be looked at, with those at the end."""
    epochs = plan.config.save_images_epochs
    if epochs is None:
        return min(5, plan.num_updates)
    every = epochs * (plan.num_images or math.inf) / plan.layout.global_batch
    return 1 + int((plan.num_updates - 1) // every)


def _times_of_updates(trainer: Trainer) -> list[float]:
    """Seconds of updates, the first ones left out."""
    times: list[float] = []
    begun = started = time.perf_counter()
    for _ in trainer.updates(show_progress=False):
        trainer.sums.sum().item()  # waits for the device
        now = time.perf_counter()
        times.append(now - started)
        # The main process's clock decides: all must stop at the same update.
        broadcast_object_list(ends := [len(times) >= _UPDATES or (len(times) >= _FEWEST and now - begun > _SECONDS)])
        if ends[0]:
            break
        started = time.perf_counter()
    return times[min(_WARM, len(times) // 4) :]


def _seconds_of_samples(trainer: Trainer) -> Callable[[int], float]:
    """From a number of samples to seconds: a start and a slope, from two small batches in two steps each."""
    config, kind, scheduler = trainer.config, trainer.kind, trainer.noise_scheduler
    model = trainer.bare_model.eval()
    pipeline = kind.make_pipeline(model, type(scheduler).from_config(scheduler.config))
    pipeline.set_progress_bar_config(disable=True)
    steps = min(2, config.ddpm_num_inference_steps)
    sizes, seconds = (4, min(kind.sampling_batch, max(16, config.eval_batch_size))), []
    for size in (sizes[0], *sizes):  # the first one is slower
        generator = stream_generator(0, "forecast", device=model.device)
        started = time.perf_counter()
        kind.sample(pipeline, size, generator, steps)
        seconds.append((time.perf_counter() - started) * config.ddpm_num_inference_steps / steps)
    slope = max(0.0, (seconds[2] - seconds[1]) / (sizes[1] - sizes[0]))
    start = max(0.0, seconds[1] - slope * sizes[0])
    return lambda num: start * math.ceil(num / kind.sampling_batch) + slope * num
