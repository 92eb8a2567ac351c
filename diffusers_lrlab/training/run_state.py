"""What a run is made of, whoever computes its updates: the trainer, or a stack of many runs (`study/stacked/stack.py`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ..core.streams import stream_seed
from ..data.loading import TrainingData
from ..evaluation.validation_loss import ValidationLoss
from ..objective.objective import make_noise_scheduler
from ..optimizers.entries import get_optimizer
from ..schedules.audit import ScheduleAudit
from ..schedules.feedback import FeedbackSchedule
from ..schedules.momentum import read_momentum
from ..schedules.scheduler import build_all
from .averaging import ema_weights, make_ema, own_average
from .plan import Plan


class RunState:
    """
    Model, optimizer, schedules, EMA and clock of a run.

    Args:
        plan ([`Plan`]): What to do.
        data ([`TrainingData`]): What to train on.
        process_index (`int`, *optional*): Of this process, which dropout depends on.
    """

    def __init__(self, plan: Plan, data: TrainingData, process_index: int = 0):
        self.plan, self.data, self.config, self.kind = plan, data, plan.config, plan.kind
        self.noise_scheduler = make_noise_scheduler(self.config)
        self.update = 0
        self.training_seconds = self.evaluation_seconds = self.sampling_seconds = 0.0
        self.audit = ScheduleAudit(self.config.strict_lr_audit)
        set_seed(stream_seed(self.config.seed, "weights") % 2**32)
        self.model: Any = self.kind.model_class()(**plan.model_config)
        if self.config.enable_xformers_memory_efficient_attention:
            self.model.enable_xformers_memory_efficient_attention()
        if self.config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        # Only dropout draws from the global generators from here on.
        set_seed(stream_seed(self.config.seed, "dropout", process_index) % 2**32)

    def make_parts(self, device: torch.device) -> None:
        """Optimizer, schedules, EMA and validation, once the model's parameters are where they stay."""
        config, plan = self.config, self.plan
        parameters = self.model.parameters()
        self.optimizer: Any = get_optimizer(config.optimizer, parameters, plan.learning_rate, **config.optimizer_kwargs)
        # Not prepared by accelerate: its wrapper would step them once per process, and by its own clock.
        self.schedulers = build_all(plan.schedule, self.optimizer, config.lr_warmup_steps, plan.num_updates)
        self.ema = make_ema(self.model, config, device) if config.use_ema else None
        self.validation: ValidationLoss | None = None
        if len(self.data.held_out):
            batch = self.kind.evaluation_batch(plan.layout)
            self.validation = ValidationLoss(self.data.held_out, self.noise_scheduler, batch, device)

    @property
    def bare_model(self) -> Any:
        """The model without wrappers."""
        return self.model

    # --- the clock ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Moves the clock by one update, and with it the schedules and the EMA."""
        self.update += 1
        for scheduler in self.schedulers:
            if isinstance(scheduler, FeedbackSchedule):
                scheduler.advance()
            else:
                scheduler.step()
        if self.ema is not None and self.update % self.config.ema_update_every == 0:
            # Its decay follows the clock, however often it is updated.
            self.ema.optimization_step = self.update - 1
            self.ema.step(self.model.parameters())

    def check_schedules(self) -> None:
        """Compares what the optimizer has at this update with what was promised."""
        promised_lr = None if self.plan.follows_metric else float(self.plan.expected_lrs[self.update])
        promised_momentum = float(self.plan.momenta[self.update]) if self.plan.schedule.sets_momentum else None
        self.audit.check(
            self.update,
            [(self.current_lr, self.current_momentum)],
            [(promised_lr, promised_momentum)],
            [self.plan.learning_rate],
        )

    @property
    def lr_factor(self) -> float | None:
        """What this update's band of timesteps makes of the learning rate."""
        return None if self.plan.lr_factors is None else float(self.plan.lr_factors[self.update])

    @property
    def current_lr(self) -> float:
        """The learning rate in the optimizer now."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def current_momentum(self) -> float | None:
        """The momentum in the optimizer now, `None` if it has none."""
        return read_momentum(self.optimizer.param_groups[0])

    # --- weights -----------------------------------------------------------------------------------------------------

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model carries the EMA's weights, or the average that the optimizer makes, inside this block."""
        if self.ema is not None:
            return ema_weights(list(self.bare_model.parameters()), self.ema)
        return self.raw_weights()

    def raw_weights(self) -> AbstractContextManager[None]:
        """The model carries what is to be evaluated of the weights without an EMA inside this block."""
        return own_average(list(self.bare_model.parameters()), self.optimizer)

    def validation_losses(self) -> dict[str, np.ndarray]:
        """Losses of the raw and the averaged weights on held-out images: float64 of shape `(num_held_out,)` each."""
        assert self.validation is not None
        with self.raw_weights():
            losses = {"validation_loss": self.validation(self.bare_model)}
        if self.ema is not None:
            with self.averaged_weights():
                losses["validation_loss_ema"] = self.validation(self.bare_model)
        return losses
