"""Losses and timesteps of a third-party script by noise level, as a table, a plot and a line at the end."""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ...core.errors import LabError
from ...core.words import counted
from ...diagnostics.timestep_log import TimestepLog, expected_probabilities, read_timesteps, write_timesteps
from ..host.hook import Hook, Host
from ..script.source import LOSS, HostScript, NotRecognised, lines_of
from . import timesteps
from .clock import HostClock, clock_of
from .timesteps import TimestepHook

_NUM_BINS, _NUM_ROWS = 10, 100
_LOSSES_PER_BIN = 4  # in a row, on average


def recognise(script: HostScript) -> str:
    timesteps.recognise(script)
    timesteps.check_one_loss(script)
    if not script.calls(LOSS):
        raise NotRecognised(f"it does not call F.{LOSS}, so the losses of single images are not visible")
    return f"F.{LOSS} shows the loss of each image ({lines_of(script.calls(LOSS))})"


def make(host: Host) -> Hook:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        remedy = "pip install pyarrow"
        if "numpy" in str(error).lower():  # it needs a newer NumPy, which pip does not know
            remedy = "pip install 'pyarrow<20', which works with NumPy 1.26"
        raise LabError(f"--log_timesteps: {error}. Hint: {remedy}.") from error
    return LogHook(host.script, clock_of(host), cast(TimestepHook, host.hooks["timesteps"]))


class LogHook:
    """
    Sums the losses of single images before any weight by noise level, as the script passes predictions and targets to
    `F.mse_loss`, and writes `lrlab/timesteps.parquet` and `.png` into its output folder.
    """

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook):
        recognise(script)
        self.script, self.clock, self.run, self.timesteps = script, clock, clock.run, timesteps
        self.log: TimestepLog | None = None  # from the first timesteps on
        self.is_active, self.is_ended = True, False
        self.num_seen = 0  # batches of timesteps, up to the last whose loss was seen
        self._first = self._due = self._interval = 0  # updates: start and end of a row, and its length

    def install(self) -> None:
        self.timesteps.on_timesteps.append(self._at_timesteps)
        self.run.patches.wrap(torch.nn.functional, LOSS, self._log_loss)
        self.run.on_end.append(self._write)

    def _at_timesteps(self, update: int) -> None:
        if self.is_active and self.log is None:
            self._begin(update)
        if self.is_active and update >= self._due:
            self._close_row(update)

    def _begin(self, update: int) -> None:
        if not self.run.arguments.get("output_dir"):
            self._refuse("it has no --output_dir for the log; give it one, or remove the option")
            return
        assert self.timesteps.levels is not None
        assert self.timesteps.timesteps is not None
        accelerator, device = self.run.accelerator, self.timesteps.timesteps.device
        self.log = TimestepLog(_NUM_BINS, self.timesteps.levels.num_train_timesteps, device, accelerator.gather)
        if update:
            self.log.restore(read_timesteps(self._table), update)
        losses = accelerator.num_processes * accelerator.gradient_accumulation_steps * len(self.timesteps.timesteps)
        rows = math.ceil((self.clock.count_updates() or 1000) / _NUM_ROWS)
        self._interval = max(rows, math.ceil(_NUM_BINS * _LOSSES_PER_BIN / losses))
        self._first, self._due = update, update + self._interval

    def _refuse(self, reason: str) -> None:
        self.is_active = False
        self.run.refuse("--log_timesteps", NotRecognised(reason))

    def _log_loss(self, mse_loss: Any, prediction: Any, target: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        timesteps = self._new_timesteps()
        if timesteps is not None and len(prediction) != len(timesteps):
            drawn = counted(len(timesteps), "timestep")
            self._refuse(f"it computes a loss of {counted(len(prediction), 'image')} after drawing {drawn}")
        elif timesteps is not None:
            with torch.no_grad():
                assert self.log is not None
                self.log.add(timesteps, (prediction - target).float().square().flatten(1).mean(1))
        return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))

    def _new_timesteps(self) -> torch.Tensor | None:
        """The last timesteps at their first loss."""
        hook = self.timesteps
        is_new = self.is_active and self.log is not None and hook.num_seen > self.num_seen
        if not is_new or not self.script.is_calling(self.script.calls(LOSS)):
            return None
        self.num_seen = hook.num_seen
        return hook.timesteps

    # --- written ------------------------------------------------------------------------------------------------------

    def _close_row(self, update: int) -> None:
        """Adds the row of the updates since the last one, at the same update in all processes."""
        assert self.log is not None
        self.log.add_row(update, self.log.take_sums(), self._expected(update))
        self._first, self._due = update, update + self._interval
        if self.run.accelerator.is_main_process:
            self.run.log({f"loss_at_timesteps/{name}": value for name, value in self.log.last_means.items()}, update)

    def _expected(self, update: int) -> np.ndarray | None:
        """The probabilities of timesteps since the last row; `None` for a density of the script's own."""
        assert self.log is not None
        if self.timesteps.sampler is not None:
            return expected_probabilities(self.timesteps.sampler, self._first, update - 1)
        return np.full(self.log.starts[-1], 1 / self.log.starts[-1]) if self.timesteps.pattern == "index" else None

    def _write(self) -> None:
        self.is_ended = True
        if self.log is None or not self.is_active:
            return
        if self.clock.update > self._first:
            self._close_row(self.clock.update)
        self._write_rows()
        # With gloo, a process that exits right after a gather may deadlock: the thread that frees the gathered tensors waits
        # for Python's lock, which is held while the process group is freed and waits for that thread.
        self.run.accelerator.wait_for_everyone()

    def _write_rows(self) -> None:
        from ...diagnostics.plot import plot_timesteps

        if self.log is None or not len(self.log.table) or not self.run.accelerator.is_main_process:
            return
        self.run.lab_folder.mkdir(parents=True, exist_ok=True)
        write_timesteps(self.log.table, self._table)
        plot_timesteps(self.log.table, self._table.with_suffix(".png"))

    @property
    def _table(self) -> Path:
        return self.run.lab_folder / "timesteps.parquet"

    def report(self) -> str:
        was_seen = self.is_active and self.num_seen > 0
        if was_seen and not self.is_ended:  # the script failed
            self._write_rows()
        means = self.log.last_means if self.log is not None and self.is_active else {}
        means = {name: value for name, value in means.items() if np.isfinite(value)}
        if self.log is None or not means:
            return (
                f"--log_timesteps: no row was added, since {'the script did not end' if was_seen else 'no loss was seen'}."
            )
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        last = "" if self.is_ended else f" The script did not end: this is up to update {self.log.table['update'][-1]}."
        return (
            f"--log_timesteps: the loss is highest at timesteps {high} ({means[high]:.3g}) and lowest at {low} "
            f"({means[low]:.3g}) at the end; {counted(self.log.num_spikes, 'spike')}. See "
            f"{self._table.with_suffix('.png')}.{last}"
        )
