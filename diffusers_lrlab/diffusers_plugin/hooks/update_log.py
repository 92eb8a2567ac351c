"""A script's updates: the norm of the gradient before it was clipped, and the rates of optimizers that find them."""

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
    Follows `Accelerator.clip_grad_norm_` and the optimizer, into the script's tracker and a line at the end.

    Norms stay on the device until a row of updates ends; none is computed that the script does not compute.
    """

    def __init__(self, clock: HostClock):
        self.clock, self.run = clock, clock.run
        self._norm: torch.Tensor | None = None  # of the update to come
        self._norms: list[torch.Tensor] = []  # of the updates since the last row
        self._updates: list[int] = []
        self._groups: list[dict[str, Any]] = []  # what effective rates are made of, at the last update
        self.num_seen = self._num_closed = 0  # updates
        self._has_warned = False
        self._last_mean, self._largest, self._sum, self._count = math.nan, (-math.inf, 0), 0.0, 0

    def install(self) -> None:
        from accelerate import Accelerator

        def clip_and_remember(clip: Any, accelerator: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, Iterator):
                parameters = list(parameters)
                if not parameters:
                    self._warn()
                    return clip(accelerator, parameters, *args, **kwargs)
            norm = clip(accelerator, parameters, *args, **kwargs)
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP 2
            self._norm = whole.detach() if isinstance(whole, torch.Tensor) else None
            return norm

        self.run.patches.wrap(Accelerator, "clip_grad_norm_", clip_and_remember)
        self.run.on_update.append(self._after_update)
        self.run.on_end.append(self._close_row)

    def _warn(self) -> None:
        if not self._has_warned:
            self.run.warn(
                "No gradient is clipped: the script hands accelerator.clip_grad_norm_ a filter() or another iterator, which "
                "something else, such as its optimizer, has read to the end. Make it a list in the script."
            )
        self._has_warned = True

    @property
    def _update(self) -> int:
        return self.clock.update if self.clock.counts else self.num_seen

    def _after_update(self) -> None:
        self.num_seen += 1
        # As they are now: the schedule's next step changes the rate. A `d` on the device is not read here.
        groups = self.run.optimizer.param_groups if self.run.optimizer is not None else []
        self._groups = [{name: group[name] for name in ("lr", "d", "scheduled_lr") if name in group} for group in groups]
        if self._norm is not None:
            self._norms.append(self._norm)
            self._updates.append(self._update)
            self._norm = None
        if self.num_seen % math.ceil((self.clock.count_updates() or 1000) / _NUM_ROWS) == 0:
            self._close_row()

    def _close_row(self) -> None:
        if self._num_closed == self.num_seen:
            return
        self._num_closed = self.num_seen
        values = dict(self._effective_lrs())
        if self._norms:
            norms = torch.stack(self._norms).tolist()  # the only time that the device is waited for
            finite = [(norm, update) for norm, update in zip(norms, self._updates, strict=True) if math.isfinite(norm)]
            self._norms, self._updates = [], []
            if finite:
                self._largest = max(self._largest, max(finite))
                values["grad_norm"] = self._last_mean = sum(norm for norm, _ in finite) / len(finite)
                self._sum, self._count = self._sum + sum(norm for norm, _ in finite), self._count + len(finite)
        if values and self.run.accelerator.trackers:
            self.run.log(values, self._update)

    def _effective_lrs(self) -> list[tuple[str, float]]:
        """Of Prodigy, D-adaptation and schedule-free, by the name in the tracker: a group each."""
        rates = [rate for group in self._groups if (rate := effective_lr(group)) is not None]
        return [(f"effective_lr_{index}" if len(rates) > 1 else "effective_lr", rate) for index, rate in enumerate(rates)]

    def report(self) -> str:
        """The norms and, if there are any, the effective rates; empty without both."""
        lines = []
        with contextlib.suppress(RuntimeError):  # of a device that failed
            if self._norms:
                self._close_row()  # of a script that does not end its training
        if self._count:
            mean, (largest, update) = self._sum / self._count, self._largest
            lines.append(
                f"Gradient norm before clipping: {mean:.3g} on average, {self._last_mean:.3g} at the end, "
                f"and at most {largest:.3g}, at update {update}."
            )
        if rates := self._effective_lrs():
            shown = ", ".join(f"{rate:.4g}" for _, rate in rates)
            lines.append(f"Effective learning rate at the last update: {shown}.")
        return " ".join(lines)


def effective_lr(group: dict[str, Any]) -> float | None:
    """The rate of the last step where it is not the group's `lr`: `d * lr`, or schedule-free's after its own warm-up."""
    if "d" in group:
        return float(group["d"]) * float(group["lr"])
    return float(group["scheduled_lr"]) if "scheduled_lr" in group else None
