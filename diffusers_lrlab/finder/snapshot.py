"""Restores a trainer, to the bit, after trial updates."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils import recursively_apply

from ..core.random_states import random_states, restore_random_states

if TYPE_CHECKING:
    from ..training.trainer import Trainer


@contextmanager
def restored_afterwards(trainer: Trainer) -> Iterator[None]:
    """
    Restores weights, optimizer, loss scale, random numbers, clock and sums of a trainer after updates in this block, also
    after an exception.

    The copies of weights and optimizer are on the CPU. Inside the block, samplers that follow the losses must not see any;
    `range_test` takes care of that.
    """
    run, log, scaler = trainer.run, trainer.log, trainer.accelerator.scaler
    model, optimizer = run.model, run.optimizer
    saved = optimizer.state_dict()
    groups, state, weights = copy.deepcopy(saved["param_groups"]), _on_cpu(saved["state"]), _on_cpu(model.state_dict())
    scale = copy.deepcopy(scaler.state_dict()) if scaler is not None else None
    numbers = random_states()
    clock, sums = (run.update, run.training_seconds), log.sums.clone()
    objective, observer = run.objective, log.observer
    was_training, num_skipped = model.training, len(run.data.skipped)
    step, syncs = trainer.accelerator.step, trainer.accelerator.sync_gradients
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
        trainer.accelerator.step = step
        trainer.accelerator.gradient_state._set_sync_gradients(syncs)
        restore_random_states(numbers)


def _on_cpu(tensors: Any) -> Any:
    """A copy of nested containers with their tensors on the CPU."""
    return recursively_apply(lambda tensor: tensor.detach().to("cpu", copy=True), tensors)
