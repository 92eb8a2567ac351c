"""Divergence of a run, which stops it."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..core.errors import Diverged
from ..core.words import counted
from .checkpoint_writer import CheckpointWriter
from .run_state import RunState


class DivergenceGuard:
    """Decides when a run has diverged."""

    def __init__(self, run: RunState, checkpoints: CheckpointWriter):
        self.run, self.checkpoints = run, checkpoints
        self.num_skipped = self._skipped_in_a_row = 0  # updates with gradients that are not finite

    def error(self, what: str = "The loss is not finite") -> Diverged:
        """The error for a run that diverges now, with the remedy."""
        self.checkpoints.finish()  # the message names the last one
        run, last = self.run, self.checkpoints.folder.checkpoints()
        lr = run.current_lr * (1.0 if run.lr_factor is None else run.lr_factor)
        kept = f" The last checkpoint with finite weights is {last[-1]}." if last else ""
        return Diverged(
            f"{what} around update {run.update} at learning rate {lr:.3g}: training has diverged. Lower --learning_rate, "
            f"lengthen --lr_warmup_steps or lower --max_grad_norm.{kept}"
        )

    def count_skipped(self, was_skipped: bool) -> None:
        """Counts an update that was skipped or not; raises `Diverged` after more in a row than are allowed."""
        self.num_skipped += was_skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
        if self._skipped_in_a_row > (most := self.run.config.skip_bad_updates or 0):
            raise self.error(f"The gradients of {counted(most + 1, 'update')} in a row are not finite")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_updates": {"total": self.num_skipped, "in_a_row": self._skipped_in_a_row}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        skipped = state["skipped_updates"]
        self.num_skipped, self._skipped_in_a_row = skipped["total"], skipped["in_a_row"]


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
        part = part.detach()
        if part.is_floating_point() and part.numel():
            yield part
    elif isinstance(part, (dict, list, tuple)):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _floats(item)
