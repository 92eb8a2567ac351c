"""The training loop: one clock, in optimizer updates, that everything else reads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from ..core.environment import is_watched
from ..core.errors import Diverged, Interrupted
from ..core.words import counted
from ..data.batch import Batch, to_device
from ..data.loading import TrainingData
from ..diagnostics.observer import TimestepObserver
from ..objective.objective import Objective
from ..timesteps.bands import scaled_lr
from .checkpoint_writer import CheckpointWriter, remove_old_checkpoints
from .checkpoints import load_checkpoint, register_model_format
from .compiling import prepare_compiled
from .divergence import SkippedUpdates, find_nonfinite
from .interrupts import InterruptGuard
from .logged_run import LoggedRun
from .pipeline import save_pipeline
from .plan import Plan
from .run_folder import RunFolder
from .samples import draw_samples
from .sharding import gather_whole, is_sharded, shard_average
from .stepping import Stepper, do_one_update

_NUM_LR_CHECKS = 50  # for learning-rate warnings, over a run


class Trainer(LoggedRun):
    """A run, and the loop over its updates."""

    _whole: Any = None  # in the place of a model that is sharded
    on_saved: Callable[[int], None] | None = None  # called with the update when the pipeline was saved in the middle

    def __init__(self, plan: Plan, data: TrainingData, accelerator: Accelerator, folder: RunFolder):
        super().__init__(plan, data, accelerator, folder)
        config, device = plan.config, accelerator.device
        sharded = is_sharded(accelerator)
        self.make_parts(device, has_average=not sharded)
        self._format_hook = register_model_format(accelerator, self.kind.component)
        self.checkpoints = CheckpointWriter(accelerator, config, folder)
        self.model, self.optimizer = prepare_compiled(accelerator, self.model, self.optimizer)
        if sharded and config.use_ema:
            self.average = shard_average(self.bare_model, device, config.ema_form)
        self.step = Stepper(accelerator, self.model, self.optimizer, config.max_grad_norm)
        self.objective = Objective.of(
            self.objective_spec, self.process, plan.layout, plan.num_updates, device, accelerator.gather
        )
        if config.log_timestep_bins:
            probes = data.held_out if config.timestep_grad_every else None
            bins, path = config.log_timestep_bins, folder.timesteps_file
            self.observer = TimestepObserver(bins, self.objective, self.process, probes, path)

    def release(self) -> None:
        """Leaves the accelerator to another trainer."""
        self._format_hook.remove()
        self.accelerator.free_memory(self.model, self.optimizer)

    @property
    def bare_model(self) -> Any:
        return self._whole or self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Model and average are whole inside this block, also where they are sharded; all processes enter it."""
        if not is_sharded(self.accelerator) or self._whole is not None:
            yield
            return
        average = self.average
        self._whole, self.average = gather_whole(self, self.accelerator, self.bare_model)
        try:
            yield
        finally:
            self._whole, self.average = None, average

    def to_device(self, batch: Batch) -> Batch:
        batch = to_device(batch, self.accelerator.device)
        if not self.config.channels_last:
            return batch
        return batch.with_data(batch.data.contiguous(memory_format=torch.channels_last))

    def do_update(self, batch: Batch) -> bool:
        """One optimizer update on this process's share of a batch; `False` if fp16 overflowed and it has to be repeated."""
        layout, device = self.plan.layout, self.accelerator.device
        timesteps = self.objective.draw(self.update)
        local = torch.cat([timesteps[part.start : part.stop] for part in layout.positions()])
        weights = self.objective.weights(local, self.update)
        batch = self.to_device(batch)
        loss, unweighted = torch.zeros((), device=device), []
        for step, noise in enumerate(self.objective.noise(self.update, batch.data)):
            part = slice(step * layout.micro_batch, (step + 1) * layout.micro_batch)
            # Gradients are exchanged between processes after the last micro-batch only.
            with self.accelerator.accumulate(self.model) if layout.accumulation > 1 else nullcontext():
                is_first = self.update == 0 and not self.step.skips_bad
                losses = self.process.losses(self.model, batch[part], noise, local[part], is_first)
                unweighted.append(losses.detach())
                weighted = (losses if weights is None else losses * weights[part]).mean()
                self.step(weighted)
                loss += weighted.detach() / layout.accumulation
        if self.accelerator.optimizer_step_was_skipped:
            return False
        if self.step.was_skipped:
            return True
        losses = torch.cat(unweighted)
        self.sums += torch.stack([loss, losses.mean(), self.step.norm.detach().to(loss), torch.ones_like(loss)])
        if self.observer is not None:
            self.observer.add(local, losses)
        self.objective.observe(timesteps, losses)
        return True

    def updates(self, show_progress: bool = True) -> Iterator[int]:
        """
        Trains from the current update to the end, and yields the number of updates done after each of them, which is less
        than before after a rollback. It may end in `Interrupted`, after SIGINT or SIGTERM and with everything saved, and in
        `Diverged`.
        """
        config, plan = self.config, self.plan
        if self.update == 0 and self.validation is not None and not is_sharded(self.accelerator):
            self.validation.try_one(self.bare_model)
        self._shows = show_progress and self.accelerator.is_main_process
        pace, hide = 0.2 if is_watched() else 10, not self._shows
        bar = tqdm(total=plan.num_updates, initial=self.update, desc="train", unit="update", disable=hide, mininterval=pace)
        self.step.skips_bad = config.skip_bad_updates is not None
        with InterruptGuard() as guard, bar, self.checkpoints:
            if self.rollbacks.rule is not None and self.update == 0:
                self.save()  # to have something to go back to
            elif self.rollbacks.rule is not None and self.rollbacks.first_loss is None:  # the rule came later
                self.rollbacks.first_loss = self.first_logged_loss()
            while True:
                try:
                    yield from self._updates_to_the_end(guard, bar)
                    return
                except Diverged as reason:
                    self._go_back(reason)
                    bar.n = self.update
                    bar.refresh()

    def _updates_to_the_end(self, guard: InterruptGuard, bar: tqdm) -> Iterator[int]:
        config = self.config
        batches = self.batches(config.seed, range(self.update, self.plan.num_updates))
        self.set_training()
        started = time.perf_counter()
        for batch in batches:
            with scaled_lr(self.optimizer, self.lr_factor):
                self.check_schedules()
                is_done = do_one_update(self, batch)
                lr, momentum = self.current_lr, self.current_momentum
            if not is_done:
                raise self.diverged()
            self.skipped.count(self.step.was_skipped)
            if self.skipped.in_a_row > (most := config.skip_bad_updates or 0):
                raise self.diverged(f"The gradients of {counted(most + 1, 'update')} in a row are not finite")
            self.advance(averages=not self.step.was_skipped)
            if self.rollbacks.rule is not None and self.update == 1:
                self.rollbacks.first_loss = self.mean_losses()[1]
            bar.update()
            if self.at_interval(config.logging_steps):
                self.log_row(lr, momentum, bar)
            self.training_seconds += time.perf_counter() - started
            self.checkpoints.check()
            self._at_boundary()
            if signal_number := guard.received():
                raise Interrupted(signal_number, self._save_or_last())
            # The last one keeps the raw weights, and what comes after it can be interrupted without loss.
            if self.update == self.plan.num_updates:
                checkpoint = self.save()
                if signal_number := guard.received(now=True):  # while it was written
                    raise Interrupted(signal_number, checkpoint)
            elif self.update % config.checkpointing_steps == 0 and self.checkpoints.is_due():
                self.save(waits=False)
            yield self.update
            started = time.perf_counter()

    def _go_back(self, reason: Diverged) -> None:
        """Goes back to a checkpoint, for a lower rate from there on; raises `reason` if that is not asked for or no help."""
        done, diverged_at = self.rollbacks.done, self.update
        self.resume(self.rollbacks.find_checkpoint(reason))
        self.rollbacks.done = done  # the checkpoint knows of earlier ones only
        self.rollbacks.add(reason, diverged_at, self.update)

    def _at_boundary(self) -> None:
        """What happens between updates: validation, sample images, saving the pipeline."""
        config, plan = self.config, self.plan
        if self.observer is not None and config.timestep_grad_every and self.update % config.timestep_grad_every == 0:
            self.observer.measure_gradients(self.update, self.bare_model)
        if self.validation and self.at_interval(plan.validation_updates):
            with self.whole_weights():
                self.validate()
        if self.accelerator.is_main_process and self.at_interval(max(1, plan.num_updates // _NUM_LR_CHECKS)):
            self.warn_of_lr()
        if self.update == plan.num_updates:
            return  # the end of the run saves and samples by itself
        if plan.due(config.save_images_epochs, self.update, default_times=plan.num_previews):
            with self.whole_weights():
                if self.accelerator.is_main_process:
                    with self.averaged_weights():
                        samples = draw_samples(self, config.eval_batch_size)
                    self.keep_samples(samples)
        is_pushed = config.hub_push_every is not None and self.update % config.hub_push_every == 0
        if is_pushed or (config.save_model_epochs and plan.due(config.save_model_epochs, self.update, 0)):
            self.save_result()
            if self.on_saved:
                self.checkpoints.finish()  # an upload looks through the folder, which is to hold still
            if self.on_saved and self.accelerator.is_main_process:
                self.on_saved(self.update)

    def state_dict(self) -> dict[str, Any]:
        """See [`BaseRun`]; the sums and `observer` are those of all processes, which all call this."""
        own: dict[str, Any] = {"sums": self.accelerator.gather(self.sums[None]).tolist()}
        own |= {"skipped_updates": asdict(self.skipped), "rollbacks": self.rollbacks.done}
        own["first_loss"] = self.rollbacks.first_loss
        if self.observer is not None:
            own["observer"] = self.observer.state_dict()
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # Of another number of processes, the mean, which is all that becomes of them.
        sums, rank = torch.tensor(state["sums"], device=self.accelerator.device), self.accelerator.process_index
        self.sums = sums[rank] if len(sums) == self.accelerator.num_processes else sums.mean(0)
        self.skipped, self.rollbacks.done = SkippedUpdates(**state["skipped_updates"]), state["rollbacks"]
        self.rollbacks.first_loss = state["first_loss"] or self.rollbacks.first_loss
        if self.observer is not None:
            self.observer.load_state_dict(state["observer"], self.update)

    def diverged(self, what: str = "The loss is not finite") -> Diverged:
        self.checkpoints.finish()  # the message names the last one
        return super().diverged(what)

    def save(self, waits: bool = True) -> Path:
        """
        Writes a checkpoint; raises `Diverged` in the place of one that is of no use. Training may go on before it is written
        if this does not wait.
        """
        if part := find_nonfinite(self, loss=self.sums):
            raise self.diverged(f"The {part} of the run is not finite")
        if self.rollbacks.rule is not None and (exploded := self.rollbacks.explosion(self.mean_losses()[1])):
            raise self.diverged(exploded)
        path = self.checkpoints.begin(self, None if self.observer is None else self.observer.log.table)
        if waits:
            self.checkpoints.finish()
        return path

    def _save_or_last(self) -> Path:
        """A checkpoint of now; if that is not finite, the last one: what comes after it happens again on resuming."""
        try:
            return self.save()
        except Diverged:
            if not (last := self.folder.checkpoints()):
                raise
            return last[-1]

    def resume(self, checkpoint: Path) -> None:
        load_checkpoint(self.accelerator, self, checkpoint, self.folder)
        if self.accelerator.is_main_process:
            remove_old_checkpoints(self.folder, self.config)

    def save_result(self) -> None:
        with self.whole_weights(), self.averaged_weights():
            if not all(parameter.isfinite().all() for parameter in self.bare_model.parameters()):
                raise self.diverged()
            if self.accelerator.is_main_process:
                save_pipeline(self, self.folder.path)
