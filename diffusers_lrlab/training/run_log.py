"""The log of a run: rows of losses and gradient norms, validation, losses by noise level, samples, warnings."""

import math
import sys
import time
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from ..diagnostics.gradient_probes import GradientProbes
from ..diagnostics.lr_warnings import find_lr_warnings
from ..diagnostics.timestep_log import TimestepLog, expected_probabilities, read_timesteps
from .checkpoints import DivergenceGuard
from .pipeline import save_preview
from .results import results_of
from .run_folder import RunFolder
from .run_state import RunState
from .trackers import log_images, scalars_of


class RunLog:
    """Writes the log of a run into its folder and to its trackers."""

    def __init__(self, run: RunState, accelerator: Accelerator, folder: RunFolder, divergence: DivergenceGuard):
        self.run, self.accelerator, self.folder, self.divergence = run, accelerator, folder, divergence
        # Since the last row, where they are read off the device: loss, unweighted loss, gradient norm, updates.
        self.sums = torch.zeros(4, device=accelerator.device)
        self.observer: TimestepLog | None = None  # of losses by noise level
        if num_bins := run.config.log_timestep_bins:
            self.observer = TimestepLog(num_bins, run.process.num_train_timesteps, accelerator.device, run.objective.gather)
        self.probes: GradientProbes | None = None
        if self.observer is not None and run.config.timestep_grad_every and accelerator.is_main_process:
            self.probes = GradientProbes(run.data.held_out, run.process, self.observer.starts, accelerator.device)
        self.lr_warnings: dict[str, str] = {}  # shown ones, by name
        self.shows = True  # on the screen

    def add(self, loss: torch.Tensor, norm: torch.Tensor, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds an update: its loss and gradient norm, and the unweighted losses at its timesteps."""
        self.sums += torch.stack([loss, losses.mean(), norm.detach().to(loss), torch.ones_like(loss)])
        if self.observer is not None:
            self.observer.add(timesteps, losses)

    def mean_losses(self) -> tuple[float | None, ...]:
        """Loss, unweighted loss and gradient norm since the last row, read off the device; `None` without any update."""
        *sums, count = self.accelerator.reduce(self.sums, "mean").tolist()
        return tuple(total / count if count else None for total in sums)

    def write_row(self, lrs: dict[str, float], momentum: float | None, bar: tqdm) -> None:
        """Reads the sums off the device and writes a row; rates and momentum are those of the update just done."""
        run, divergence = self.run, self.divergence
        loss, unweighted, norm = self.mean_losses()  # no columns if every update since the last row was skipped
        self.sums.zero_()
        if loss is not None and norm is not None and not math.isfinite(loss + norm):
            raise divergence.error()
        row: dict[str, Any] = {
            "update": run.update - 1,
            "loss": loss,
            **lrs,
            "beta1": momentum,
            "grad_norm": norm,
            "images_seen": run.update * run.plan.layout.global_batch,
            "largest_lr_deviation": run.audit.largest_lr_deviation,
            "unweighted_loss": unweighted if run.objective.is_weighted else None,
            "ema_decay": None if run.average is None else run.average.decay,
            "skipped_updates": divergence.num_skipped or None,
        }
        row = {key: value for key, value in row.items() if value is not None}
        first = (run.update - 1) // run.config.logging_steps * run.config.logging_steps
        if self.observer is not None and loss is not None:
            expected = expected_probabilities(run.objective.sampler, first, run.update - 1)
            if spikes := self.observer.add_row(run.update - 1, expected):
                row["loss_spike_bins"] = spikes
        if (began := run.objective.sampler.began()) and began > first:
            self._say(f"{run.config.timestep_sampler}: its own density of the timesteps began at update {began:,}.")
        self.folder.append_metrics(row)
        self.accelerator.log(scalars_of(row), step=run.update)
        bar.set_postfix(loss="–" if loss is None else f"{loss:.4f}", lr=f"{lrs['lr']:.3g}", refresh=False)

    def validate(self) -> None:
        """Writes the validation losses of the raw and the averaged weights; a schedule may follow the former."""
        run, started = self.run, time.perf_counter()
        of_images = run.validation_losses()
        run.evaluation_seconds += time.perf_counter() - started
        # A schedule that follows the loss must see the same number everywhere.
        broadcast_object_list(values := [{name: float(losses.mean()) for name, losses in of_images.items()}])
        losses = values[0]
        if not all(map(math.isfinite, losses.values())):
            raise self.divergence.error()
        if self.observer is not None and run.validation is not None:
            self.observer.add_validation(run.update, run.validation.timesteps.cpu().numpy(), of_images)
        self.folder.append_metrics({"update": run.update, **losses})
        self.accelerator.log(scalars_of(losses), step=run.update)
        run.follow_loss(losses["validation_loss"])

    def measure_gradients(self) -> None:
        """Logs the gradients at the probes of the main process; the others do not wait."""
        if self.observer is not None and self.probes is not None:
            self.observer.add_gradients(self.run.update, *self.probes(self.run.model))

    def warn_of_lr(self) -> None:
        """Shows warnings about the learning rate from the rows so far, each once."""
        plan, objective = self.run.plan, self.run.objective
        still = not (objective.sampler.moves or objective.follows_losses)
        rows, max_norm = self.folder.read_metrics(), self.run.config.max_grad_norm
        warnings = find_lr_warnings(rows, plan.warmup_updates, plan.num_updates, max_norm, still)
        for name, message in warnings.items():
            if name not in self.lr_warnings:
                self.lr_warnings[name] = message
                self._say(f"learning-rate warning: {message}")

    def _say(self, text: str) -> None:
        if self.shows:
            tqdm.write(text, file=sys.stderr)

    def keep_samples(self, samples: np.ndarray) -> None:
        """Keeps samples of this moment for the plots, and shows images to the trackers."""
        run, kept = self.run, results_of(self.run.kind).preview(samples)
        save_preview(self.folder.lab / "samples", run.update, kept)
        if kept.dtype == np.uint8:
            log_images(self.accelerator.trackers, "samples", kept, run.update)

    def state_dict(self) -> dict[str, Any]:
        """The sums of all processes, which all call this."""
        own: dict[str, Any] = {"sums": self.accelerator.gather(self.sums[None]).tolist()}
        return own if self.observer is None else own | {"observer": self.observer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Of another number of processes, the mean, which is all that becomes of them.
        sums, rank = torch.tensor(state["sums"], device=self.accelerator.device), self.accelerator.process_index
        self.sums = sums[rank] if len(sums) == self.accelerator.num_processes else sums.mean(0)
        if self.observer is not None:
            self.observer.load_state_dict(state["observer"], rank, self.accelerator.num_processes)
            self.observer.restore(read_timesteps(self.folder.timesteps_file), self.run.update)
