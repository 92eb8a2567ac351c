"""The training loop; its clock counts optimizer updates."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from ..averaging.averages import averages_itself
from ..averaging.snapshots import write_snapshot
from ..core.environment import is_watched
from ..core.errors import Diverged, Interrupted
from ..data.batch import Batch, to_device
from ..data.batches import iterate_batches, prefetched
from ..data.loading import TrainingData
from ..objective.objective import Objective
from ..timesteps.bands import scaled_lr
from .checkpoints import CheckpointWriter, is_kept_for_good, load_checkpoint, remove_old_checkpoints
from .pipeline import draw_samples, save_pipeline
from .plan import Plan
from .resolve import objective_spec
from .run_folder import SNAPSHOTS, RunFolder
from .run_log import RunLog
from .run_state import RunState
from .stepping import Stepper, do_one_update
from .stopping import DivergenceGuard, InterruptGuard, find_nonfinite

_NUM_LR_CHECKS = 50  # for learning-rate warnings, over a run


class Trainer:
    """The loop over the updates of a run."""

    def __init__(self, plan: Plan, data: TrainingData, accelerator: Accelerator, folder: RunFolder):
        config, device = plan.config, accelerator.device
        self.accelerator, self.folder = accelerator, folder
        self.run = run = RunState(plan, data, device, accelerator.process_index)
        self.stepper = Stepper(accelerator, run.model, run.optimizer, config.max_grad_norm)
        spec, gather = objective_spec(config), accelerator.gather
        run.objective = Objective.of(spec, run.process, plan.layout, plan.num_updates, device, gather)
        self.checkpoints = CheckpointWriter(accelerator, config, folder)
        self.divergence = DivergenceGuard(run, self.checkpoints)
        self.log = RunLog(run, accelerator, folder, self.divergence)

    def release(self) -> None:
        """Frees the accelerator for another trainer."""
        self.accelerator.free_memory()

    def batches(self, seed: int, updates: range) -> Iterator[Batch]:
        """The share of this process of the data of these updates, in the order of a seed."""
        run, skip_corrupt = self.run, self.run.config.skip_corrupt_images
        plan, data = run.plan, run.data
        batches = iterate_batches(data, plan.layout, seed, updates, plan.num_workers, skip_corrupt, compact=True)
        # Batches from memory need no prefetching, except for a GPU, for which the host pins them.
        is_immediate = data.in_memory is not None and not torch.cuda.is_available()
        return batches if is_immediate else prefetched(batches)

    def set_training(self) -> None:
        """Prepares model and optimizer for updates."""
        self.stepper.model.train()
        if averages_itself(self.run.optimizer):
            self.run.optimizer.train()

    def to_device(self, batch: Batch) -> Batch:
        return to_device(batch, self.accelerator.device)

    def do_update(self, batch: Batch) -> bool:
        """One optimizer update on the share of this process; `False` if fp16 overflowed, so that it has to be repeated."""
        run, stepper, layout = self.run, self.stepper, self.run.plan.layout
        timesteps = run.objective.draw(run.update)
        local = torch.cat([timesteps[part.start : part.stop] for part in layout.positions()])
        weights = run.objective.weights(local, run.update)
        batch = self.to_device(batch)
        loss, unweighted = torch.zeros((), device=self.accelerator.device), []
        for index, noise in enumerate(run.objective.noise(run.update, batch.data)):
            part = slice(index * layout.micro_batch, (index + 1) * layout.micro_batch)
            with stepper.micro_batch():
                is_first = run.update == 0 and not stepper.skips_bad
                losses = run.process.losses(stepper.model, batch[part], noise, local[part], is_first)
                unweighted.append(losses.detach())
                weighted = (losses if weights is None else losses * weights[part]).mean()
                stepper.step(weighted)
                loss += weighted.detach() / layout.accumulation
        if self.accelerator.optimizer_step_was_skipped:
            return False
        if not stepper.was_skipped:
            losses = torch.cat(unweighted)
            self.log.add(loss, stepper.norm, local, losses)
            run.objective.observe(timesteps, losses)
        return True

    def updates(self, show_progress: bool = True) -> Iterator[int]:
        """
        Trains from the current update to the end, and yields the number of completed updates after each. Raises
        `Interrupted` after SIGINT or SIGTERM, with everything saved, and `Diverged`.
        """
        run = self.run
        if run.update == 0 and run.validation is not None:
            run.validation.try_one(run.model)
        self.log.shows = show_progress and self.accelerator.is_main_process
        pace, hide = 0.2 if is_watched() else 10, not self.log.shows
        num = run.plan.num_updates
        bar = tqdm(total=num, initial=run.update, desc="train", unit="update", disable=hide, mininterval=pace)
        self.stepper.skips_bad = run.config.skip_bad_updates is not None
        with InterruptGuard() as guard, bar, self.checkpoints:
            yield from self._updates_to_the_end(guard, bar)

    def _updates_to_the_end(self, guard: InterruptGuard, bar: tqdm) -> Iterator[int]:
        run, config, stepper, divergence = self.run, self.run.config, self.stepper, self.divergence
        batches = self.batches(config.seed, range(run.update, run.plan.num_updates))
        self.set_training()
        started = time.perf_counter()
        for batch in batches:
            run.write_rates()
            with scaled_lr(run.optimizer, run.lr_factor):
                run.check_schedules()
                is_done = do_one_update(self, batch)
                lrs, momentum = run.current_lrs, run.current_momentum
            if not is_done:
                raise divergence.error()
            divergence.count_skipped(stepper.was_skipped)
            run.advance(averages=not stepper.was_skipped)
            bar.update()
            if run.at_interval(config.logging_steps):
                self.log.write_row(lrs, momentum, bar)
            run.training_seconds += time.perf_counter() - started
            self.checkpoints.check()
            self._at_boundary()
            if signal_number := guard.received():
                raise Interrupted(signal_number, self._save_or_last())
            # The last checkpoint keeps the raw weights, so that the rest of the run can be interrupted without loss.
            if run.update == run.plan.num_updates:
                checkpoint = self.save()
                if signal_number := guard.received():  # while it was written
                    raise Interrupted(signal_number, checkpoint)
            elif is_kept_for_good(run.update, config) or (run.update % config.checkpointing_steps == 0):
                self.save(waits=False)
            yield run.update
            started = time.perf_counter()

    def _at_boundary(self) -> None:
        """Work between updates: validation, sample images, saving the pipeline."""
        run, config, plan = self.run, self.run.config, self.run.plan
        is_main, observer = self.accelerator.is_main_process, self.log.observer
        if self.folder.is_writer and run.update in plan.snapshot_updates:
            self.write_snapshot()
        if observer is not None and config.timestep_grad_every and run.update % config.timestep_grad_every == 0:
            observer.measure_gradients(run.update, run.model)
        if run.validation and run.at_interval(plan.validation_updates):
            self.log.validate()
        if is_main and run.at_interval(max(1, plan.num_updates // _NUM_LR_CHECKS)):
            self.log.warn_of_lr()
        if run.update == plan.num_updates:
            return  # the end of the run saves and samples
        if is_main and plan.due(config.save_images_epochs, run.update, default_times=plan.num_previews):
            with run.averaged_weights():
                samples = draw_samples(run, config.eval_batch_size)
            self.log.keep_samples(samples)
        if config.save_model_epochs and plan.due(config.save_model_epochs, run.update, 0):
            self.save_result()

    def write_snapshot(self) -> None:
        """Writes the post-hoc averages into the folder of the run."""
        run, posthoc = self.run, self.run.config.posthoc
        assert posthoc is not None
        names = [name for name, _ in run.model.named_parameters()]
        averages = {
            width: dict(zip(names, average.shadow_params, strict=True))
            for width, average in zip(posthoc.kwargs["sigma_rels"], run.averages, strict=True)
        }
        end = run.update - posthoc.kwargs["start_update"]
        write_snapshot(self.folder.path / SNAPSHOTS, run.update, end, averages, posthoc.kwargs["dtype"])

    def save(self, waits: bool = True) -> Path:
        """
        Writes a checkpoint, or raises `Diverged` if the state is not finite. With `waits=False`,
        training continues meanwhile.
        """
        divergence, log = self.divergence, self.log
        if part := find_nonfinite(self.run, loss=log.sums):
            raise divergence.error(f"The {part} of the run is not finite")
        rows = None if log.observer is None else log.observer.log.table
        path = self.checkpoints.begin(self.run, log.state_dict() | divergence.state_dict(), rows)
        if waits:
            self.checkpoints.finish()
        return path

    def _save_or_last(self) -> Path:
        """A new checkpoint, or the last one if the state is not finite: a resumed run repeats the updates since then."""
        try:
            return self.save()
        except Diverged:
            if not (last := self.folder.checkpoints()):
                raise
            return last[-1]

    def resume(self, checkpoint: Path) -> None:
        state = load_checkpoint(self.accelerator, self.run, checkpoint, self.folder)
        self.log.load_state_dict(state)
        self.divergence.load_state_dict(state)
        if self.accelerator.is_main_process:
            remove_old_checkpoints(self.folder, self.run.config)

    def save_result(self) -> None:
        run = self.run
        with run.averaged_weights():
            if not all(parameter.isfinite().all() for parameter in run.model.parameters()):
                raise self.divergence.error()
            if self.accelerator.is_main_process:
                save_pipeline(run, self.folder.path)
