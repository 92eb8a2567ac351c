"""The range test: updates at a rising rate, with losses measured between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from ..core.errors import LabError
from ..core.options import THIS_START, Need, check_needs, check_ranges, check_types, option
from ..core.streams import stream_seed
from ..core.words import counted
from ..data.batch import Batch
from ..evaluation.validation_loss import ValidationLoss
from ..optimizers.groups import set_learning_rate
from ..timesteps.bands import scaled_lr
from ..training.stepping import do_one_update
from .fixed_noise import FixedNoiseObjective
from .readings import MEMORY, Readings, Sweep, no_finite_gradient
from .snapshot import restored_afterwards

if TYPE_CHECKING:
    from ..training.trainer import Trainer

# A forward pass over the probe every 4 updates takes about a sixth of the time of the updates.
_PROBE_BATCHES, _UPDATES_PER_READING = 2, 4
_NOISE_BINS = 4
_EXTENSION = 2  # decades
_NARROWEST = 2.0
PROBE = Need("--mode probe", lambda config: config.mode == "probe")


@dataclass(frozen=True, kw_only=True)
class FinderConfig:
    """Parameters that control the learning-rate finder."""

    _argument_group_name = "learning-rate finder"

    start_lr: float = option(
        None,
        "Lowest rate (default: 1e-7 for AdamW; for other optimizers, scaled like their usual rate).",
        THIS_START,
        range="(0, 1e30]",
    )
    end_lr: float = option(None, "Highest rate (default: 1e-2 for AdamW, scaled likewise).", THIS_START, range="(0, 1e30]")
    num_updates: int = option(200, "Updates from the lowest to the highest rate.", THIS_START, range="[10, 1e6]")
    extend: bool = option(
        True,
        "Continue beyond the highest rate, at most a hundredfold, until the loss rises, so that its minimum is seen.",
        THIS_START,
    )
    mode: Literal["probe", "classic"] = option(
        "probe",
        "Loss to read: probe for fixed images, timesteps and noise (updates have evenly spread timesteps and "
        "antithetic noise), classic for the training loss of each random batch.",
        THIS_START,
    )
    repeats: int = option(
        3, "Number of tests, each with other batches, timesteps and noise.", THIS_START, range="[1, 10000]"
    )
    stop_factor: float = option(
        10.0, "A test ends when its smoothed loss is this many times the minimum so far.", THIS_START, range="(1, 1e308]"
    )
    probe_size: int = option(
        None,
        "Largest number of fixed images for the probe (default: two batches).",
        THIS_START,
        range="[8, 1e7]",
        needs=(PROBE,),
    )
    rule: Literal["minimum_tenth", "steepest", "valley"] = option(
        "minimum_tenth", "Rule that picks the learning rate.", THIS_START
    )

    def __post_init__(self) -> None:
        check_types(self)

    def check(self) -> None:
        """Raises a `LabError` for settings that are not allowed."""
        check_ranges(self, FinderConfig)
        check_needs(self, FinderConfig, "")
        if self.start_lr is None or self.end_lr is None:
            return
        if self.start_lr >= self.end_lr:
            raise LabError(
                f"--start_lr {self.start_lr:g} is not below --end_lr {self.end_lr:g}. Lower the first, or raise the second."
            )
        if self.end_lr < _NARROWEST * self.start_lr:
            raise LabError(
                f"--end_lr {self.end_lr:g} is too close to --start_lr {self.start_lr:g} to compare rates. Make it at least "
                f"{_NARROWEST:g} times as large."
            )

    def lrs(self) -> np.ndarray:
        """Rates of all possible updates, evenly spaced on a logarithmic scale: float64."""
        decades = math.log10(self.end_lr / self.start_lr) / (self.num_updates - 1)
        # A narrow range at most doubles.
        most = self.num_updates + (min(math.floor(_EXTENSION / decades), self.num_updates) if self.extend else 0)
        return self.start_lr * 10 ** (decades * np.arange(most))

    def is_read_after(self, done: int) -> bool:
        """Whether a loss is read after this many updates: after each in a classic test, after every fourth with a probe."""
        # More often in a short test, as rules need some readings.
        every = 1 if self.mode == "classic" else min(_UPDATES_PER_READING, max(1, self.num_updates // 8))
        return done % every == 0 or done in (self.num_updates, len(self.lrs()))


def range_test(trainer: Trainer, settings: FinderConfig, repeat: int = 0, batches: Iterable[Batch] | None = None) -> Sweep:
    """
    One test from the current state of a trainer, which is restored to the bit, also after errors.

    Each `repeat` has its own batches, timesteps and noise. `batches` replace the trainer's data; each is this process's
    share of an update, `(micro_batch * accumulation, ...)`.
    """
    if not any(parameter.requires_grad for parameter in trainer.run.model.parameters()):
        raise LabError("The model has no parameter that is trained, so there is no learning rate to find.")
    if batches is None:
        # A stream has one order, whatever the seed, so each test begins where the one before it should have ended.
        first = repeat * settings.num_updates if trainer.run.plan.num_images is None else 0
        seed = stream_seed(trainer.run.config.seed, "finder", repeat)
        batches = trainer.batches(seed, range(first, first + len(settings.lrs())))
    with restored_afterwards(trainer):
        reader = _Classic(trainer) if settings.mode == "classic" else _Probe(trainer, settings.probe_size)
        objective = FixedNoiseObjective.now(trainer, repeat, settings.mode == "probe")
        trainer.run.objective = objective
        trainer.log.observer = None  # its rows belong to the run
        trainer.set_training()
        return _sweep(trainer, objective, settings, iter(batches), reader)


def _sweep(
    trainer: Trainer, objective: FixedNoiseObjective, settings: FinderConfig, batches: Iterator[Batch], reader: Any
) -> Sweep:
    lrs = settings.lrs()
    readings = Readings(settings.num_updates, settings.stop_factor, reader.memory)
    if reader.before_first:
        readings.start(lrs, *_same_everywhere(reader.read()))
    done = 0
    for update, lr in enumerate(lrs):
        batch = next(batches, None)
        if batch is None:
            if update >= settings.num_updates:  # only the extension is cut short
                break
            readings.ended = (
                f"the data ended after {update} of {counted(settings.num_updates, 'update')}, at a rate of {lr:.3g}"
            )
            break
        set_learning_rate(trainer.run.optimizer, float(lr))
        trainer.run.update = update
        with scaled_lr(trainer.run.optimizer, objective.lr_factor(update)):
            if not do_one_update(trainer, batch):
                readings.ended = no_finite_gradient(lr)
                break
        done = update + 1
        if settings.is_read_after(done) and not readings.add(done, float(lr), *_same_everywhere(reader.read())):
            break
    return readings.sweep(done, reader.num_bins)


def _same_everywhere(reading: tuple[float, np.ndarray]) -> tuple[float, np.ndarray]:
    """The main process's reading, so that all processes stop at the same update."""
    broadcast_object_list(values := [reading])
    return values[0]


