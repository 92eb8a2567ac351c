"""The state of a run, for the trainer and for stacks of many runs (`study/stacked/stack.py`)."""

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ..averaging.averages import EMA, own_average
from ..averaging.posthoc import write_snapshot
from ..core.progress import Progress
from ..core.streams import stream_seed
from ..data.loading import TrainingData
from ..evaluation.validation_loss import ValidationLoss
from ..objective.objective import Objective
from ..optimizers.build import LR_GROUP, get_optimizer, lr_factor_of
from ..schedules.audit import ScheduleAudit
from ..schedules.momentum import default_lr, momentum_groups, read_momentum, rounding_of, write_lrs, write_momentum
from ..schedules.scheduler import build
from .kinds import component_of
from .model import make_model
from .plan import Plan
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
        self.process = plan.process
        self.update = 0
        self.training_seconds = self.evaluation_seconds = self.sampling_seconds = 0.0
        self.audit = ScheduleAudit(config.strict_lr_audit)
        set_seed(stream_seed(config.seed, "weights") % 2**32)
        # Without the wrappers of accelerate and torch.compile.
        self.model: Any = make_model(config, plan.model_config, plan.start)
        if config.enable_xformers_memory_efficient_attention:
            self.model.enable_xformers_memory_efficient_attention()
        if config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        # Only dropout draws from the global generators from here on.
        set_seed(stream_seed(config.seed, "dropout", process_index) % 2**32)
        named, lr = dict(self.model.named_parameters()), plan.learning_rate
        parameters = [*named.items()] if plan.width is None else width_groups(named, plan.width, lr)
        self.optimizer: Any = get_optimizer(config.optimizer, parameters, lr, **plan.optimizer_kwargs)
        if plan.width is not None:
            keep_weight_decay(self.optimizer, plan.width)
        self._start_schedules()
        # One of each width for post-hoc averages; the first is validated, sampled and saved as the pipeline.
        self.averages = [EMA(self.trained, form, device) for form in plan.ema_forms] if config.use_ema else []
        self.average = self.averages[0] if self.averages else None
        self.validation: ValidationLoss | None = None
        if len(data.held_out):
            self.validation = ValidationLoss(data.held_out, self.process, plan.kind.evaluation_batch(plan.layout), device)

    def _start_schedules(self) -> None:
        """
        Notes the rates and momenta of the groups of parameters, where the schedules begin. A schedule that follows a metric
        has a state, and sets the rate itself; the momentum follows the clock beside it.
        """
        plan, schedule = self.plan, self.plan.schedule
        if schedule.momentum_schedule is not None:
            momentum_groups(self.optimizer, *schedule.momentum_schedule)  # refuses optimizers without momentum
        self._initial = [(float(group["lr"]), read_momentum(group)) for group in self.optimizer.param_groups]
        self._usual_lr = default_lr(self.optimizer)
        self.feedback: Any = None
        self._clocked = schedule
        if schedule.follows_metric:
            followed, self._clocked = schedule.parts
            self.feedback = build(followed, self.optimizer, plan.warmup_updates, plan.num_updates)
        self.write_rates()

    def write_rates(self) -> None:
        """Writes the learning rate and the momentum of this update into the optimizer."""
        progress = Progress(self.update, self.plan.num_updates, self.plan.warmup_updates)
        for group, (initial_lr, initial_momentum) in zip(self.optimizer.param_groups, self._initial, strict=True):
            lr, momentum = self._clocked.at(progress, initial_lr, initial_momentum, self._usual_lr)
            if self._clocked.sets_lr:
                write_lrs([group], [float(lr)])
            if momentum is not None:
                write_momentum(group, float(momentum))

    def check_rates(self) -> None:
        """Reads learning rate and momentum back from the optimizer, and compares them with the expected ones."""
        plan, groups, factor = self.plan, self.optimizer.param_groups, self.lr_factor
        lr = None if plan.schedule.follows_metric else float(plan.lrs[self.update]) * (1.0 if factor is None else factor)
        momentum = float(plan.momenta[self.update]) if plan.schedule.sets_momentum else None
        factors = [lr_factor_of(group) for group in groups]
        # The momentum of the plan is that of the first group: Muon's others have one of their own.
        momenta = [momentum] + [None] * (len(groups) - 1)
        self.audit.check(
            self.update,
            [(float(group["lr"]), read_momentum(group)) for group in groups],
            [(lr and lr * factor, beta) for factor, beta in zip(factors, momenta, strict=True)],
            [plan.learning_rate * factor for factor in factors],
            rounding_of(groups),
        )

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

    def write_snapshot(self, folder: Path) -> None:
        """Writes the post-hoc averages of this update into a folder."""
        assert (posthoc := self.config.posthoc) is not None
        known, names = posthoc.kwargs, [name for name, _ in self.model.named_parameters()]
        averages = {
            width: dict(zip(names, average.shadow_params, strict=True))
            for width, average in zip(known["sigma_rels"], self.averages, strict=True)
        }
        write_snapshot(folder, self.update, self.update - known["start_update"], averages, known["dtype"])

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
