"""Losses and timesteps of a third-party script by noise level, as a table, a plot and a line at the end."""

import math
from pathlib import Path

import numpy as np
import torch

from ...core.words import counted
from ...diagnostics.timestep_log import TimestepLog, expected_probabilities, read_timesteps, write_timesteps
from ..host.source import NotRecognised
from ..installed_hooks import Hook, Host
from .clock import HostClock
from .losses import LossHook
from .losses import recognise_images as recognise

__all__ = ["make", "recognise"]

_NUM_BINS, _NUM_ROWS = 10, 100
_LOSSES_PER_BIN = 4  # in a row, on average


def make(host: Host) -> Hook:
    recognise(host.script)
    return LogHook(host.hooks["clock"], host.need("weighting"))


class LogHook:
    """
    Sums the losses of single images before any weight by noise level, and writes `lrlab/timesteps.parquet` and `.png` into
    the script's output folder.
    """

    def __init__(self, clock: HostClock, losses: LossHook):
        self.clock, self.run, self.losses, self.timesteps = clock, clock.run, losses, losses.timesteps
        self.log: TimestepLog | None = None  # from the first timesteps on
        self.option, self.is_active, self.is_ended = "--log_timesteps", True, False
        self.num_seen = 0  # batches whose losses were seen
        self._first = self._due = self._interval = 0  # updates: start and end of a row, and its length
        losses.on_losses.append(self.run.unless_refused(self, self._add))

    def install(self) -> None:
        self.timesteps.on_timesteps.append(self.run.unless_refused(self, self._at_timesteps))
        self.run.on_end.append(self._write)

    def _at_timesteps(self, update: int) -> None:
        if self.log is None:
            self._begin(update)
        if update >= self._due:
            self._close_row(update)

    def _begin(self, update: int) -> None:
        if not self.run.arguments.get("output_dir"):
            raise NotRecognised("it has no --output_dir for the log; give it one, or remove the option")
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

    def _add(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        if self.log is None:
            return
        if len(losses) != len(timesteps):
            drawn = counted(len(timesteps), "timestep")
            raise NotRecognised(f"it computes a loss of {counted(len(losses), 'image')} after drawing {drawn}")
        self.num_seen += 1
        self.log.add(timesteps, losses)

    # --- written ------------------------------------------------------------------------------------------------------

    def _close_row(self, update: int) -> None:
        """Adds the row of the updates since the last one, at the same update in all processes."""
        assert self.log is not None
        self.log.add_row(update, self._expected(update))
        self._first, self._due = update, update + self._interval

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
