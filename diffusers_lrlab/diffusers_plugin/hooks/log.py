"""What each noise level does in a script that is not ours: losses and density, as a table, a picture and a line of words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ...core.words import counted
from ..host.files import problem_with
from ..host.hook import Host, StatefulHook
from ..script.source import LOSS, HostScript, NotRecognised, called_in
from . import timesteps
from .clock import HostClock, clock_of
from .timesteps import TimestepHook

if TYPE_CHECKING:
    from ...diagnostics.regression import BatchLosses
    from ...diagnostics.timestep_log import TimestepLog, TimestepLosses

_NUM_BINS, _NUM_ROWS = 10, 100
_LOSSES_PER_BIN = 4  # of images, seen in a row, on average
_BATCHES_PER_BIN = 16  # where their mean losses are all that is seen: fewer have no trustworthy variances
_GRADIENTS = 8  # of images, at one update and in one process


def recognise(script: HostScript) -> str:
    """Where losses can be seen; [`NotRecognised`] if nowhere, or if timesteps cannot."""
    timesteps.recognise(script)
    timesteps.check_one_loss(script)
    if script.calls(LOSS):
        return f"F.{LOSS} shows the loss of each image ({called_in(script.calls(LOSS))})"
    if not script.calls("backward"):
        raise NotRecognised(f"it calls neither F.{LOSS} nor accelerator.backward")
    lines = called_in(script.calls("backward"))
    return f"the mean loss of a micro-batch is seen ({lines}); levels' means follow from many of them by least squares"


def make(host: Host) -> StatefulHook:
    timesteps = cast(TimestepHook, host.hooks["timesteps"])
    return LogHook(host.script, clock_of(host), timesteps, host.options.timestep_grad_every)


class LogHook:
    """
    Sums up the losses of a script by noise level, and writes `lrlab/timesteps.parquet` and `.png` into its output folder.

    Where the script reduces `F.mse_loss`, these are the losses of single images before any weight; elsewhere only the mean
    loss of a micro-batch is seen, with the script's own weights ([`diagnostics.regression`]). Every `grad_every` updates
    the gradients of up to 8 of these losses are measured, too: of single images, where these can be told apart.
    """

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook, grad_every: int | None = None):
        recognise(script)
        self.script, self.clock, self.run, self.timesteps = script, clock, clock.run, timesteps
        self.is_per_image = bool(script.calls(LOSS))
        self.log: TimestepLog | None = None  # from the first draw on
        self.is_active, self.is_ended = True, False
        self.grad_every, self._gradients_left, self._measured = grad_every, 0, -1
        self._sums: TimestepLosses | BatchLosses | None = None
        self._gradients: TimestepLosses | None = None  # norms in place of losses
        self._resumed: dict[str, Any] | None = None
        self.num_seen = 0  # the last draw whose loss was seen
        self._first = self._due = self._interval = 0  # updates: the first of a row, where it ends, and between ends

    def install(self) -> None:
        from accelerate import Accelerator

        self.timesteps.on_draw.append(self._at_draw)
        if self.is_per_image:
            self.run.patches.wrap(torch.nn.functional, "mse_loss", self._log_loss)
        else:
            self.run.patches.wrap(Accelerator, "backward", self._log_backward)
        self.run.on_end.append(self._write)

    def _at_draw(self, update: int) -> None:
        if self.is_active and self.log is None:
            self._begin(update)
        if self.is_active and update >= self._due:
            self._close_row(update)
        if self.grad_every and update != self._measured:
            self._measured, self._gradients_left = update, 0 if update % self.grad_every else _GRADIENTS

    def _begin(self, update: int) -> None:
        from ...diagnostics.timestep_log import TimestepLog, read_timesteps

        if not self.run.arguments.get("output_dir"):
            self._refuse("it has no --output_dir for what is logged")
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
            self._go_on(self._resumed)

    def state_dict(self, is_at_end: bool) -> dict[str, Any]:
        """For a checkpoint from which a resume is exact: the rows, and the sums of this process for the next one."""
        if self.log is None or self._sums is None or self._gradients is None:
            return {}
        state: dict[str, Any] = {}
        if self.run.accelerator.is_main_process:  # in all processes the same, and long; others make a state at each update
            state |= {"rows": self.log.table.to_pylist(), "last_means": self.log.last_means}
        state |= {"sums": self._sums.sums.tolist(), "gradients": self._gradients.sums.tolist()}
        state |= {"first": self._first, "due": self._due, "num_updates": self.clock.update}
        if is_at_end:
            # A script that is resumed from here draws nothing, by which its levels and its density would be known.
            expected = self._expected(self.clock.update)
            state |= {
                "num_train_timesteps": int(self.log.starts[-1]),
                "expected": expected if expected is None else [*expected],
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None

    def _go_on(self, state: dict[str, Any]) -> None:
        from ...diagnostics.timestep_log import table_of_rows

        assert self.log is not None
        self.log.restore(table_of_rows(state["rows"]), state["num_updates"] + 1)
        self.log.last_means, self._first, self._due = state["last_means"], state["first"], state["due"]
        for kept, saved in ((self._sums, state["sums"]), (self._gradients, state["gradients"])):
            cast(Any, kept).sums += torch.tensor(saved, dtype=torch.float64, device=cast(Any, kept).sums.device)

    def _begin_row(self, update: int) -> None:
        from ...diagnostics.regression import BatchLosses
        from ...diagnostics.timestep_log import TimestepLosses

        assert self.log is not None
        drawn = self.timesteps.timesteps
        starts, device = self.log.starts, self.run.accelerator.device if drawn is None else drawn.device
        self._first = update
        self._sums = TimestepLosses(starts, device) if self.is_per_image else BatchLosses(starts, device)
        self._gradients = TimestepLosses(starts, device)

    def _refuse(self, reason: str) -> None:
        self.is_active = False
        self.run.refuse("--log_timesteps", NotRecognised(reason))

    # --- what is seen ------------------------------------------------------------------------------------------------

    def _is_first_of_draw(self) -> bool:
        """Whether the last draw has no loss yet, and is to have one."""
        hook = self.timesteps
        return self.is_active and self._sums is not None and hook.timesteps is not None and hook.num_seen > self.num_seen

    def _log_loss(self, mse_loss: Any, prediction: Any, target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.script.caller(self.script.calls(LOSS)) is not None and self._is_first_of_draw():
            timesteps = cast(torch.Tensor, self.timesteps.timesteps)
            self.num_seen = self.timesteps.num_seen
            if len(prediction) != len(timesteps):
                self._refuse(
                    f"a loss is of {counted(len(prediction), 'image')}, where {counted(len(timesteps), 'timestep')} "
                    "were drawn"
                )
            else:
                with torch.no_grad():
                    errors = (prediction.detach() - target.detach()).float().square().flatten(1).mean(1)
                    cast(Any, self._sums).add(timesteps, errors)
                if self._gradients_left:
                    errors = (prediction - target).float().square().flatten(1).mean(1)
                    self._measure(timesteps, errors)
        return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))

    def _log_backward(self, backward: Any, accelerator: Any, loss: torch.Tensor, **kwargs: Any) -> None:
        if self.script.caller(self.script.calls("backward")) is not None and self._is_first_of_draw():
            self.num_seen = self.timesteps.num_seen
            cast(Any, self._sums).add(cast(torch.Tensor, self.timesteps.timesteps)[None], loss.reshape(1))
            if self._gradients_left:
                self._measure(cast(torch.Tensor, self.timesteps.timesteps), loss[None])
        backward(accelerator, loss, **kwargs)

    def _measure(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Gradients of these losses, if they are of one image each, and the parameters are whole."""
        from ...diagnostics.gradients import gradient_norms

        reason = None
        if len(losses) != len(timesteps):
            reason = f"it shows the mean loss of {counted(len(timesteps), 'image')}. A batch of 1 shows that of one"
        elif self.run.accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
            reason = "each process has a part of the model only"
        if reason:
            self.grad_every, self._gradients_left = None, 0
            self.run.refuse("--timestep_grad_every", NotRecognised(reason))
            return
        kept = slice(self._gradients_left)
        self._gradients_left -= len(losses[kept])
        parameters = [each for model in self.run.models for each in model.parameters() if each.requires_grad]
        norms = gradient_norms(losses[kept], parameters, self.run.accelerator.scaler)
        cast("TimestepLosses", self._gradients).add(timesteps[kept], norms)

    # --- what is written ---------------------------------------------------------------------------------------------

    def _close_row(self, update: int) -> None:
        """The row of the updates since the last one. All processes come here at the same update."""
        from ...diagnostics.regression import solve

        assert self.log is not None
        assert self._sums is not None
        self._due, accelerator = update + self._interval, self.run.accelerator
        sums = accelerator.gather(self._sums.sums[None]).sum(0).cpu()
        expected = self._expected(update)
        if self.is_per_image:
            self.log.add_losses(update, sums, expected)
        elif (solved := solve(sums.numpy())) is not None:
            images, means, variances = solved
            self.log.add_means(update, images, means, variances * images, expected)
        else:
            return  # with those of the next interval there may be enough
        gradients = accelerator.gather(cast(Any, self._gradients).sums[None]).sum(0).cpu().numpy()
        if gradients[0].any():
            with np.errstate(invalid="ignore"):
                self.log.add_gradients(update, gradients[1] / gradients[0])
        self._begin_row(update)
        if accelerator.is_main_process:
            self.run.log({f"loss_at_timesteps/{name}": value for name, value in self.log.last_means.items()}, update)

    def _expected(self, update: int) -> np.ndarray | None:
        """The probabilities of timesteps in the updates since the last row; `None` of a density of the script's own."""
        from ...diagnostics.timestep_log import expected_probabilities

        assert self.log is not None
        if self.timesteps.levels is None and self._resumed is not None:
            return None if self._resumed["expected"] is None else np.array(self._resumed["expected"])
        if self.timesteps.sampler is not None:
            return expected_probabilities(self.timesteps.sampler, self._first, update - 1)
        return np.full(self.log.starts[-1], 1 / self.log.starts[-1]) if self.timesteps.form == "index" else None

    def _write(self) -> None:
        from ...diagnostics.timestep_log import TimestepLog

        self.is_ended = True
        if self.log is None and self._resumed is not None and "expected" in self._resumed:
            self.log = TimestepLog(_NUM_BINS, self._resumed["num_train_timesteps"])
            self._begin_row(self._resumed["first"])
            self._go_on(self._resumed)
        if self.log is None or not self.is_active:
            return
        if self.clock.update > self._first:
            self._close_row(self.clock.update)
        self._write_rows()
        # With gloo, a process that ends at once after a gather may wait forever: the thread that frees the gathered tensors
        # waits for Python's lock, and whoever frees the process group with that lock held waits for the thread.
        self.run.accelerator.wait_for_everyone()

    def _write_rows(self) -> None:
        from ...diagnostics.plot import plot_timesteps
        from ...diagnostics.timestep_log import write_timesteps

        if self.log is None or not len(self.log.table) or not self.run.accelerator.is_main_process:
            return
        self.run.lab_folder.mkdir(parents=True, exist_ok=True)
        write_timesteps(self.log.table, self.run.lab_folder / "timesteps.parquet")
        weights = "before weights" if self.is_per_image else "weighted as in the script"
        titles = {"loss_mean": f"training loss, {weights}", "grad_norm": "gradient norm of single images"}
        plot_timesteps(self.log.table, self.run.lab_folder / "timesteps.png", titles)

    def report(self) -> str:
        if not self.is_ended and self.is_active and self.num_seen:  # a script that failed, or does not end its training
            self._write_rows()
        means = {name: value for name, value in self.log.last_means.items() if np.isfinite(value)} if self.log else {}
        if not means and self.num_seen and self.is_active and not self.is_ended:
            return "--log_timesteps: no row was written, since the script did not end."
        if not means or self.log is None or not self.is_active:
            seen = "the losses do not tell noise levels apart" if self.num_seen and self.is_active else "no loss was seen"
            return f"--log_timesteps: {seen}, and no row is added."
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        how = "losses of images" if self.is_per_image else "least squares from the losses of micro-batches"
        return (
            f"--log_timesteps: by {how}, the loss is highest at timesteps {high} ({means[high]:.3g}) and lowest at {low} "
            f"({means[low]:.3g}) at the end; {counted(self.log.num_spikes, 'spike')}. {self._where()}"
        )

    def _where(self) -> str:
        """The files, which are looked at first."""
        assert self.log is not None
        parts = [self.run.lab_folder / f"timesteps.{end}" for end in ("parquet", "png")]
        if problem := next(filter(None, map(problem_with, parts)), None):
            return f"The log is lost: {problem}."
        last = "" if self.is_ended else f" The script did not end: this is up to update {self.log.table['update'][-1]}."
        return f"See {parts[1]}.{last}"
