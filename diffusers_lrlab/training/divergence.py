"""Divergence of a run: it stops, or returns to a checkpoint and continues at a lower learning rate."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from ..core.errors import Diverged, warn
from ..core.words import counted
from .checkpoint_writer import CheckpointWriter, regular_checkpoints
from .divergence_rules import rollback_rule
from .run_folder import checkpoint_update
from .run_state import RunState
from .sharding import local_shard


class DivergenceGuard:
    """Decides when a run has diverged, and which checkpoint it returns to."""

    def __init__(self, run: RunState, checkpoints: CheckpointWriter):
        self.run, self.checkpoints, self.folder = run, checkpoints, checkpoints.folder
        self.rule = rollback_rule(run.config)
        self.rollbacks: list[dict[str, Any]] = []  # updates and learning rates of each, oldest first
        self.first_loss: float | None = None  # unweighted, of the first update or the first row of the log
        self.num_skipped = self._skipped_in_a_row = 0  # updates with gradients that are not finite

    def error(self, what: str = "The loss is not finite") -> Diverged:
        """The error for a run that diverges now, with the remedy."""
        self.checkpoints.finish()  # the message names the last one
        run, last = self.run, self.folder.checkpoints()
        lr = run.current_lr * self.lr_factors(run.update)
        go_on = f"continue from {last[-1]} with --resume_from_checkpoint latest" if last else "give"
        or_else = "" if self.rule else f"; or {go_on} --on_divergence rollback"
        return Diverged(
            f"{what} around update {run.update} at learning rate {lr:.3g}: training has diverged. Lower --learning_rate, "
            f"lengthen --lr_warmup_steps or lower --max_grad_norm{or_else}."
        )

    def count_skipped(self, was_skipped: bool) -> None:
        """Counts an update that was skipped or not; raises `Diverged` after more in a row than are allowed."""
        self.num_skipped += was_skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
        if self._skipped_in_a_row > (most := self.run.config.skip_bad_updates or 0):
            raise self.error(f"The gradients of {counted(most + 1, 'update')} in a row are not finite")

    def check_loss(self, loss: float | None) -> None:
        """Raises `Diverged` for an unweighted loss so large that the run counts as diverged."""
        if self.rule is None or self.first_loss is None or loss is None or loss <= self.rule["explosion"] * self.first_loss:
            return
        raise self.error(f"The loss grew to {loss / self.first_loss:.3g} times its first value")

    def lr_factors(self, updates: Any) -> Any:
        """Factors of the rollbacks on the learning rates of updates: float64, of the shape of `updates`."""
        factors = np.ones(np.shape(updates))
        for rollback in self.rollbacks:  # a later one may have gone further back
            factors = np.where(np.asarray(updates) >= rollback["back_to"], rollback["lr_factor"], factors)
        return factors

    def find_checkpoint(self, reason: Diverged) -> Path:
        """
        The checkpoint to return to, the same for all processes.

        Raises `reason` without --on_divergence rollback or without a checkpoint, and `Diverged` after max_rollbacks.
        """
        if self.rule is None:
            raise reason
        if len(self.rollbacks) >= self.rule["max_rollbacks"]:
            at = ", ".join(str(rollback["back_to"]) for rollback in self.rollbacks)
            raise Diverged(
                f"{reason} The run has already gone back to update {at}, as often as max_rollbacks of --on_divergence "
                "allows. To allow more, raise max_rollbacks and add --resume_from_checkpoint latest."
            ) from None
        # The main process decides, before any process changes the folder.
        values = [self._newest() if self.folder.is_writer else None]
        broadcast_object_list(values)
        if values[0] is None:
            raise reason
        return values[0]

    def _newest(self) -> Path | None:
        found = regular_checkpoints(self.folder, self.run.config) or self.folder.checkpoints()
        # A lower rate did not help after the last one, so its state may be finite and still unusable.
        if self.rollbacks and len(found) > 1 and checkpoint_update(found[-1]) == self.rollbacks[-1]["back_to"]:
            found.pop()
        return self.folder.newest_checkpoint(found)

    def add_rollback(self, reason: Diverged, diverged_at: int, earlier: list[dict[str, Any]]) -> None:
        """Lowers the learning rate of a run that went back after `earlier` rollbacks, with a warning."""
        assert self.rule is not None
        number, what, back_to = len(earlier) + 1, str(reason).partition(":")[0], self.run.update
        factor = self.rule["factor"] ** number
        rollback = {"diverged_at": diverged_at, "back_to": back_to, "lr_factor": factor, "reason": what}
        self._set_rollbacks([*earlier, rollback])
        warn(
            f"{what}. Back to update {back_to}, continuing from there at {factor:g} of the scheduled learning rate "
            f"(rollback {number} of {self.rule['max_rollbacks']})."
        )

    def _set_rollbacks(self, rollbacks: list[dict[str, Any]]) -> None:
        self.rollbacks, plan = rollbacks, self.run.plan
        self.run.lr_factors = plan.lr_factors
        if rollbacks:
            of_bands = 1.0 if plan.lr_factors is None else plan.lr_factors
            self.run.lr_factors = self.lr_factors(np.arange(plan.num_updates)) * of_bands

    def state_dict(self) -> dict[str, Any]:
        skipped = {"total": self.num_skipped, "in_a_row": self._skipped_in_a_row}
        return {"skipped_updates": skipped, "rollbacks": self.rollbacks, "first_loss": self.first_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        skipped = state["skipped_updates"]
        self.num_skipped, self._skipped_in_a_row = skipped["total"], skipped["in_a_row"]
        self._set_rollbacks(state["rollbacks"])
        self.first_loss = state["first_loss"] or self.first_loss


def find_nonfinite(run: RunState, **more: Any) -> str | None:
    """The first part of a run, or of `more`, that is not finite; all processes call this."""
    parts = {**more, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    if run.average is not None:
        parts["moving average"] = run.average.state_dict()["shadow_params"]
    device = run.objective.device
    norms = []
    for part in parts.values():
        # Tensors on the device first, where norms are combined; not the 2-norm, which overflows before the values do.
        tensors = sorted(_floats(part), key=lambda tensor: tensor.device.type != device.type)
        norms.append(torch.nn.utils.get_total_norm(tensors, math.inf).to(device, torch.float64))
    of_processes = run.objective.gather(torch.stack(norms)[None]).isfinite().all(dim=0).tolist()  # the only read
    return next((name for name, is_finite in zip(parts, of_processes, strict=True) if not is_finite), None)


def _floats(part: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested containers."""
    if isinstance(part, torch.Tensor):
        part = local_shard(part.detach())
        if part.is_floating_point() and part.numel():
            yield part
    elif isinstance(part, (dict, list, tuple)):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _floats(item)
