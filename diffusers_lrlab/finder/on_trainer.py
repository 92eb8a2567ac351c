"""Range tests on a trainer: its objective frozen at one update, and its state restored, to the bit, afterwards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, recursively_apply
from typing_extensions import Self

from ..core.errors import LabError
from ..core.streams import block_randn, random_states, restore_random_states, stream_generator, stream_seed
from ..evaluation.validation_loss import ValidationLoss
from ..objective.objective import Objective
from ..optimizers.build import set_learning_rate
from ..timesteps.bands import TimestepLR, scaled_lr
from ..training.trainer import Trainer, do_one_update
from .range_test import FinderConfig, NoFiniteGradient, Sweep, range_test

# A forward pass over the probe every 4 updates takes about a sixth of the time of the updates.
_PROBE_BATCHES, _UPDATES_PER_READING = 2, 4


def range_test_of(trainer: Trainer, settings: FinderConfig, repeat: int = 0) -> Sweep:
    """
    One test from the current state of a trainer, which is restored to the bit, also after errors.

    Each `repeat` has its own batches, timesteps and noise.
    """
    if not any(parameter.requires_grad for parameter in trainer.run.model.parameters()):
        raise LabError("The model has no parameter that is trained, so there is no learning rate to find.")
    most = len(settings.lrs())
    # A stream has one order for all seeds, so each test begins where the one before it should have ended.
    first = repeat * settings.num_updates if trainer.run.plan.num_images is None else 0
    seed = stream_seed(trainer.run.config.seed, "finder", repeat)
    batches = trainer.batches(seed, range(first, first + most))
    with restored_afterwards(trainer):
        probe = _probe_loss(trainer)
        objective = FixedNoiseObjective.now(trainer, repeat)
        trainer.run.objective = objective
        trainer.log.observer = None  # its rows belong to the run
        trainer.set_training()
        # More often in a short test, as rules need some readings.
        every = min(_UPDATES_PER_READING, max(1, settings.num_updates // 8))
        updates = iter(range(most))

        def step(lr: float) -> float | None:
            trainer.run.update = update = next(updates)
            set_learning_rate(trainer.run.optimizer, lr)
            with scaled_lr(trainer.run.optimizer, objective.lr_factor(update)):
                if not do_one_update(trainer, next(batches)):
                    raise NoFiniteGradient
            is_read = (update + 1) % every == 0 or update + 1 in (settings.num_updates, most)
            return probe() if is_read else None

        return range_test(step, settings, probe())


def _probe_loss(trainer: Trainer) -> Callable[[], float]:
    """The current loss of fixed images with fixed timesteps and noise, as a function."""
    run, data, layout = trainer.run, trainer.run.data, trainer.run.plan.layout
    size = _PROBE_BATCHES * layout.global_batch
    probe = data.held_out[:size] if len(data.held_out) >= 8 else data.all_in_memory(size)[:size]
    loss = ValidationLoss(probe, run.process, run.kind.evaluation_batch(layout), trainer.accelerator.device)

    def read() -> float:
        with run.raw_weights():
            # That of the main process, so that all processes stop at the same update.
            return broadcast_object_list([float(loss(run.model).mean())])[0]

    return read


@dataclass(eq=False, kw_only=True)
class FixedNoiseObjective(Objective):
    """
    The objective of a run frozen at one update, with its own random numbers, stratified timesteps and antithetic noise.

    The density of timesteps and the loss weights are those of this update, except that bands take turns. Nothing here learns
    from losses.
    """

    at: int  # the update

    @classmethod
    def now(cls, trainer: Trainer, repeat: int) -> Self:
        """The current objective of a trainer, with samplers and their state, for one of several tests."""
        objective, seed = trainer.run.objective, stream_seed(trainer.run.config.seed, "finder", repeat)
        parts = {part.name: getattr(objective, part.name) for part in dataclasses.fields(Objective)}
        return cls(**parts | {"spec": dataclasses.replace(objective.spec, seed=seed)}, at=trainer.run.update)

    @property
    def _bands(self) -> TimestepLR | None:
        return self.spec.timestep_lr if self.sampler.name == "banded" else None

    def _moment(self, update: int) -> int:
        return self.at if self._bands is None else self.at + update

    def lr_factor(self, update: int) -> float | None:
        """The factor of an update's band on its learning rate."""
        if self._bands is None:
            return None
        factors = self._bands.lr_factors(np.array([self._moment(update)]), self.sampler.num_train_timesteps)
        return None if factors is None else float(factors[0])

    def draw(self, update: int) -> torch.Tensor:
        sampler, generator = self.sampler, stream_generator(self.spec.seed, "timesteps", update, device=self.device)
        before, sampler.draw = sampler.draw, "stratified"
        try:
            return sampler.sample(self.layout.global_batch, self._moment(update), generator)
        finally:
            sampler.draw = before

    def weights(self, timesteps: torch.Tensor, update: int) -> torch.Tensor | None:
        return super().weights(timesteps, self._moment(update))

    def noise(self, update: int, images: torch.Tensor) -> Iterator[torch.Tensor]:
        """Noise whose second half is the negative of its first."""
        if self.spec.noise != "gaussian":
            yield from super().noise(update, images)
            return
        batch = self.layout.global_batch
        half = block_randn(self.spec.seed, "noise", update, range(batch - batch // 2), tuple(images.shape[1:]), self.device)
        whole = torch.cat([half, -half[: batch // 2]])
        for part in self.layout.positions():
            yield whole[part.start : part.stop]

    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Does nothing."""


@contextmanager
def restored_afterwards(trainer: Trainer) -> Iterator[None]:
    """
    Restores weights, optimizer, loss scale, random numbers, clock and sums of a trainer after updates in this block, also
    after an exception.

    The copies of weights and optimizer are on the CPU. Inside the block, samplers that follow the losses must not see any;
    [`FixedNoiseObjective`] shows them none.
    """
    run, log, accelerator = trainer.run, trainer.log, trainer.accelerator
    model, optimizer, scaler = run.model, run.optimizer, accelerator.scaler
    saved = optimizer.state_dict()
    groups, state, weights = copy.deepcopy(saved["param_groups"]), _on_cpu(saved["state"]), _on_cpu(model.state_dict())
    scale = copy.deepcopy(scaler.state_dict()) if scaler is not None else None
    numbers = random_states()
    clock, sums = (run.update, run.training_seconds), log.sums.clone()
    objective, observer = run.objective, log.observer
    was_training, num_skipped = model.training, len(run.data.skipped)
    step, syncs = accelerator.step, accelerator.sync_gradients
    try:
        yield
    finally:
        model.load_state_dict(weights)
        model.train(was_training)
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        if scaler is not None:
            scaler.load_state_dict(scale)
        (run.update, run.training_seconds), log.sums = clock, sums
        run.objective, log.observer = objective, observer
        del run.data.skipped[num_skipped:]
        # An interrupted update would otherwise leave its count of micro-batches.
        accelerator.step = step
        accelerator.gradient_state._set_sync_gradients(syncs)
        restore_random_states(numbers)


def _on_cpu(tensors: Any) -> Any:
    """A copy of nested containers with their tensors on the CPU."""
    return recursively_apply(lambda tensor: tensor.detach().to("cpu", copy=True), tensors)
