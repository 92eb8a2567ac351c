"""What becomes of a run whose numbers are no longer finite: it stops, or goes back and on at a lower learning rate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from ..core.errors import Diverged, warn
from .base_run import BaseRun
from .config import ResolvedConfig
from .divergence_rules import rollback_rule
from .run_folder import RunFolder, checkpoint_update
from .sharding import local_shard


def regular_checkpoints(folder: RunFolder, config: ResolvedConfig) -> list[Path]:
    """Those of a run that was never interrupted: a signal's must not change where a run goes back to."""
    return [path for path in folder.checkpoints() if checkpoint_update(path) % config.checkpointing_steps == 0]


def kept_checkpoints(folder: RunFolder, config: ResolvedConfig) -> list[Path]:
    """What `checkpoints_total_limit` leaves: the newest, and of a run that may go back the newest regular ones."""
    everything, limit = folder.checkpoints(), config.checkpoints_total_limit
    if not limit:
        return everything
    found = everything if rollback_rule(config) is None else regular_checkpoints(folder, config)
    return [*found[-limit:], *everything[-1:]]


class Rollbacks:
    """Where a run that diverged went back to, and what that made of its learning rate."""

    def __init__(self, config: ResolvedConfig, folder: RunFolder):
        self.config, self.folder, self.rule = config, folder, rollback_rule(config)
        self.done: list[dict[str, Any]] = []  # oldest first
        self.first_loss: float | None = None  # unweighted, of the first update, or of the first row of the log

    def factors(self, updates: Any) -> Any:
        """Factors on the learning rates of updates: float64, of their shape."""
        factors = np.ones(np.shape(updates))
        for rollback in self.done:  # a later one may have gone further back
            factors = np.where(np.asarray(updates) >= rollback["back_to"], rollback["lr_factor"], factors)
        return factors

    def explosion(self, loss: float | None) -> str | None:
        """What is wrong with an unweighted loss, if it is so large that the run counts as diverged."""
        if self.rule is None or self.first_loss is None or loss is None or loss <= self.rule["explosion"] * self.first_loss:
            return None
        return f"The loss grew to {loss / self.first_loss:.3g} times its first value"

    def find_checkpoint(self, reason: Diverged) -> Path:
        """The checkpoint to go back to, for all processes; raises `reason` if that is not asked for, or was no help."""
        if self.rule is None:
            raise reason
        if len(self.done) >= self.rule["max_rollbacks"]:
            at = ", ".join(str(rollback["back_to"]) for rollback in self.done)
            raise Diverged(
                f"{reason} It went back to update {at} before, as often as max_rollbacks of --on_divergence allows; "
                "that may be raised with --resume_from_checkpoint latest."
            ) from None
        # The main process says, before any of them changes the folder.
        values = [self._newest() if self.folder.is_writer else None]
        broadcast_object_list(values)
        if values[0] is None:
            raise reason
        return values[0]

    def _newest(self) -> Path | None:
        found = regular_checkpoints(self.folder, self.config) or self.folder.checkpoints()
        # From the last one even a lower rate did not help: what it holds may be finite and ruined.
        if self.done and len(found) > 1 and checkpoint_update(found[-1]) == self.done[-1]["back_to"]:
            found.pop()
        return self.folder.newest_checkpoint(found)

    def add(self, reason: Diverged, diverged_at: int, back_to: int) -> None:
        """Notes that the run went back, and says so."""
        if self.rule is None:
            raise reason
        number, what = len(self.done) + 1, str(reason).partition(":")[0]
        factor = self.rule["factor"] ** number
        self.done = [*self.done, {"diverged_at": diverged_at, "back_to": back_to, "lr_factor": factor, "reason": what}]
        warn(
            f"{what}. Back to update {back_to}, and on from there at {factor:g} of the scheduled learning rate (rollback "
            f"{number} of {self.rule['max_rollbacks']})."
        )


@dataclass
class SkippedUpdates:
    """How many updates were left out, since their gradients were not finite."""

    total: int = 0
    in_a_row: int = 0

    def count(self, was_skipped: bool) -> None:
        self.total += was_skipped
        self.in_a_row = self.in_a_row + 1 if was_skipped else 0


def find_nonfinite(run: BaseRun, **more: Any) -> str | None:
    """What of a run, or of `more`, is not finite and must not be saved; all processes call this, and get one answer."""
    parts = {**more, "model": run.bare_model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    if run.average is not None:
        parts["moving average"] = run.average.state_dict()["shadow_params"]
    device = run.objective.device
    norms = []
    for part in parts.values():
        # Those on the device first, where the norms are brought together; not the 2-norm, which overflows before numbers do.
        tensors = sorted(_floats(part), key=lambda tensor: tensor.device.type != device.type)
        norms.append(torch.nn.utils.get_total_norm(tensors, math.inf).to(device, torch.float64))
    of_processes = run.objective.gather(torch.stack(norms)[None]).isfinite().all(dim=0).tolist()  # the only reading
    return next((name for name, is_finite in zip(parts, of_processes, strict=True) if not is_finite), None)


def _floats(part: Any) -> Iterator[torch.Tensor]:
    """The tensors of numbers with a fraction in nested containers."""
    if isinstance(part, torch.Tensor):
        part = local_shard(part.detach())
        if part.is_floating_point() and part.numel():
            yield part
    elif isinstance(part, (dict, list, tuple)):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _floats(item)
