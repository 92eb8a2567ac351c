"""Losses and timesteps of a third-party script by noise level, as a table, a plot and a line at the end."""

import math
from typing import Any, cast

import numpy as np
import torch

from ...core.errors import LabError
from ...core.words import counted
from ...diagnostics.regression import BatchLosses, solve
from ...diagnostics.timestep_log import (
    TimestepLog,
    TimestepLosses,
    expected_probabilities,
    read_timesteps,
    table_of_rows,
    write_timesteps,
)
from ..host.files import first_problem
from ..host.hook import Host, StatefulHook
from ..script.source import LOSS, HostScript, NotRecognised, lines_of
from . import timesteps
from .clock import HostClock, clock_of
from .timesteps import TimestepHook

_NUM_BINS, _NUM_ROWS = 10, 100
_LOSSES_PER_BIN = 4  # of images in a row, on average
_BATCHES_PER_BIN = 16  # where only their mean losses are visible: fewer have unreliable variances
_NUM_GRADIENTS = 8  # of images, in one update and one process


def recognise(script: HostScript) -> str:
    timesteps.recognise(script)
    timesteps.check_one_loss(script)
    if script.calls(LOSS):
        return f"F.{LOSS} shows the loss of each image ({lines_of(script.calls(LOSS))})"
    if not script.calls("backward"):
        raise NotRecognised(f"it calls neither F.{LOSS} nor accelerator.backward")
    lines = lines_of(script.calls("backward"))
    return f"only the mean loss of a micro-batch is visible ({lines}); the means of noise levels follow by least squares"


def make(host: Host) -> StatefulHook:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        remedy = "pip install pyarrow"
        if "numpy" in str(error).lower():  # it needs a newer NumPy, which pip does not know
            remedy = "pip install 'pyarrow<20', which works with NumPy 1.26"
        raise LabError(f"--log_timesteps: {error}. Hint: {remedy}.") from error
    timestep_hook = cast(TimestepHook, host.hooks["timesteps"])
    return LogHook(host.script, clock_of(host), timestep_hook, host.options.timestep_grad_every)


