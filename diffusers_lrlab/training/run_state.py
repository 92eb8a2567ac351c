"""The state of a run, for the trainer and for stacks of many runs (`study/stacked/stack.py`)."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ..averaging.averages import EMA, own_average
from ..core.progress import Progress
from ..core.streams import stream_seed
from ..data.loading import TrainingData
from ..evaluation.validation_loss import ValidationLoss
from ..objective.objective import Objective
from ..optimizers.build import get_optimizer
from ..optimizers.groups import LR_GROUP, lr_factor_of
from ..schedules.audit import ScheduleAudit
from ..schedules.momentum import default_lr, momentum_groups, read_momentum, rounding_of, write_lrs, write_momentum
from ..schedules.schedule import Schedule
from ..schedules.scheduler import build
from .kinds import component_of
from .model import make_model
from .plan import Plan
from .resolve import objective_spec
from .width import keep_weight_decay, width_groups


class RunState:
    """
    Plan, data, model, optimizer, schedules, average, objective, audit and clock of a run.

    Its owner sets `objective`. Dropout depends on the index of the process.
    """

    objective: Objective

    def __init__(self, plan: Plan, data: TrainingData, device: torch.device, process_index: int = 0):
        config = plan.config
        self.plan, self.config, self.kind = plan, config, plan.kind
        self.component = component_of(config)
        # Data may be shared by runs of other models, which drop labels in another way.
        self.data = data if plan.classes == data.classes else dataclasses.replace(data, classes=plan.classes)
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
        # Only dropout draws from the global generators from here on.
        set_seed(stream_seed(config.seed, "dropout", process_index) % 2**32)
        self.optimizer: Any = self._make_optimizer()
        self._start_schedules()
        # One of each width for post-hoc averages; the first is validated, sampled and saved as the pipeline.
        self.averages = [EMA(self.trained, form, device) for form in plan.ema_forms] if config.use_ema else []
        self.average = self.averages[0] if self.averages else None
        self.validation: ValidationLoss | None = None
        if len(data.held_out):
            self.validation = ValidationLoss(data.held_out, self.process, plan.kind.evaluation_batch(plan.layout), device)

    def _make_optimizer(self) -> Any:
        config, lr, kwargs = self.config, self.plan.learning_rate, self.plan.optimizer_kwargs
        if (width := self.plan.width) is None:
            return get_optimizer(config.optimizer, self.model.named_parameters(), lr, **kwargs)
        groups = width_groups(dict(self.model.named_parameters()), width, lr)
        optimizer = get_optimizer(config.optimizer, groups, lr, **kwargs)
        keep_weight_decay(optimizer, width)
        return optimizer

    def _start_schedules(self) -> None:
        """
        Notes the rates and momenta of the groups of parameters, where the schedules begin. A schedule that follows a metric
        has a state, and sets the rate itself; the momentum follows the clock beside it.
        """
        schedule, groups = self.plan.schedule, self.optimizer.param_groups
        if schedule.momentum_schedule is not None:
            momentum_groups(self.optimizer, *schedule.momentum_schedule)  # refuses optimizers without momentum
        self._initial = [(float(group["lr"]), read_momentum(group)) for group in groups]
        self.feedback: Any = None
        self._clocked = schedule
        if schedule.follows_metric:
            followed = Schedule(schedule.name, schedule.kwargs)
            self.feedback = build(followed, self.optimizer, self.plan.warmup_updates, self.plan.num_updates)
            self._clocked = Schedule(None, {}, schedule.momentum, schedule.momentum_kwargs)
        self.write_rates()

    def write_rates(self) -> None:
        """Writes the learning rate and the momentum of this update into the optimizer."""
        progress = Progress(self.update, self.plan.num_updates, self.plan.warmup_updates)
        usual = default_lr(self.optimizer)
        for group, (initial_lr, initial_momentum) in zip(self.optimizer.param_groups, self._initial, strict=True):
            lr, momentum = self._clocked.at(progress, initial_lr, initial_momentum, usual)
            if self._clocked.sets_lr:
                write_lrs([group], [float(lr)])
            if momentum is not None:
                write_momentum(group, float(momentum))

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def at_interval(self, updates: int) -> bool:
        """Whether this update is at the interval, or the last one."""
        return self.update % updates == 0 or self.update == self.plan.num_updates

    def advance(self, averages: bool = True) -> None:
        """Advances the clock by one update, and updates the average if it `averages`."""
        self.update += 1
        if self.feedback is not None:
            self.feedback.advance()
        if averages:
            for average in self.averages:
                average.advance(self.update)

    def follow_loss(self, validation_loss: float) -> None:
        """Passes the validation loss to a schedule that follows it."""
        if self.feedback is not None:
            self.feedback.step(validation_loss)

    @property
    def current_lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def current_lrs(self) -> dict[str, float]:
        """The learning rate of each group of parameters, by its column of the log: `lr`, and `lr_NAME` for further ones."""
        named = (group for group in self.optimizer.param_groups if LR_GROUP in group)
        return {"lr": self.current_lr} | {f"lr_{group[LR_GROUP]}": float(group["lr"]) for group in named}

    @property
    def current_momentum(self) -> float | None:
        """The current momentum of the optimizer; `None` if it has none."""
        return read_momentum(self.optimizer.param_groups[0])

    @property
    def lr_factor(self) -> float | None:
        """The factor on the learning rate of this update, if any."""
        return None if self.plan.lr_factors is None else float(self.plan.lr_factors[self.update])

    def check_schedules(self) -> None:
        """Compares learning rate and momentum of the optimizer with the expected ones at this update."""
        plan, groups = self.plan, self.optimizer.param_groups
        expected_lr = None
        if not plan.follows_metric:
            expected_lr = float(plan.lrs[self.update]) * (1.0 if self.lr_factor is None else self.lr_factor)
        expected_momentum = float(plan.momenta[self.update]) if plan.schedule.sets_momentum else None
        factors = [lr_factor_of(group) for group in groups]
        # The momentum of the plan is that of the first group: Muon's others have one of their own.
        momenta = [expected_momentum] + [None] * (len(groups) - 1)
        self.audit.check(
            self.update,
            [(float(group["lr"]), read_momentum(group)) for group in groups],
            [(expected_lr and expected_lr * factor, beta) for factor, beta in zip(factors, momenta, strict=True)],
            [plan.learning_rate * factor for factor in factors],
            rounding_of(groups),
        )

    def averaged_weights(self) -> AbstractContextManager[None]:
        """A block in which the model has the averaged weights, of the average or of an optimizer that averages."""
        return self.raw_weights() if self.average is None else self.average.swapped_in()

    def raw_weights(self) -> AbstractContextManager[None]:
        """A block in which the model has its own weights; an optimizer that averages sets its averaged ones."""
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
        """Clock, schedule, audit and objective, without weights and optimizer."""
        return {
            "update": self.update,
            "schedules": [] if self.feedback is None else [self.feedback.state_dict()],
            "seconds": [self.training_seconds, self.evaluation_seconds],
            "audit": self.audit.state_dict(),
            "ema_decays": [average.decay for average in self.averages],  # an update may have been skipped
            "objective": self.objective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update = state["update"]
        if self.feedback is not None:
            self.feedback.load_state_dict(state["schedules"][0])
        self.write_rates()
        for average, decay in zip(self.averages, state.get("ema_decays", ()), strict=False):
            average.decay = decay
        self.training_seconds, self.evaluation_seconds = state["seconds"]
        self.audit.load_state_dict(state["audit"])
        self.objective.load_state_dict(state["objective"])
