"""The time of a run, from short measured probes."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from accelerate.utils import broadcast_object_list

from ..core.streams import stream_generator
from ..training.pipeline import make_pipeline
from ..training.plan import FORWARD_SHARE
from ..training.results.base import results_of
from ..training.samples import sample_conditions
from .evaluation import forecast_evaluation
from .probes import Budget, grow, line_through

if TYPE_CHECKING:
    from ..evaluation.validation_loss import ValidationLoss
    from ..training.run_state import RunState
    from ..training.trainer import Trainer

SECONDS = 5.0  # default budget of all measurements
_UPDATES, _WARM = 40, 8
_STEPS, _FEW = 4, 16
# Shares of the remaining time for updates, then validation, then samples; the evaluation has the rest.
_FOR_UPDATES, _FOR_VALIDATION, _FOR_SAMPLES = 0.4, 0.2, 0.5


class TimeForecast(NamedTuple):
    """Seconds."""

    update: float  # the median, with logging, EMA and diagnostics
    training: float  # all updates
    low: float  # all updates at the 10 % quantile of those measured
    high: float  # at the 90 % quantile
    validation: float  # all validations
    sampling: float  # all sample images during training, and the samples at the end
    evaluation: float  # metrics of these samples
    measured: float = 0.0  # by the probes
    slowest: tuple[tuple[str, float], ...] = ()  # slow metrics
    guessed: tuple[str, ...] = ()  # parts estimated from the updates for lack of time
    unknown: tuple[str, ...] = ()  # metrics not counted
    compiling: float = 0.0  # extra time of the first update of a compiled model
    snapshots: float = 0.0  # to write all snapshots of post-hoc averages, which a thread does meanwhile

    @property
    def total(self) -> float:
        """The total time, except for plotting and writing the results."""
        return self.compiling + self.training + self.validation + self.sampling + self.evaluation


def forecast_time(trainer: Trainer, budget: Budget | None = None) -> TimeForecast:
    """
    Measures updates of the run, then parts of a validation, of the sampling and of the evaluation, within one budget.

    The trainer cannot be used afterwards. All processes call this.
    """
    budget = budget or Budget(SECONDS)
    run, started = trainer.run, budget.spent
    config, plan = run.config, run.plan
    times = _times_of_updates(trainer, budget)
    low, update, high = np.quantile(_warm(times), [0.1, 0.5, 0.9]).tolist()
    compiling = max(0.0, times[0] - update) if config.compile else 0.0
    snapshots = _seconds_of_snapshots(trainer)
    item, guessed = update / (plan.layout.micro_batch * plan.layout.accumulation), []
    validation, evaluation = 0.0, {}
    if run.validation is not None:
        validation, is_guess = _seconds_of_validation(run, run.validation, item, budget)
        validation *= plan.num_validations
        guessed += ["validation"] * is_guess
    samples, shown = 0, 0
    if config.evaluation:
        samples, shown = results_of(run.kind).num_samples(config, plan.num_held_out, plan.num_images), plan.num_pictures
    of_samples, is_guess = _seconds_of_samples(run, max(samples, config.eval_batch_size), item, budget)
    guessed += ["sampling"] * is_guess
    sampling = of_samples(config.eval_batch_size) * shown + (of_samples(samples) if samples else 0.0)
    if trainer.accelerator.is_main_process and config.evaluation:
        evaluation = forecast_evaluation(run, samples, budget)
    known = {name: seconds for name, seconds in evaluation.items() if seconds is not None}
    num, of_evaluation = plan.num_updates, sum(known.values())
    slowest = sorted(((name, took) for name, took in known.items() if took > of_evaluation / 5), key=lambda one: -one[1])
    return TimeForecast(
        update=update,
        training=update * num,
        low=low * num,
        high=high * num,
        validation=validation,
        sampling=sampling,
        evaluation=of_evaluation,
        measured=budget.spent - started,
        slowest=tuple(slowest),
        guessed=tuple(guessed),
        unknown=tuple(name for name in evaluation if name not in known),
        compiling=compiling,
        snapshots=snapshots,
    )


def _times_of_updates(trainer: Trainer, budget: Budget) -> list[float]:
    """Seconds of each update, without validations and images. Others follow a compiling one, whatever it takes."""
    run, times = trainer.run, []
    validation, config = run.validation, run.config
    run.validation, run.config = None, dataclasses.replace(config, save_images_epochs=sys.maxsize)
    seconds, compiles = budget.share(_FOR_UPDATES), config.compile
    with budget.shown("updates, the first of which compiles" if compiles else "updates"):
        begun = started = time.perf_counter()
        for _ in trainer.updates(show_progress=False):
            trainer.log.sums.sum().item()  # waits for the device
            now = time.perf_counter()
            times.append(now - started)
            # The main process decides, as all must stop at the same update. The first update is slow, so another follows.
            enough = now - begun > (seconds if len(times) > 1 else budget.seconds)
            if compiles and len(times) <= 2:
                begun, enough = now, False
            broadcast_object_list(ends := [len(times) >= _UPDATES or enough])
            if ends[0]:
                break
            started = time.perf_counter()
    run.validation, run.config = validation, config
    return times


def _seconds_of_snapshots(trainer: Trainer) -> float:
    """Seconds to write all snapshots of a run, from one in the temporary folder; training continues meanwhile."""
    if not (writer := trainer.snapshots).updates or not (trainer.accelerator.is_main_process or trainer.run.is_sharded):
        return 0.0
    started = time.perf_counter()
    writer.begin()
    writer.finish()
    return (time.perf_counter() - started) * len(writer.updates)


def _warm(times: list[float]) -> list[float]:
    """The times without the first ones, if others are left."""
    return times[min(_WARM, max(1, len(times) // 4)) :] or times


def _seconds_of_validation(run: RunState, whole: ValidationLoss, item: float, budget: Budget) -> tuple[float, bool]:
    """Seconds of one validation, and whether they are estimated from the seconds of training per item."""
    num, seconds = len(whole.batch), budget.share(_FOR_VALIDATION)
    first = min(num, whole.batch_size)
    models = 1 if run.average is None else 2
    if 2 * first * models * FORWARD_SHARE * item > seconds:
        return num * models * FORWARD_SHARE * item, True

    def validate(size: int) -> None:
        part = run.validation = copy.copy(whole)
        part.batch = whole.batch[:size]
        run.validation_losses()

    with budget.shown("validation"):
        start, slope = line_through(grow(validate, first, num, seconds))
    return start + slope * num, False


def _seconds_of_samples(run: RunState, most: int, item: float, budget: Budget) -> tuple[Callable[[int], float], bool]:
    """
    Seconds as a function of the number of samples, up to `most`: a line through times of few and of many samples. And
    whether they are estimated from the seconds of training per item.
    """
    config, kind, model = run.config, run.kind, run.model.eval()
    steps, seconds = min(_STEPS, config.num_inference_steps), budget.share(_FOR_SAMPLES)
    if 2 * _FEW * steps * run.plan.sampling_cost * item > seconds:
        each = config.num_inference_steps * run.plan.sampling_cost * item
        return lambda num: num * each, True
    pipeline = make_pipeline(run)
    pipeline.set_progress_bar_config(disable=True)

    def sample(size: int, steps: int = steps) -> None:
        generator = stream_generator(0, "forecast", device=model.device)
        kind.sample(pipeline, size, generator, steps, **sample_conditions(run, size))

    with budget.shown("sampling"):
        readings = grow(sample, _FEW, min(kind.sampling_batch, most), seconds)
        # The time of a pass besides its steps, from a pass of one step.
        few, began = readings[0], time.perf_counter()
        sample(few[0], 1)
        one = time.perf_counter() - began
    beside = max(0.0, (steps * one - few[1]) / (steps - 1)) if steps > 1 else 0.0
    start, slope = line_through([(size, max(0.0, took - beside) / steps) for size, took in readings])
    num_steps = config.num_inference_steps
    return lambda num: math.ceil(num / kind.sampling_batch) * (beside + num_steps * start) + num_steps * slope * num, False
