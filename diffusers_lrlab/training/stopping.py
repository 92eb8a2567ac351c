"""Why a run stops early: Ctrl-C or SIGTERM, after the current update and with a checkpoint, or divergence."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from ..core.environment import OTHERS_WAIT
from ..core.errors import Diverged
from ..core.program import SIGNALS
from ..core.words import counted
from .checkpoints import CheckpointWriter
from .run_state import RunState

_ECHO_SECONDS = 3


class InterruptGuard:
    """
    Notes SIGINT and SIGTERM during a `with` block; a second one ends the process immediately. An unhandled signal is passed
    to the previous handler.

    The processes agree over a process group on the CPU, without device synchronization.
    """

    def __init__(self) -> None:
        self._received, self._received_at = 0, 0.0
        self._group = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=OTHERS_WAIT)

    def __enter__(self) -> Self:
        # Only the main thread can handle signals; a run in another thread is stopped by its program.
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None and self._received:  # it arrived after the last check
            signal.raise_signal(self._received)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A launcher forwards signals that the terminal has sent to every process already: ignore an echo.
        if self._received and time.monotonic() - self._received_at > _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self._received:
            self._received, self._received_at = number, time.monotonic()

    def received(self) -> int:
        """The signal that any process has received, 0 without one; all processes must call it at the same update."""
        if self._group is None:
            return self._received
        number = torch.tensor(self._received)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)


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
        parts["moving average"] = run.average.shadow_params
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
