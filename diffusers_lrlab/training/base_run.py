"""What a run is made of, whoever computes its updates: the trainer, or a stack of many runs (`study/stacked/stack.py`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ..averaging.averages import EMA, averages_itself, own_average
from ..core.streams import stream_seed
from ..data.batch import Batch
from ..data.batches import iterate_batches
from ..data.loading import TrainingData
from ..data.prefetch import prefetched
from ..evaluation.validation_loss import ValidationLoss
from ..objective.objective import Objective
from ..optimizers.entries import get_optimizer
from ..schedules.audit import ScheduleAudit
from ..schedules.feedback import FeedbackSchedule
from ..schedules.momentum import read_momentum
from ..schedules.scheduler import build_all
from .compiling import make_channels_last
from .model import make_model
from .plan import Plan
from .resolve_timesteps import objective_spec


class BaseRun:
    """Model, optimizer, schedules, average and clock of a run; dropout depends on the index of the process."""

    objective: Objective

    def __init__(self, plan: Plan, data: TrainingData, process_index: int = 0):
        self.plan, self.data, self.config, self.kind = plan, data, plan.config, plan.kind
        self.objective_spec = objective_spec(self.config)
        self.process = self.objective_spec.make_process()
        self.update = 0
        self.training_seconds = self.evaluation_seconds = self.sampling_seconds = 0.0
        self.audit = ScheduleAudit(self.config.strict_lr_audit)
        set_seed(stream_seed(self.config.seed, "weights") % 2**32)
        self.model: Any = make_model(self.config, plan.model_config)
        if self.config.enable_xformers_memory_efficient_attention:
            self.model.enable_xformers_memory_efficient_attention()
        if self.config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        if self.config.channels_last:
            make_channels_last(self.model)
        # Only dropout draws from the global generators from here on.
        set_seed(stream_seed(self.config.seed, "dropout", process_index) % 2**32)

    def make_parts(self, device: torch.device, has_average: bool = True) -> None:
        """Optimizer, schedules, average and validation, once the model's parameters are where they stay."""
        config, plan = self.config, self.plan
        self.optimizer: Any = get_optimizer(
            config.optimizer, self.model.parameters(), plan.learning_rate, **config.optimizer_kwargs
        )
        # Not prepared by accelerate: its wrapper would step them once per process, and by its own clock.
        self.schedulers = build_all(plan.schedule, self.optimizer, config.lr_warmup_steps, plan.num_updates)
        self.average: EMA | None = None
        if config.use_ema and has_average:
            self.average = EMA(self.model, device, config.ema_form)
        self.validation: ValidationLoss | None = None
        if len(self.data.held_out):
            batch = self.kind.evaluation_batch(plan.layout)
            self.validation = ValidationLoss(self.data.held_out, self.process, batch, device)

    @property
    def bare_model(self) -> Any:
        return self.model

    def batches(self, seed: int, updates: range) -> Iterator[Batch]:
        """The data of these updates, in the order that belongs to a seed: the share of this process."""
        plan, skip_corrupt = self.plan, self.config.skip_corrupt_images
        batches = iterate_batches(self.data, plan.layout, seed, updates, plan.num_workers, skip_corrupt, compact=True)
        # Rows of what is in memory are there at once, but for a GPU they are pinned, which takes the host longer.
        is_at_hand = self.data.in_memory is not None and not torch.cuda.is_available()
        return batches if is_at_hand else prefetched(batches)

    def set_training(self) -> None:
        """Model and optimizer as they are for updates."""
        self.model.train()
        if averages_itself(self.optimizer):
            self.optimizer.train()

    def advance(self, averages: bool = True) -> None:
        """Moves the clock by one update, and with it the schedules and the average, unless the weights were left alone."""
        self.update += 1
        for scheduler in self.schedulers:
            if isinstance(scheduler, FeedbackSchedule):
                scheduler.advance()
            else:
                scheduler.step()
        if self.average is not None and averages:
            self.average.step(self.update)

    def at_interval(self, updates: int) -> bool:
        """Whether something that happens every so many updates, and at the end of the run, happens now."""
        return self.update % updates == 0 or self.update == self.plan.num_updates

    def follow_loss(self, validation_loss: float) -> None:
        """Shows the validation loss to a schedule that follows it."""
        if isinstance(self.schedulers[0], FeedbackSchedule):
            self.schedulers[0].step(validation_loss)  # type: ignore[arg-type]  # a metric, not torch's old epoch

    def check_schedules(self) -> None:
        """Compares what the optimizer has at this update with what is expected."""
        expected_lr = None
        if not self.plan.follows_metric:
            expected_lr = float(self.plan.lrs[self.update]) * (1.0 if self.lr_factor is None else self.lr_factor)
        expected_momentum = float(self.plan.momenta[self.update]) if self.plan.schedule.sets_momentum else None
        self.audit.check(
            self.update,
            [(self.current_lr, self.current_momentum)],
            [(expected_lr, expected_momentum)],
            [self.plan.learning_rate],
        )

    @property
    def lr_factor(self) -> float | None:
        """What this update's band of timesteps makes of the learning rate."""
        return None if self.plan.lr_factors is None else float(self.plan.lr_factors[self.update])

    @property
    def current_lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def current_momentum(self) -> float | None:
        """The momentum in the optimizer now, `None` if it has none."""
        return read_momentum(self.optimizer.param_groups[0])

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model carries the average, or the one that the optimizer makes, inside this block."""
        return self.raw_weights() if self.average is None else self.average.weights()

    def raw_weights(self) -> AbstractContextManager[None]:
        """The model carries what is to be evaluated of the weights without an average inside this block."""
        return own_average(list(self.bare_model.parameters()), self.optimizer)

    def validation_losses(self) -> dict[str, np.ndarray]:
        """
        Losses of the raw and the averaged weights on held-out images: float64 of shape `(num_held_out,)` each; none
        without held-out images.
        """
        if self.validation is None:
            return {}
        with self.raw_weights():
            losses = {"validation_loss": self.validation(self.bare_model)}
        if self.average is not None:
            with self.average.weights():
                losses["validation_loss_ema"] = self.validation(self.bare_model)
        return losses

    def state_dict(self) -> dict[str, Any]:
        """The clock and what follows it, without weights and optimizer: tensors by name as `objective`, else plain data."""
        return {
            "update": self.update,
            "schedules": [scheduler.state_dict() for scheduler in self.schedulers],
            "seconds": [self.training_seconds, self.evaluation_seconds],
            "audit": self.audit.state_dict(),
            "objective": self.objective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a state."""
        self.update = state["update"]
        for scheduler, saved in zip(self.schedulers, state["schedules"], strict=True):
            scheduler.load_state_dict(saved)
        self.training_seconds, self.evaluation_seconds = state["seconds"]
        self.audit.load_state_dict(state["audit"])
        self.objective.load_state_dict(state["objective"])
