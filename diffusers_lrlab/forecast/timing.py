"""The time of a run, from a short measured probe."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from accelerate.utils import broadcast_object_list

from ..core.streams import stream_generator
from ..training.results.base import results_of
from ..training.samples import sampling_pipeline

if TYPE_CHECKING:
    from ..training.plan import Plan
    from ..training.trainer import Trainer

_UPDATES, _WARM, _FEWEST = 40, 8, 6
_READINGS, _STEPS, _FEW, _PASS_SECONDS = 2, 4, 4, 0.5
_SECONDS = 4.0  # a probe ends here, if it has a few updates


class TimeForecast(NamedTuple):
    """Seconds."""

    update: float  # the median, with logging, EMA and diagnostics
    update_low: float  # a tenth of the updates was faster
    update_high: float  # a tenth was slower
    training: float  # all updates, by each of these
    low: float
    high: float
    validation: float  # all of them
    sampling: float  # all pictures during training, and the samples at the end
    evaluation: float  # of the results computed from these samples

    @property
    def total(self) -> float:
        """Without the time to plot and write the results."""
        return self.training + self.validation + self.sampling + self.evaluation


def forecast_time(trainer: Trainer) -> TimeForecast:
    """
    Measures a validation, some steps of sampling, an evaluation, and updates as the run does them.

    The trainer cannot be used afterwards. All processes call this.
    """
    config, plan = trainer.config, trainer.plan
    validation = 0.0
    if trainer.validation is not None:
        validation = _median_seconds(trainer.validation_losses) * math.ceil(plan.num_updates / plan.validation_updates)
    samples = results_of(trainer.kind).num_samples(config, plan.num_held_out, plan.num_images)
    sampling = _seconds_of_samples(trainer, max(samples, config.eval_batch_size))
    evaluation = _seconds_of_evaluation(trainer) if trainer.accelerator.is_main_process else 0.0
    # The measured updates must not include validations and pictures.
    trainer.validation, trainer.config = None, dataclasses.replace(config, save_images_epochs=sys.maxsize)
    low, update, high = np.quantile(_times_of_updates(trainer), [0.1, 0.5, 0.9]).tolist()
    total = sampling(config.eval_batch_size) * num_pictures(plan) + (sampling(samples) if samples else 0.0)
    num = plan.num_updates
    return TimeForecast(update, low, high, update * num, low * num, high * num, validation, total, evaluation)


def num_pictures(plan: Plan) -> int:
    """How often sample pictures are drawn, including those at the end."""
    epochs = plan.config.save_images_epochs
    if epochs is None:
        return 1 + plan.num_previews
    every = epochs * (plan.num_images or math.inf) / plan.layout.global_batch
    return 1 + int((plan.num_updates - 1) // every)


def _seconds_of_evaluation(trainer: Trainer) -> float:
    """Seconds of the evaluation at the end of the run, on samples that were drawn in a few steps."""
    config, results = trainer.config, results_of(trainer.kind)
    steps = min(2, config.ddpm_num_inference_steps)
    trainer.config = dataclasses.replace(config, ddpm_num_inference_steps=steps)
    samples = results.samples_to_evaluate(trainer)
    trainer.config = config
    started = time.perf_counter()
    results.evaluate(trainer, samples)
    return time.perf_counter() - started


def _times_of_updates(trainer: Trainer) -> list[float]:
    """Seconds of each update, without the first ones."""
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


def _median_seconds(call: Callable[[], Any]) -> float:
    """The median of some calls, after a first one, which is slower."""
    times = []
    for _ in range(1 + _READINGS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _seconds_of_samples(trainer: Trainer, most: int) -> Callable[[int], float]:
    """A function from a number of samples, up to `most`, to seconds: a line through times of few samples and of many."""
    config, kind, model = trainer.config, trainer.kind, trainer.bare_model.eval()
    pipeline = sampling_pipeline(trainer)
    pipeline.set_progress_bar_config(disable=True)
    steps = min(_STEPS, config.ddpm_num_inference_steps)

    def sample(size: int) -> None:
        kind.sample(pipeline, size, stream_generator(0, "forecast", device=model.device), steps)

    few = _median_seconds(partial(sample, _FEW))
    # As many as fit into a pass, unless that would take long.
    size = max(2 * _FEW, min(kind.sampling_batch, most, int(_FEW * _PASS_SECONDS / few)))
    slope = max(0.0, (_median_seconds(partial(sample, size)) - few) / (size - _FEW))
    slope, start = (part * config.ddpm_num_inference_steps / steps for part in (slope, max(0.0, few - slope * _FEW)))
    return lambda num: start * math.ceil(num / kind.sampling_batch) + slope * num