class _Probe:
    """Loss of fixed images with fixed timesteps and noise."""

    before_first, memory = True, MEMORY["probe"]

    def __init__(self, trainer: Trainer, size: int | None):
        self.run = run = trainer.run
        data, layout = run.data, run.plan.layout
        size = size or _PROBE_BATCHES * layout.global_batch
        probe = data.held_out[:size] if len(data.held_out) >= 8 else data.all_in_memory(size)[:size]
        batch_size = run.kind.evaluation_batch(layout)
        self.loss = ValidationLoss(probe, run.process, batch_size, trainer.accelerator.device)
        timesteps = self.loss.timesteps.cpu().numpy()
        self.num_bins = _NOISE_BINS if len(probe) >= 2 * _NOISE_BINS else 1
        bins = timesteps * self.num_bins // run.process.num_train_timesteps
        self._members = [bins == index for index in range(self.num_bins)]

    def read(self) -> tuple[float, np.ndarray]:
        """The mean, and the means by noise level, least noise first."""
        with self.run.raw_weights():
            losses = self.loss(self.run.model)
        return float(losses.mean()), np.array([losses[members].mean() for members in self._members])


class _Classic:
    """Training loss of each batch."""

    before_first, memory, num_bins = False, MEMORY["classic"], 0

    def __init__(self, trainer: Trainer):
        self.trainer, self._before = trainer, 0.0
        trainer.log.sums = torch.zeros_like(trainer.log.sums)

    def read(self) -> tuple[float, np.ndarray]:
        total = self.trainer.accelerator.gather(self.trainer.log.sums[None, :1].double()).mean().item()
        loss, self._before = total - self._before, total
        return loss, np.empty(0)
