"""The training loop: one clock, in optimizer updates, that everything else reads."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from ..core.environment import is_watched
from ..core.errors import Diverged, Interrupted
from ..data.batches import to_device
from ..data.loading import TrainingData
from ..objective.objective import Objective
from ..timesteps.bands import scaled_lr
from .base_run import BaseRun
from .checkpoints import load_checkpoint, register_model_format, save_checkpoint
from .diagnostics.lr_warnings import find_lr_warnings
from .diagnostics.observer import TimestepObserver
from .interrupts import InterruptGuard
from .plan import Plan
from .results.base import results_of
from .run_folder import RunFolder
from .samples import draw_samples, save_pipeline, save_preview
from .stepping import Stepper, do_one_update
from .trackers import scalars_of, show_pictures

_LOOKS = 50  # for learning-rate warnings, over a run


class Trainer(BaseRun):
    """A run, and the loop over its updates."""

    on_saved: Callable[[int], None] | None = None  # called with the update when the pipeline was saved in the middle

    def __init__(self, plan: Plan, data: TrainingData, accelerator: Accelerator, folder: RunFolder):
        super().__init__(plan, data, accelerator.process_index)
        self.accelerator, self.folder = accelerator, folder
        config, device = plan.config, accelerator.device
        self.make_parts(device)
        self._hooks = register_model_format(accelerator, self.kind.component)
        self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        self.step = Stepper(accelerator, self.model, self.optimizer, config.max_grad_norm)
        self.objective = Objective.of(
            self.objective_spec, self.process, plan.layout, plan.num_updates, device, accelerator.gather
        )
        self.observer: TimestepObserver | None = None
        if config.log_timestep_bins:
            probes = data.held_out if config.timestep_grad_every else None
            bins, path = config.log_timestep_bins, folder.timesteps_file
            self.observer = TimestepObserver(bins, self.objective, self.process, probes, path)
        # Since the last logged row, and read only there: loss, unweighted loss, gradient norm, updates.
        self.sums = torch.zeros(4, device=device)
        self.lr_warnings: dict[str, str] = {}  # those that were shown
        self._shows = True

    def release(self) -> None:
        """Leaves the accelerator to another trainer."""
        for hook in self._hooks:
            hook.remove()
        self.accelerator.free_memory(self.model, self.optimizer)

    @property
    def bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def do_update(self, images: torch.Tensor) -> bool:
        """One optimizer update on this process's share of images; `False` if fp16 overflowed and it was skipped."""
        layout, device = self.plan.layout, self.accelerator.device
        timesteps = self.objective.draw(self.update)
        local = torch.cat([timesteps[part.start : part.stop] for part in layout.positions()])
        weights = self.objective.weights(local, self.update)
        images = to_device(images, device)
        loss, unweighted = torch.zeros((), device=device), []
        for step, noise in enumerate(self.objective.noise(self.update, images)):
            part = slice(step * layout.micro_batch, (step + 1) * layout.micro_batch)
            # Gradients are exchanged between processes after the last micro-batch only.
            with self.accelerator.accumulate(self.model) if layout.accumulation > 1 else nullcontext():
                losses = self.process.losses(self.model, images[part], noise, local[part])
                unweighted.append(losses.detach())
                weighted = (losses if weights is None else losses * weights[part]).mean()
                self.step(weighted)
                loss += weighted.detach() / layout.accumulation
        if self.accelerator.optimizer_step_was_skipped:
            return False
        losses = torch.cat(unweighted)
        self.sums += torch.stack([loss, losses.mean(), self.step.norm.detach().to(loss), torch.ones_like(loss)])
        if self.observer is not None:
            self.observer.add(local, losses)
        self.objective.observe(timesteps, losses)
        return True

    def updates(self, show_progress: bool = True) -> Iterator[int]:
        """
        Trains from the current update to the end, and yields the number of updates done after each of them. It may end in
        `Interrupted`, after SIGINT or SIGTERM and with everything saved, and in `Diverged`.
        """
        config, plan = self.config, self.plan
        self._shows = show_progress and self.accelerator.is_main_process
        pace, hide = 0.2 if is_watched() else 10, not self._shows
        bar = tqdm(total=plan.num_updates, initial=self.update, desc="train", unit="update", disable=hide, mininterval=pace)
        batches = self.batches(config.seed, range(self.update, plan.num_updates))
        self.set_training()
        with InterruptGuard() as guard, bar:
            started = time.perf_counter()
            for images in batches:
                with scaled_lr(self.optimizer, self.lr_factor):
                    self.check_schedules()
                    if not do_one_update(self, images):
                        raise self._diverged()
                    lr, momentum = self.current_lr, self.current_momentum
                self.advance()
                bar.update()
                if self.at_interval(config.logging_steps):
                    self._log(lr, momentum, bar)
                self.training_seconds += time.perf_counter() - started
                self._at_boundary()
                if signal_number := guard.received():
                    raise Interrupted(signal_number, self.save())
                # The last one keeps the raw weights, and what comes after it can be interrupted without loss.
                if self.at_interval(config.checkpointing_steps):
                    checkpoint = self.save()
                    if signal_number := guard.received():  # while it was written, which may have been after the last update
                        raise Interrupted(signal_number, checkpoint)
                yield self.update
                started = time.perf_counter()

    def _log(self, lr: float, momentum: float | None, bar: tqdm) -> None:
        """Reads the sums off the device and writes a row; rate and momentum are those of the update just done."""
        *sums, count = self.accelerator.reduce(self.sums, "mean").tolist()
        self.sums.zero_()
        loss, unweighted, norm = (total / count for total in sums)
        if not math.isfinite(loss + norm):
            raise self._diverged()
        row = {
            "update": self.update - 1,
            "loss": loss,
            "lr": lr,
            "beta1": momentum,
            "grad_norm": norm,
            "images_seen": self.update * self.plan.layout.global_batch,
            "largest_lr_deviation": self.audit.largest_lr_deviation,
            "unweighted_loss": unweighted if self.objective.is_weighted else None,
            "ema_decay": None if self.average is None else self.average.decay,
        }
        row = {key: value for key, value in row.items() if value is not None}
        if self.observer is not None and (spikes := self.observer.read_sums(self.update - round(count), self.update - 1)):
            row["loss_spike_bins"] = spikes
        self.folder.append_metrics(row)
        self.accelerator.log(scalars_of(row), step=self.update)
        bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.3g}", refresh=False)

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
        if self.validation and self.at_interval(plan.validation_updates):
            self.validate()
        if self.accelerator.is_main_process and self.at_interval(max(1, plan.num_updates // _LOOKS)):
            self._warn_of_lr()
        if self.update == plan.num_updates:
            return  # the end of the run saves and samples by itself
        if (
            plan.due(config.save_images_epochs, self.update, default_times=plan.num_previews)
            and self.accelerator.is_main_process
        ):
            with self.averaged_weights():
                samples = draw_samples(self, config.eval_batch_size)
            self.keep_samples(samples)
        is_pushed = config.hub_push_every is not None and self.update % config.hub_push_every == 0
        if is_pushed or (config.save_model_epochs and plan.due(config.save_model_epochs, self.update, 0)):
            self.save_result()
            if self.on_saved and self.accelerator.is_main_process:
                self.on_saved(self.update)

    def _warn_of_lr(self) -> None:
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
        save_preview(self.folder.lab / "samples", self.update, self.kind.preview(samples))
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
            raise self._diverged()
        if self.observer is not None and self.validation is not None:
            self.observer.after_validation(self.update, self.validation.timesteps, of_images)
        self.folder.append_metrics({"update": self.update, **losses})
        self.accelerator.log(scalars_of(losses), step=self.update)
        self.follow_loss(losses["validation_loss"])
        return losses

    def state_dict(self) -> dict[str, Any]:
        """See [`BaseRun`]; the sums and `observer` are those of all processes, which all call this."""
        own = {"sums": self.accelerator.gather(self.sums[None]).tolist()}
        if self.observer is not None:
            own["observer"] = self.observer.state_dict()
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.sums = torch.tensor(state["sums"][self.accelerator.process_index], device=self.accelerator.device)
        if self.observer is not None:
            self.observer.load_state_dict(state["observer"], self.update)

    def save(self) -> Path:
        if self.observer is not None:
            self.observer.write()
        return save_checkpoint(self.accelerator, self, self.folder)

    def resume(self, checkpoint: Path) -> None:
        load_checkpoint(self.accelerator, self, checkpoint, self.folder)

    def save_result(self) -> None:
        with self.averaged_weights():
            if not all(parameter.isfinite().all() for parameter in self.bare_model.parameters()):
                raise self._diverged()
            if self.accelerator.is_main_process:
                save_pipeline(self, self.folder.path)
