"""The time of a run, from a short measured probe."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..data.batches import iterate_batches
from ..finder.range_test import StillObjective
from ..finder.snapshot import as_it_was
from ..streams import stream_generator
from ..training.averaging import averages_itself

if TYPE_CHECKING:
    from ..training.loop import Trainer

_UPDATES, _WARM = 24, 6
_SECONDS = 20.0  # a probe ends here, if it has a few updates
_FEWEST = 8


class TimeForecast(NamedTuple):
    """
    Seconds.

    Args:
        update (`float`): Median of an update.
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
    Measures some updates, a validation and two steps of sampling; afterwards the trainer is as it was, to the bit.

    All processes call this.
    """
    config, plan = trainer.config, trainer.plan
    with as_it_was(trainer):
        times = _times_of_updates(trainer)
        low, update, high = np.quantile(times, [0.1, 0.5, 0.9]).tolist()
        validation = 0.0
        if trainer.validation is not None:
            started = time.perf_counter()
            trainer.validation_losses()
            validation = (time.perf_counter() - started) * max(1, plan.num_updates // plan.validation_updates)
        sampling = _seconds_of_samples(trainer)
    num = plan.num_updates
    shown = 5 if config.save_images_epochs is None else 1 + num // max(1, round(num / 5))
    samples = config.frechet_samples
    if config.point_column is not None:
        samples = plan.num_held_out if config.distance_samples is None else config.distance_samples
    total = sampling(config.eval_batch_size) * shown + (sampling(samples) if samples else 0.0)
    return TimeForecast(update, low, high, update * num, low * num, high * num, validation, total)


def _times_of_updates(trainer: Trainer) -> list[float]:
    """Seconds of updates, the first ones left out."""
    plan = trainer.plan
    trainer.objective, trainer.observer = StillObjective(trainer, 0, spread=False), None
    trainer.model.train()
    if averages_itself(trainer.optimizer):
        trainer.optimizer.train()
    batches = iterate_batches(trainer.data, plan.layout, trainer.config.seed, range(_UPDATES + _WARM))
    times: list[float] = []
    begun = time.perf_counter()
    for update in range(_UPDATES + _WARM):
        started = time.perf_counter()
        images = next(batches)
        trainer.update = update
        trainer.do_update(images)
        trainer.sums.sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
        if time.perf_counter() - begun > _SECONDS and len(times) >= _FEWEST:
            break
    return times[min(_WARM, len(times) // 4) :]


def _seconds_of_samples(trainer: Trainer) -> Callable[[int], float]:
    """From a number of samples to seconds: a start and a slope, from two small batches in two steps each."""
    config, kind = trainer.config, trainer.kind
    model = trainer.bare_model.eval()
    pipeline = kind.make_pipeline(model, trainer.noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    steps = min(2, config.ddpm_num_inference_steps)
    sizes, seconds = (4, min(64, max(8, config.eval_batch_size))), []
    for size in (sizes[0], *sizes):  # the first one is slower
        generator = stream_generator(0, "forecast", device=model.device)
        started = time.perf_counter()
        kind.sample(pipeline, size, generator, steps)
        seconds.append((time.perf_counter() - started) * config.ddpm_num_inference_steps / steps)
    slope = max(0.0, (seconds[2] - seconds[1]) / (sizes[1] - sizes[0]))
    start = max(0.0, seconds[1] - slope * sizes[0])
    return lambda num: start * -(-num // kind.sampling_batch) + slope * num
