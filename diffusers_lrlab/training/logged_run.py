"""A run that writes a log: losses and gradient norms, validation, samples, warnings; where it is seen that it diverges."""

import math
import sys
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from ..core.errors import Diverged
from ..data.loading import TrainingData
from ..diagnostics.lr_warnings import find_lr_warnings
from ..diagnostics.observer import TimestepObserver
from .base_run import BaseRun
from .divergence import Rollbacks, SkippedUpdates
from .plan import Plan
from .results.base import results_of
from .run_folder import RunFolder
from .samples import save_preview
from .trackers import scalars_of, show_pictures


class LoggedRun(BaseRun):
    """A run of its own in a folder, with what is known of its course."""

    observer: TimestepObserver | None = None

    def __init__(self, plan: Plan, data: TrainingData, accelerator: Accelerator, folder: RunFolder):
        super().__init__(plan, data, accelerator.process_index)
        self.accelerator, self.folder = accelerator, folder
        # Since the last logged row, and read only there: loss, unweighted loss, gradient norm, updates.
        self.sums = torch.zeros(4, device=accelerator.device)
        self.skipped, self.rollbacks = SkippedUpdates(), Rollbacks(plan.config, folder)
        self.lr_warnings: dict[str, str] = {}  # those that were shown
        self._shows = True

    @property
    def lr_factor(self) -> float | None:
        """What the band of timesteps and rollbacks make of this update's learning rate."""
        of_band = super().lr_factor
        if not self.rollbacks.done:
            return of_band
        return float(self.rollbacks.factors(self.update)) * (1.0 if of_band is None else of_band)

    def mean_losses(self) -> tuple[float | None, ...]:
        """Loss, unweighted loss and gradient norm since the last row, read off the device; `None` without any update."""
        *sums, count = self.accelerator.reduce(self.sums, "mean").tolist()
        return tuple(total / count if count else None for total in sums)

    def first_logged_loss(self) -> float | None:
        """The unweighted loss of the first row."""
        rows = (row for row in self.folder.read_metrics() if "loss" in row)
        return next((row.get("unweighted_loss", row["loss"]) for row in rows), None)

    def log_row(self, lr: float, momentum: float | None, bar: tqdm) -> None:
        """Reads the sums off the device and writes a row; rate and momentum are those of the update just done."""
        # None of what all updates since the last row would have, if all of them were skipped.
        loss, unweighted, norm = self.mean_losses()
        self.sums.zero_()
        if loss is not None and norm is not None and not math.isfinite(loss + norm):
            raise self.diverged()
        if exploded := self.rollbacks.explosion(unweighted):
            raise self.diverged(exploded)
        row: dict[str, Any] = {
            "update": self.update - 1,
            "loss": loss,
            "lr": lr,
            "beta1": momentum,
            "grad_norm": norm,
            "images_seen": self.update * self.plan.layout.global_batch,
            "largest_lr_deviation": self.audit.largest_lr_deviation,
            "unweighted_loss": unweighted if self.objective.is_weighted else None,
            "ema_decay": None if self.average is None else self.average.decay,
            "skipped_updates": self.skipped.total or None,
            "rollbacks": len(self.rollbacks.done) or None,
        }
        row = {key: value for key, value in row.items() if value is not None}
        first = (self.update - 1) // self.config.logging_steps * self.config.logging_steps
        if self.observer is not None and loss is not None and (spikes := self.observer.read_sums(first, self.update - 1)):
            row["loss_spike_bins"] = spikes
        self.folder.append_metrics(row)
        self.accelerator.log(scalars_of(row), step=self.update)
        bar.set_postfix(loss="–" if loss is None else f"{loss:.4f}", lr=f"{lr:.3g}", refresh=False)

    def diverged(self, what: str = "The loss is not finite") -> Diverged:
        last, lr = self.folder.checkpoints(), self.current_lr * self.rollbacks.factors(self.update)
        go_on = f"go on from {last[-1]} by --resume_from_checkpoint latest" if last else "give"
        or_else = "" if self.rollbacks.rule else f"; or {go_on} --on_divergence rollback"
        return Diverged(
            f"{what} around update {self.update} at learning rate {lr:.3g}: training has diverged. Lower --learning_rate, "
            f"lengthen --lr_warmup_steps or lower --max_grad_norm{or_else}."
        )

    def warn_of_lr(self) -> None:
        """What the log says of the learning rate; each warning is shown once."""
        plan, rows = self.plan, self.folder.read_metrics()
        still = not (self.objective.sampler.moves or self.objective.follows_losses)
        warnings = find_lr_warnings(rows, plan.warmup_updates, plan.num_updates, self.config.max_grad_norm, still)
        for name, message in warnings.items():
            if name not in self.lr_warnings:
                self.lr_warnings[name] = message
                if self._shows:
                    tqdm.write(f"learning-rate warning: {message}", file=sys.stderr)

    def keep_samples(self, samples: np.ndarray) -> None:
        """Keeps samples of this moment for the plots, and shows them to the trackers."""
        save_preview(self.folder.lab / "samples", self.update, results_of(self.kind).preview(samples))
        if trackers := self.accelerator.trackers:
            show_pictures(trackers, "samples", results_of(self.kind).as_pictures(self, samples), self.update)

    def validate(self) -> dict[str, float]:
        """Validation losses of the raw and the averaged weights; the schedule is shown the former."""
        of_images = self.validation_losses()
        losses = {name: float(values.mean()) for name, values in of_images.items()}
        # A schedule that follows the loss must see the same number everywhere.
        broadcast_object_list(values := [losses])
        losses = values[0]
        if not all(map(math.isfinite, losses.values())):
            raise self.diverged()
        if self.observer is not None and self.validation is not None:
            self.observer.after_validation(self.update, self.validation.timesteps, of_images)
        self.folder.append_metrics({"update": self.update, **losses})
        self.accelerator.log(scalars_of(losses), step=self.update)
        self.follow_loss(losses["validation_loss"])
        return losses