class LogHook:
    """
    Sums losses by noise level, and writes `lrlab/timesteps.parquet` and `.png` into the script's output folder.

    Where the script calls `F.mse_loss`, these are the losses of single images before any weight. Elsewhere only the mean
    loss of a micro-batch is visible, with the script's own weights ([`diagnostics.regression`]). Every `grad_every` updates
    the hook also measures the gradients of up to 8 of these losses, where they are of single images.
    """

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook, grad_every: int | None = None):
        recognise(script)
        self.script, self.clock, self.run, self.timesteps = script, clock, clock.run, timesteps
        self.is_per_image = bool(script.calls(LOSS))
        self.log: TimestepLog | None = None  # from the first timesteps on
        self.is_active, self.is_ended = True, False
        self.grad_every, self._gradients_left, self._measured = grad_every, 0, -1
        self._sums: Any = None  # `TimestepLosses`, or `BatchLosses`
        self._gradients: Any = None  # `TimestepLosses` with norms in place of losses
        self._resumed: dict[str, Any] | None = None
        self.num_seen = 0  # batches of timesteps, up to the last whose loss was seen
        self._first = self._due = self._interval = 0  # updates: start and end of a row, and its length

    def install(self) -> None:
        from accelerate import Accelerator

        self.timesteps.on_timesteps.append(self._at_timesteps)
        if self.is_per_image:
            self.run.patches.wrap(torch.nn.functional, "mse_loss", self._log_loss)
        else:
            self.run.patches.wrap(Accelerator, "backward", self._log_backward)
        self.run.on_end.append(self._write)

    def _at_timesteps(self, update: int) -> None:
        if self.is_active and self.log is None:
            self._begin(update)
        if self.is_active and update >= self._due:
            self._close_row(update)
        if self.grad_every and update != self._measured:
            self._measured, self._gradients_left = update, 0 if update % self.grad_every else _NUM_GRADIENTS

    def _begin(self, update: int) -> None:
        if not self.run.arguments.get("output_dir"):
            self._refuse("it has no --output_dir for the log; give it one, or remove the option")
            return
        assert self.timesteps.levels is not None
        assert self.timesteps.timesteps is not None
        self.log = TimestepLog(_NUM_BINS, self.timesteps.levels.num_train_timesteps)
        if update and self._resumed is None:
            self.log.restore(read_timesteps(self.run.lab_folder / "timesteps.parquet"), update)
        accelerator = self.run.accelerator
        losses = accelerator.num_processes * accelerator.gradient_accumulation_steps
        losses *= len(self.timesteps.timesteps) if self.is_per_image else 1
        needed = _NUM_BINS * (_LOSSES_PER_BIN if self.is_per_image else _BATCHES_PER_BIN)
        rows = math.ceil((self.clock.count_updates() or 1000) / _NUM_ROWS)
        self._interval = max(rows, math.ceil(needed / losses))
        self._due = update + self._interval
        self._begin_row(update)
        if self._resumed is not None:
            self._restore(self._resumed)

    def state_dict(self, is_at_end: bool) -> dict[str, Any]:
        """The rows so far, and this process's sums for the next one."""
        if self.log is None:
            return {}
        state: dict[str, Any] = {}
        if self.run.accelerator.is_main_process:  # the same in all processes, and long; others save a state at each update
            state |= {"rows": self.log.table.to_pylist(), "last_means": self.log.last_means}
        state |= {"sums": self._sums.sums.tolist(), "gradients": self._gradients.sums.tolist()}
        state |= {"first": self._first, "due": self._due, "num_updates": self.clock.update}
        if is_at_end:  # a script that resumes there draws no timesteps
            expected = self._expected(self.clock.update)
            state |= {
                "num_train_timesteps": int(self.log.starts[-1]),
                "expected": expected if expected is None else [*expected],
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None

    def _restore(self, state: dict[str, Any]) -> None:
        assert self.log is not None
        self.log.restore(table_of_rows(state["rows"]), state["num_updates"] + 1)
        self.log.last_means, self._first, self._due = state["last_means"], state["first"], state["due"]
        for kept, saved in ((self._sums, state["sums"]), (self._gradients, state["gradients"])):
            kept.sums += torch.tensor(saved, dtype=torch.float64, device=kept.sums.device)

    def _begin_row(self, update: int) -> None:
        assert self.log is not None
        drawn = self.timesteps.timesteps
        starts, device = self.log.starts, self.run.accelerator.device if drawn is None else drawn.device
        self._first = update
        self._sums = TimestepLosses(starts, device) if self.is_per_image else BatchLosses(starts, device)
        self._gradients = TimestepLosses(starts, device)

    def _refuse(self, reason: str) -> None:
        self.is_active = False
        self.run.refuse("--log_timesteps", NotRecognised(reason))

    # --- observed -----------------------------------------------------------------------------------------------------

    def _new_timesteps(self, name: str) -> torch.Tensor | None:
        """The last timesteps at their first loss, for a call of the script to a function of this name."""
        hook = self.timesteps
        is_new = self.is_active and self.log is not None and hook.num_seen > self.num_seen
        if not is_new or self.script.caller(self.script.calls(name)) is None:
            return None
        self.num_seen = hook.num_seen
        return hook.timesteps

    def _log_loss(self, mse_loss: Any, prediction: Any, target: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        timesteps = self._new_timesteps(LOSS)
        if timesteps is not None and len(prediction) != len(timesteps):
            drawn = counted(len(timesteps), "timestep")
            self._refuse(f"it computes a loss of {counted(len(prediction), 'image')} after drawing {drawn}")
        elif timesteps is not None:
            with torch.set_grad_enabled(self._gradients_left > 0):
                errors = (prediction - target).float().square().flatten(1).mean(1)
            self._sums.add(timesteps, errors)
            self._measure(timesteps, errors)
        return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))

    def _log_backward(self, backward: Any, accelerator: Any, loss: torch.Tensor, /, **kwargs: Any) -> None:
        timesteps = self._new_timesteps("backward")
        if timesteps is not None:
            self._sums.add(timesteps[None], loss.reshape(1))
            self._measure(timesteps, loss[None])
        backward(accelerator, loss, **kwargs)

    def _measure(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Measures the gradients of single images' losses, if the parameters are not sharded."""
        from ...diagnostics.gradients import gradient_norms

        if not self._gradients_left:
            return
        reason = None
        if len(losses) != len(timesteps):
            reason = f"it shows only the mean loss of {counted(len(timesteps), 'image')}. Use a batch size of 1"
        elif self.run.accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
            reason = "its model is sharded"
        if reason:
            self.grad_every, self._gradients_left = None, 0
            self.run.refuse("--timestep_grad_every", NotRecognised(reason))
            return
        kept = slice(self._gradients_left)
        self._gradients_left -= len(losses[kept])
        parameters = [each for model in self.run.models for each in model.parameters() if each.requires_grad]
        norms = gradient_norms(losses[kept], parameters, self.run.accelerator.scaler)
        self._gradients.add(timesteps[kept], norms)

    # --- written ------------------------------------------------------------------------------------------------------

    def _close_row(self, update: int) -> None:
        """Adds the row of the updates since the last one, at the same update in all processes."""
        assert self.log is not None
        self._due, accelerator = update + self._interval, self.run.accelerator
        sums = accelerator.gather(self._sums.sums[None]).sum(0).cpu()
        expected = self._expected(update)
        if self.is_per_image:
            self.log.add_losses(update, sums, expected)
        elif (solved := solve(sums.numpy())) is not None:
            images, means, variances = solved
            self.log.add_means(update, images, means, variances * images, expected)
        else:
            return  # the next interval may add enough batches
        gradients = accelerator.gather(self._gradients.sums[None]).sum(0).cpu().numpy()
        if gradients[0].any():
            with np.errstate(invalid="ignore"):
                self.log.add_gradients(update, gradients[1] / gradients[0])
        self._begin_row(update)
        if accelerator.is_main_process:
            self.run.log({f"loss_at_timesteps/{name}": value for name, value in self.log.last_means.items()}, update)

    def _expected(self, update: int) -> np.ndarray | None:
        """The probabilities of timesteps since the last row; `None` for a density of the script's own."""
        assert self.log is not None
        if self.timesteps.levels is None and self._resumed is not None:
            return None if self._resumed["expected"] is None else np.array(self._resumed["expected"])
        if self.timesteps.sampler is not None:
            return expected_probabilities(self.timesteps.sampler, self._first, update - 1)
        return np.full(self.log.starts[-1], 1 / self.log.starts[-1]) if self.timesteps.pattern == "index" else None

    def _write(self) -> None:
        self.is_ended = True
        if self.log is None and self._resumed is not None and "expected" in self._resumed:
            self.log = TimestepLog(_NUM_BINS, self._resumed["num_train_timesteps"])
            self._begin_row(self._resumed["first"])
            self._restore(self._resumed)
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
        write_timesteps(self.log.table, self.run.lab_folder / "timesteps.parquet")
        weights = "before weights" if self.is_per_image else "weighted as in the script"
        titles = {"loss_mean": f"training loss, {weights}", "grad_norm": "gradient norm of single images"}
        plot_timesteps(self.log.table, self.run.lab_folder / "timesteps.png", titles)

    def report(self) -> str:
        was_seen = self.is_active and self.num_seen > 0
        if was_seen and not self.is_ended:  # a script that failed, or does not end its training
            self._write_rows()
        means = self.log.last_means if self.log is not None and self.is_active else {}
        means = {name: value for name, value in means.items() if np.isfinite(value)}
        if self.log is None or not means:
            unclear = "the losses do not distinguish noise levels" if self.is_ended else "the script did not end"
            return f"--log_timesteps: no row was added, since {unclear if was_seen else 'no loss was seen'}."
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        how = "losses of images" if self.is_per_image else "least squares from the losses of micro-batches"
        return (
            f"--log_timesteps: by {how}, the loss is highest at timesteps {high} ({means[high]:.3g}) and lowest at {low} "
            f"({means[low]:.3g}) at the end; {counted(self.log.num_spikes, 'spike')}. {self._files(self.log)}"
        )

    def _files(self, log: TimestepLog) -> str:
        table, plot = (self.run.lab_folder / f"timesteps.{end}" for end in ("parquet", "png"))
        if problem := first_problem(table, plot):
            return f"The log is lost: {problem}."
        last = "" if self.is_ended else f" The script did not end: this is up to update {log.table['update'][-1]}."
        return f"See {plot}.{last}"
