"""The gradient norms of a script's updates, before clipping, and the learning rates of optimizers that find them."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..host.hook import Hook, Host
from .clock import HostClock, clock_of

_NUM_ROWS = 100


def make(host: Host) -> Hook:
    return UpdateLog(clock_of(host))


class UpdateLog:
    """
    Follows `Accelerator.clip_grad_norm_` and the optimizer, for the script's tracker and a line at the end.

    Norms stay on the device until a row of updates ends. Only norms that the script computes are logged.
    """

    def __init__(self, clock: HostClock):
        self.clock, self.run = clock, clock.run
        self._norm: torch.Tensor | None = None  # of the coming update
        self._norms: list[tuple[torch.Tensor, int]] = []  # with their updates, since the last row
        self._groups: list[dict[str, Any]] = []  # the values of effective learning rates at the last update
        self.num_seen = self._num_closed = 0  # updates
        self._has_warned = False
        self._last_mean, self._largest, self._sum, self._count = math.nan, (-math.inf, 0), 0.0, 0

    def install(self) -> None:
        from accelerate import Accelerator

        def clip_and_remember(clip: Any, accelerator: Any, parameters: Any, /, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, Iterator):
                parameters = list(parameters)
                if not parameters:
                    self._warn()
                    return clip(accelerator, parameters, *args, **kwargs)
            norm = clip(accelerator, parameters, *args, **kwargs)
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP 2 shards it
            self._norm = whole.detach() if isinstance(whole, torch.Tensor) else None
            return norm

        self.run.patches.wrap(Accelerator, "clip_grad_norm_", clip_and_remember)
        self.run.on_update.append(self._after_update)
        self.run.on_end.append(self._close_row)

    def _warn(self) -> None:
        if not self._has_warned:
            self.run.warn(
                "no gradient is clipped: the script passes accelerator.clip_grad_norm_ a filter() or another iterator that "
                "was already consumed, for example by its optimizer. Make it a list in the script."
            )
        self._has_warned = True

    @property
    def _update(self) -> int:
        return self.clock.update if self.clock.counts else self.num_seen

    def _after_update(self) -> None:
        self.num_seen += 1
        # Copied before the schedule changes the learning rate. A `d` on the device is not read here.
        groups = self.run.optimizer.param_groups if self.run.optimizer is not None else []
        self._groups = [{name: group[name] for name in ("lr", "d", "scheduled_lr") if name in group} for group in groups]
        if self._norm is not None:
            self._norms.append((self._norm, self._update))
            self._norm = None
        if self.num_seen % math.ceil((self.clock.count_updates() or 1000) / _NUM_ROWS) == 0:
            self._close_row()

    def _close_row(self) -> None:
        if self._num_closed == self.num_seen:
            return
        self._num_closed = self.num_seen
        values = dict(self._effective_lrs())
        if self._norms:
            norms, updates = zip(*self._norms, strict=True)
            numbers = torch.stack(norms).tolist()  # the only synchronization with the device
            finite = [(norm, update) for norm, update in zip(numbers, updates, strict=True) if math.isfinite(norm)]
            self._norms = []
            if finite:
                total = sum(norm for norm, _ in finite)
                self._largest = max(self._largest, max(finite))
                values["grad_norm"] = self._last_mean = total / len(finite)
                self._sum, self._count = self._sum + total, self._count + len(finite)
        if values and self.run.accelerator.trackers:
            self.run.log(values, self._update)

    def _effective_lrs(self) -> list[tuple[str, float]]:
        """The effective learning rate of each group that has one, by its name in the tracker."""
        lrs = [lr for group in self._groups if (lr := effective_lr(group)) is not None]
        return [(f"effective_lr_{index}" if len(lrs) > 1 else "effective_lr", lr) for index, lr in enumerate(lrs)]

    def report(self) -> str:
        """The norms and the effective learning rates; empty if there are none."""
        lines = []
        with contextlib.suppress(RuntimeError):  # of a device that failed
            if self._norms:
                self._close_row()  # for a script that does not end its training
        if self._count:
            mean, (largest, update) = self._sum / self._count, self._largest
            lines.append(
                f"Gradient norm before clipping: {mean:.3g} on average, {self._last_mean:.3g} at the end, "
                f"and at most {largest:.3g}, at update {update}."
            )
        if lrs := self._effective_lrs():
            shown = ", ".join(f"{lr:.4g}" for _, lr in lrs)
            lines.append(f"Effective learning rate at the last update: {shown}.")
        return " ".join(lines)


def effective_lr(group: dict[str, Any]) -> float | None:
    """The learning rate of the last step where it is not `lr`: `d * lr` (Prodigy), or schedule-free's after its warm-up."""
    if "d" in group:
        return float(group["d"]) * float(group["lr"])
    return float(group["scheduled_lr"]) if "scheduled_lr" in group else None
