"""The state of a run, whoever computes its updates: the trainer, or a stack of many runs (`study/stacked/stack.py`)."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ..averaging.averages import EMA, own_average
from ..core.streams import stream_seed
from ..data.loading import TrainingData
from ..evaluation.validation_loss import ValidationLoss
from ..objective.objective import Objective
from ..optimizers.entries import get_optimizer
from ..schedules.audit import ScheduleAudit
from ..schedules.feedback import FeedbackSchedule
from ..schedules.momentum import read_momentum
from ..schedules.scheduler import build_all
from .compiling import make_channels_last
from .lora import trained_parameters
from .model import make_model
from .plan import Plan
from .resolve_timesteps import objective_spec


class RunState:
    """
    Plan, data, model, optimizer, schedules, average, objective, audit and clock of a run.

    Its owner sets `objective`, and may set `lr_factors` anew. Dropout depends on the index of the process. The average of a
    sharded model is made by [`shard_average`], once the model is sharded.
    """

    objective: Objective

    def __init__(
        self, plan: Plan, data: TrainingData, device: torch.device, process_index: int = 0, is_sharded: bool = False
    ):
        config = plan.config
        self.plan, self.data, self.config, self.kind = plan, data, config, plan.kind
        self.process = objective_spec(config).make_process()
        self.update = 0
        self.training_seconds = self.evaluation_seconds = self.sampling_seconds = 0.0
        self.audit = ScheduleAudit(config.strict_lr_audit)
        set_seed(stream_seed(config.seed, "weights") % 2**32)
        self.model: Any = make_model(
            config, plan.model_config, plan.start
        )  # without the wrappers of accelerate and torch.compile
        if config.enable_xformers_memory_efficient_attention:
            self.model.enable_xformers_memory_efficient_attention()
        if config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        if config.channels_last:
            make_channels_last(self.model)
        # Only dropout draws from the global generators from here on.
        set_seed(stream_seed(config.seed, "dropout", process_index) % 2**32)
        self.optimizer: Any = get_optimizer(config.optimizer, self.trained, plan.learning_rate, **config.optimizer_kwargs)
        # accelerate does not prepare them: its wrapper would step them once per process, and by its own clock.
        self.schedulers = build_all(plan.schedule, self.optimizer, config.lr_warmup_steps, plan.num_updates)
        self.lr_factors: np.ndarray | None = plan.lr_factors  # on the learning rate of each update
        self.average: EMA | None = None
        if config.use_ema and not is_sharded:
            self.average = EMA(self.trained, config.ema_form, device)
        self.validation: ValidationLoss | None = None
        if len(data.held_out):
            self.validation = ValidationLoss(data.held_out, self.process, plan.kind.evaluation_batch(plan.layout), device)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """What is trained, averaged and checkpointed: all parameters of the model, or those of its LoRA."""
        return list(trained_parameters(self.model).values())

    def at_interval(self, updates: int) -> bool:
        """Whether something that happens every so many updates, and at the end of the run, happens now."""
        return self.update % updates == 0 or self.update == self.plan.num_updates

    def advance(self, averages: bool = True) -> None:
        """Moves the clock by one update, and with it the schedules and, if it `averages`, the average."""
        self.update += 1
        for scheduler in self.schedulers:
            if isinstance(scheduler, FeedbackSchedule):
                scheduler.advance()
            else:
                scheduler.step()
        if self.average is not None and averages:
            self.average.advance(self.update)

    def follow_loss(self, validation_loss: float) -> None:
        """Passes the validation loss to a schedule that follows it."""
        if isinstance(self.schedulers[0], FeedbackSchedule):
            self.schedulers[0].step(validation_loss)  # type: ignore[arg-type]  # a metric, not torch's old epoch

    @property
    def current_lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def current_momentum(self) -> float | None:
        """The momentum in the optimizer now, `None` if it has none."""
        return read_momentum(self.optimizer.param_groups[0])

    @property
    def lr_factor(self) -> float | None:
        """The factor on the learning rate of this update, `None` without any."""
        return None if self.lr_factors is None else float(self.lr_factors[self.update])

    def check_schedules(self) -> None:
        """Compares the learning rate and the momentum in the optimizer with those expected at this update."""
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

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model has the average inside this block, or the one that the optimizer makes."""
        return self.raw_weights() if self.average is None else self.average.swapped_in()

    def raw_weights(self) -> AbstractContextManager[None]:
        """The model has the weights without the average inside this block; of an optimizer that averages, its average."""
        return own_average(self.trained, self.optimizer)

    def validation_losses(self) -> dict[str, np.ndarray]:
        """
        Losses of the raw and the averaged weights on held-out images: float64 of shape `(num_held_out,)` each; none
        without held-out images.
        """
        if self.validation is None:
            return {}
        with self.raw_weights():
            losses = {"validation_loss": self.validation(self.model)}
        if self.average is not None:
            with self.average.swapped_in():
                losses["validation_loss_ema"] = self.validation(self.model)
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
        self.update = state["update"]
        for scheduler, saved in zip(self.schedulers, state["schedules"], strict=True):
            scheduler.load_state_dict(saved)
        self.training_seconds, self.evaluation_seconds = state["seconds"]
        self.audit.load_state_dict(state["audit"])
        self.objective.load_state_dict(state["objective"])
