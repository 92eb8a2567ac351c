"""The training loop, whose clock counts optimizer updates, and the steps of its optimizer.

Backward pass, clipping and step are done by accelerate if the precision needs it, by torch otherwise: accelerate's wrappers
inspect packages and signatures at every call, which is negligible for a UNet, but not for a small network on points.

Models are compiled for training: by accelerate as a whole, or block by block if the model declares repeated blocks.
Validation, samples and checkpoints use the original model, whose keys have no prefix.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from tqdm.auto import tqdm

from ..averaging.averages import averages_itself
from ..core.environment import is_watched
from ..core.errors import Interrupted
from ..core.program import InterruptGuard, freeze_imports
from ..data.batch import Batch, to_device
from ..data.batches import iterate_batches, prefetched
from ..data.loading import TrainingData
from ..objective.objective import Objective
from ..timesteps.bands import scaled_lr
from .checkpoints import (
    CheckpointWriter,
    DivergenceGuard,
    find_nonfinite,
    is_kept_for_good,
    load_checkpoint,
    remove_old_checkpoints,
)
from .pipeline import draw_samples, save_pipeline
from .plan import Plan
from .resolve import objective_spec
from .run_folder import SNAPSHOTS, RunFolder
from .run_log import RunLog
from .run_state import RunState

_NUM_LR_CHECKS = 50  # for learning-rate warnings, over a run
_MOST_OVERFLOWS = 30  # in a row
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Trainer:
    """The loop over the updates of a run."""

    def __init__(self, plan: Plan, data: TrainingData, accelerator: Accelerator, folder: RunFolder):
        freeze_imports()
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
        plan, data = self.run.plan, self.run.data
        batches = iterate_batches(data, plan.layout, seed, updates, plan.num_workers, compact=True)
        # Batches from memory need no prefetching, except for a GPU, for which the host pins them.
        is_immediate = data.in_memory is not None and not torch.cuda.is_available()
        return batches if is_immediate else prefetched(batches)

    def set_training(self) -> None:
        """Prepares model and optimizer for updates."""
        self.stepper.model.train()
        if averages_itself(self.run.optimizer):
            self.run.optimizer.train()

    def do_update(self, batch: Batch) -> bool:
        """One optimizer update on the share of this process; `False` if fp16 overflowed, so that it has to be repeated."""
        run, stepper, layout, accelerator = self.run, self.stepper, self.run.plan.layout, self.accelerator
        timesteps = run.objective.draw(run.update)
        local = torch.cat([timesteps[part.start : part.stop] for part in layout.positions()])
        weights = run.objective.weights(local, run.update)
        batch = to_device(batch, accelerator.device)
        loss, unweighted = torch.zeros((), device=accelerator.device), []
        for index, noise in enumerate(run.objective.noise(run.update, batch.data)):
            part = slice(index * layout.micro_batch, (index + 1) * layout.micro_batch)
            # Processes exchange gradients after the last micro-batch only.
            with accelerator.accumulate(stepper.model) if layout.accumulation > 1 else nullcontext():
                is_first = run.update == 0 and not stepper.skips_bad
                losses = run.process.losses(stepper.model, batch[part], noise, local[part], is_first)
                unweighted.append(losses.detach())
                weighted = (losses if weights is None else losses * weights[part]).mean()
                stepper.step(weighted)
                loss += weighted.detach() / layout.accumulation
        if accelerator.optimizer_step_was_skipped:
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
        run, config, stepper, num_updates = self.run, self.run.config, self.stepper, self.run.plan.num_updates
        if run.update == 0 and run.validation is not None:
            run.validation.try_one(run.model)
        self.log.shows = show_progress and self.accelerator.is_main_process
        pace, hide = 0.2 if is_watched() else 10, not self.log.shows
        bar = tqdm(total=num_updates, initial=run.update, desc="train", unit="update", disable=hide, mininterval=pace)
        stepper.skips_bad = config.skip_bad_updates is not None
        with InterruptGuard() as guard, bar, self.checkpoints:
            batches = self.batches(config.seed, range(run.update, num_updates))
            self.set_training()
            started = time.perf_counter()
            for batch in batches:
                run.write_rates()
                with scaled_lr(run.optimizer, run.lr_factor):
                    run.check_rates()  # as the optimizer has them
                    is_done = do_one_update(self, batch)
                    lrs, momentum = run.current_lrs, run.current_momentum
                if not is_done:
                    raise self.divergence.error()
                self.divergence.count_skipped(stepper.was_skipped)
                run.advance(averages=not stepper.was_skipped)
                bar.update()
                if run.at_interval(config.logging_steps):
                    self.log.write_row(lrs, momentum, bar)
                run.training_seconds += time.perf_counter() - started
                self.checkpoints.check()
                self._at_boundary()
                self._save_if_due(guard)
                yield run.update
                started = time.perf_counter()

    def _save_if_due(self, guard: InterruptGuard) -> None:
        """Writes the checkpoint of this update, if any; raises `Interrupted` after a signal, with a checkpoint."""
        run, config = self.run, self.run.config
        if signal_number := guard.received():
            raise Interrupted(signal_number, self.save())
        # The last checkpoint keeps the raw weights, so that the rest of the run can be interrupted without loss.
        if run.update == run.plan.num_updates:
            checkpoint = self.save()
            if signal_number := guard.received():  # while it was written
                raise Interrupted(signal_number, checkpoint)
        elif is_kept_for_good(run.update, config) or run.update % config.checkpointing_steps == 0:
            self.save(waits=False)

    def _at_boundary(self) -> None:
        """Work between updates: validation, sample images, saving the pipeline."""
        run, config, plan = self.run, self.run.config, self.run.plan
        is_main = self.accelerator.is_main_process
        if self.folder.is_writer and run.update in plan.snapshot_updates:
            run.write_snapshot(self.folder.path / SNAPSHOTS)
        if config.timestep_grad_every and run.update % config.timestep_grad_every == 0:
            self.log.measure_gradients()
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

    def save(self, waits: bool = True) -> Path:
        """
        Writes a checkpoint, or raises `Diverged` if the state is not finite. With `waits=False`,
        training continues meanwhile.
        """
        divergence, log = self.divergence, self.log
        if part := find_nonfinite(self.run, loss=log.sums):
            raise divergence.error(f"The {part} of the run is not finite")
        rows = None if log.observer is None else log.observer.table
        path = self.checkpoints.begin(self.run, log.state_dict() | divergence.state_dict(), rows)
        if waits:
            self.checkpoints.finish()
        return path

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


def do_one_update(trainer: Trainer, batch: Batch) -> bool:
    """An update, repeated with a smaller loss scale while fp16 gradients overflow; `False` if they always do."""
    return any(trainer.do_update(batch) for _ in range(_MOST_OVERFLOWS))


class Stepper:
    """Takes the steps of an optimizer, which accelerate prepares with the model, from the losses of micro-batches."""

    norm: torch.Tensor  # of the gradients of the last update, before clipping
    # An update with gradients that are not finite takes no step. Reading the norm at every update synchronizes a GPU.
    skips_bad = False
    was_skipped = False  # the last update

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, max_grad_norm: float):
        self.accelerator = accelerator
        self.model, self.optimizer = _prepared(accelerator, model, optimizer)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.max_norm = max_grad_norm or math.inf  # infinite: measured, not clipped
        self.is_plain = accelerator.scaler is None and accelerator.distributed_type in _PLAIN

    def step(self, loss: torch.Tensor) -> None:
        """Backward pass; after the last micro-batch of an update also clipping, and a step unless the update is skipped."""
        accelerator = self.accelerator
        if self.is_plain:
            steps = accelerator.gradient_accumulation_steps
            (loss if steps == 1 else loss / steps).backward()
        else:
            accelerator.backward(loss)
        if not accelerator.sync_gradients:
            return
        clip = torch.nn.utils.clip_grad_norm_ if self.is_plain else accelerator.clip_grad_norm_
        self.norm = clip(self.parameters, self.max_norm)
        self.was_skipped = self.skips_bad and not math.isfinite(self.norm)
        if not self.was_skipped:
            (self.optimizer.optimizer if self.is_plain else self.optimizer).step()
        if not self.is_plain:
            self.optimizer.zero_grad()
            return
        for parameter in self.parameters:
            parameter.grad = None


def _prepared(accelerator: Accelerator, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """`accelerator.prepare` that compiles the repeated blocks of a model once for all of them, if it declares any."""
    # `ModelMixin.to`, which accelerate would call, imports peft and models of transformers for offloading.
    torch.nn.Module.to(model, accelerator.device)
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or not getattr(model, "_repeated_blocks", None):
        return accelerator.prepare(model, optimizer, device_placement=[False, True])
    model.compile_repeated_blocks(**plugin.to_kwargs())
    accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")  # else accelerate compiles the other modules too
    try:
        return accelerator.prepare(model, optimizer, device_placement=[False, True])
    finally:
        accelerator.state.dynamo_plugin = plugin
