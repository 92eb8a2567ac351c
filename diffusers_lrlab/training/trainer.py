"""The training loop: one clock, in optimizer updates, that everything else reads."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from ..core.errors import Diverged, Interrupted
from ..data.batches import iterate_batches, to_device
from ..data.loading import TrainingData
from ..objective.loss import denoising_losses
from ..objective.objective import Objective
from ..schedules.feedback import FeedbackSchedule
from ..timesteps.bands import scaled_lr
from .averaging import averages_itself
from .checkpoints import register_model_format
from .diagnostics.lr_warnings import signs_of
from .diagnostics.observer import TimestepObserver
from .interrupts import InterruptGuard
from .plan import Plan
from .results.select import results_of
from .run_folder import RunFolder
from .run_state import RunState
from .samples import draw_samples, save_pipeline, save_preview
from .state import resume_trainer, save_trainer
from .stepping import Stepper

# An fp16 update whose gradients overflow is done again with a smaller loss scale; this often in a row means divergence.
_MAX_OVERFLOWS = 30
_LOOKS = 50  # for signs of a bad learning rate, over a run


class Trainer(RunState):
    """
    A run: its model, optimizer, schedule and EMA, and the loop over its updates.

    Args:
        plan ([`Plan`]): What to do.
        data ([`TrainingData`]): What to train on.
        accelerator (`Accelerator`): Device, precision and processes.
        folder ([`RunFolder`]): Where results go.
        on_saved (`Callable`, *optional*): Called with the update when the pipeline was saved in the middle of the run.
    """

    def __init__(
        self,
        plan: Plan,
        data: TrainingData,
        accelerator: Accelerator,
        folder: RunFolder,
        on_saved: Callable[[int], None] | None = None,
    ):
        super().__init__(plan, data, accelerator.process_index)
        self.accelerator, self.folder, self.on_saved = accelerator, folder, on_saved
        config = self.config
        self.make_parts(accelerator.device)
        self._hooks = register_model_format(accelerator, self.kind)
        self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        self.step = Stepper(accelerator, self.model, self.optimizer, config.max_grad_norm)
        layout, device = plan.layout, accelerator.device
        self.objective = Objective(config, self.noise_scheduler, layout, plan.num_updates, device, accelerator.gather)
        self.observer = self._make_observer() if config.log_timestep_bins else None
        # Where this process's images are in the global batch.
        self._local = torch.cat([torch.arange(part.start, part.stop) for part in layout.positions()]).to(device)
        # Sums since the last logged row: loss, its unweighted twin, gradient norm, updates. On the device, read at logging
        # points only.
        self.sums = torch.zeros(4, device=device)
        self.signs: dict[str, str] = {}  # of a bad learning rate, that were told
        self._shows = True

    def release(self) -> None:
        """Leaves the accelerator to another trainer."""
        for hook in self._hooks:
            hook.remove()
        self.accelerator.free_memory(self.model, self.optimizer)

    def _make_observer(self) -> TimestepObserver:
        config = self.config
        return TimestepObserver(
            config.log_timestep_bins,
            self.objective.sampler,
            self.noise_scheduler,
            self.data.held_out if config.timestep_grad_every else None,
            self.accelerator,
            self.folder.lab / "timesteps.parquet",
        )

    @property
    def bare_model(self) -> Any:
        """The model without wrappers."""
        return self.accelerator.unwrap_model(self.model)

    # --- one update --------------------------------------------------------------------------------------------------

    def do_update(self, images: torch.Tensor) -> bool:
        """One optimizer update on this process's share of images; `False` if fp16 overflowed and it was skipped."""
        layout, device = self.plan.layout, self.accelerator.device
        timesteps = self.objective.draw(self.update)
        local = timesteps[self._local]
        weights = self.objective.weights(local, self.update)
        images = to_device(images, device)
        loss, unweighted = torch.zeros((), device=device), []
        for step, noise in enumerate(self.objective.noise(self.update, images)):
            part = slice(step * layout.micro_batch, (step + 1) * layout.micro_batch)
            with self._accumulating():
                losses = denoising_losses(self.model, self.noise_scheduler, images[part], noise, local[part])
                unweighted.append(losses.detach())
                weighted = (losses if weights is None else losses * weights[part]).mean()
                norm = self.step(weighted)
                loss += weighted.detach() / layout.accumulation
        if self.accelerator.optimizer_step_was_skipped:
            return False
        assert norm is not None  # the last micro-batch has been
        losses = torch.cat(unweighted)
        self.sums += torch.stack([loss, losses.mean(), norm.detach().to(loss), torch.ones_like(loss)])
        if self.observer is not None:
            self.observer.add(local, losses)
        self.objective.observe(timesteps, losses)
        return True

    def _accumulating(self) -> AbstractContextManager[None]:
        """Around a micro-batch: gradients are exchanged between processes after the last one only."""
        return self.accelerator.accumulate(self.model) if self.plan.layout.accumulation > 1 else nullcontext()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def updates(self, show_progress: bool = True) -> Iterator[int]:
        """
        Trains from the current update to the end, and yields the number of updates done after each of them.

        Raises:
            Interrupted: after SIGINT or SIGTERM, with everything saved.
            Diverged: if the loss is no longer finite.
        """
        config, plan = self.config, self.plan
        self._shows = show_progress
        bar = tqdm(
            total=plan.num_updates,
            initial=self.update,
            desc="train",
            unit="update",
            disable=not (show_progress and self.accelerator.is_main_process),
            mininterval=0.2 if sys.stderr.isatty() else 10,
        )
        batches = iterate_batches(
            self.data,
            plan.layout,
            config.seed,
            range(self.update, plan.num_updates),
            config.dataloader_num_workers,
            config.skip_corrupt_images,
        )
        self.model.train()
        if averages_itself(self.optimizer):
            self.optimizer.train()
        with InterruptGuard() as guard, bar:
            started = time.perf_counter()
            for images in batches:
                with scaled_lr(self.optimizer, self.lr_factor):
                    self.check_schedules()
                    overflows = 0
                    while not self.do_update(images):
                        overflows += 1
                        if overflows == _MAX_OVERFLOWS:
                            raise self._diverged()
                    lr, momentum = self.current_lr, self.current_momentum
                self.advance()
                bar.update()
                if self.update % config.logging_steps == 0 or self.update == plan.num_updates:
                    self._log(lr, momentum, bar)
                self.training_seconds += time.perf_counter() - started
                self._at_boundary()
                if signal_number := guard.received():
                    raise Interrupted(signal_number, self.save())
                # The last one keeps the raw weights, and what comes after it can be interrupted without loss.
                if self.update % config.checkpointing_steps == 0 or self.update == plan.num_updates:
                    self.save()
                yield self.update
                started = time.perf_counter()

    def _log(self, lr: float, momentum: float | None, bar: tqdm) -> None:
        """Reads the sums off the device and writes a row; rate and momentum are those of the update just done."""
        loss_sum, unweighted_sum, norm_sum, count = self.accelerator.reduce(self.sums, "mean").tolist()
        self.sums.zero_()
        row = {
            "update": self.update - 1,
            "loss": loss_sum / count,
            "lr": lr,
            "beta1": momentum,
            "grad_norm": norm_sum / count,
            "images_seen": self.update * self.plan.layout.global_batch,
            "largest_lr_deviation": self.audit.largest_lr_deviation,
        }
        if self.objective.is_weighted:
            row["unweighted_loss"] = unweighted_sum / count
        row = {key: value for key, value in row.items() if value is not None}
        if self.ema is not None:
            row["ema_decay"] = self.ema.cur_decay_value
        if not math.isfinite(row["loss"] + row["grad_norm"]):
            raise self._diverged()
        if self.observer is not None:
            spikes = self.observer.read_sums(self.update - round(count), self.update - 1)
            if spikes:
                row["loss_spike_bins"] = spikes
        self.folder.append_metrics(row)
        scalars = {key: value for key, value in row.items() if key not in ("update", "loss_spike_bins")}
        self.accelerator.log(scalars, step=self.update)
        bar.set_postfix(loss=f"{row['loss']:.4f}", lr=f"{lr:.3g}", refresh=False)

    def _diverged(self) -> Diverged:
        last = self.folder.checkpoints()
        return Diverged(
            f"The loss is not finite around update {self.update} at learning rate {self.current_lr:.3g}: training has "
            "diverged. Lower --learning_rate, lengthen --lr_warmup_steps or lower --max_grad_norm"
            + (f"; the last checkpoint is {last[-1]}." if last else ".")
        )

    def _at_boundary(self) -> None:
        """What happens between updates: validation, sample images, saving the pipeline."""
        config, plan = self.config, self.plan
        if self.observer is not None and config.timestep_grad_every and self.update % config.timestep_grad_every == 0:
            self.observer.measure_gradients(self.update, self.bare_model)
        if self.validation and (self.update % plan.validation_updates == 0 or self.update == plan.num_updates):
            self.validate()
        if self.update % max(1, plan.num_updates // _LOOKS) == 0 or self.update == plan.num_updates:
            self._tell_signs()
        if self.update == plan.num_updates:
            return  # the end of the run saves and samples by itself
        if plan.due(config.save_images_epochs, self.update, default_times=4) and self.accelerator.is_main_process:
            with self.averaged_weights():
                samples = draw_samples(self, config.eval_batch_size)
            self.keep_samples(samples)
        is_pushed = config.hub_push_every is not None and self.update % config.hub_push_every == 0
        if is_pushed or (config.save_model_epochs and plan.due(config.save_model_epochs, self.update, 0)):
            self.save_result()
            if self.on_saved and self.accelerator.is_main_process:
                self.on_saved(self.update)

    def _tell_signs(self) -> None:
        """Signs of a bad learning rate, each of them once."""
        if not self.accelerator.is_main_process:
            return
        plan = self.plan
        still = not (self.objective.sampler.moves or self.objective.follows_losses)
        found = signs_of(self.folder.read_metrics(), plan.warmup_updates, plan.num_updates, self.config.max_grad_norm, still)
        for name, message in found.items():
            if name not in self.signs:
                self.signs[name] = message
                if self._shows:
                    tqdm.write(f"sign of a bad learning rate: {message}", file=sys.stderr)

    def keep_samples(self, samples: np.ndarray) -> None:
        """Keeps samples of this moment for the plots, and shows them to the tracker."""
        save_preview(self.folder.lab / "samples", self.update, self.kind.preview(samples))
        for tracker in self.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": results_of(self.kind).as_pictures(self, samples)}, step=self.update, **layout)

    def validate(self) -> dict[str, float]:
        """Validation losses of the raw and the averaged weights; the schedule is shown the former."""
        of_images = self.validation_losses()
        losses = {name: float(values.mean()) for name, values in of_images.items()}
        # A schedule that follows the loss must see the same number everywhere.
        broadcast_object_list(values := [losses])
        losses = values[0]
        if not all(map(math.isfinite, losses.values())):
            raise self._diverged()
        if self.observer is not None:
            assert self.validation is not None
            self.observer.after_validation(self.update, self.validation.timesteps, of_images)
        self.folder.append_metrics({"update": self.update, **losses})
        self.accelerator.log(losses, step=self.update)
        if isinstance(self.schedulers[0], FeedbackSchedule):
            self.schedulers[0].step(losses["validation_loss"])  # type: ignore[arg-type]  # a metric, not torch's old epoch
        return losses

    # --- checkpoints, results -------------------------------------------------------------------------------

    def save(self) -> Path:
        """Writes a checkpoint of this update."""
        return save_trainer(self)

    def resume(self, checkpoint: Path) -> None:
        """Goes back to where a checkpoint was written."""
        resume_trainer(self, checkpoint)

    def save_result(self) -> None:
        """Saves the pipeline, with the averaged weights."""
        with self.averaged_weights():
            if not all(parameter.isfinite().all() for parameter in self.bare_model.parameters()):
                raise self._diverged()
            if self.accelerator.is_main_process:
                save_pipeline(self, self.folder.path)
