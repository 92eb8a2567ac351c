"""Learning-rate and momentum schedulers by name, and each schedule as a function like those of `diffusers.optimization`."""

import dataclasses
import inspect
import warnings
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.errors import LabError, did_you_mean, must_be
from ..core.progress import Progress
from ..core.registry import Entry
from ..core.values import checked
from .expected import resolve_length
from .momentum import default_lr, initial_lrs, momentum_groups, read_momentum, write_lrs, write_momentum
from .registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from .schedule import Schedule, double_decay, resolve_schedule


def list_schedulers() -> list[str]:
    """The names that `get_scheduler` and `--lr_scheduler` take."""
    return [*SCHEDULERS, *SCHEDULERS.aliases]


def list_momentum_schedulers() -> list[str]:
    """The names that `get_momentum_scheduler` and `--momentum_scheduler` take."""
    return list(MOMENTUM_SCHEDULERS)


class CurveLR(LRScheduler):
    """A torch scheduler that sets learning rate and momentum by a [`Schedule`], a function of the number of updates.

    Call `step()` once after each optimizer update. Its state is one integer, saved with the schedule and its length. The
    curves start from the learning rates and momenta of the optimizer's groups.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ):
        self.schedule = schedule
        self.plan = _plan(schedule, num_warmup_steps, num_training_steps)
        self._base_momenta: list[float | None] = []
        if schedule.momentum_schedule is not None:
            for group in momentum_groups(optimizer, *schedule.momentum_schedule):
                self._base_momenta.append(group.setdefault("initial_momentum", read_momentum(group)))
        # As numbers: reading a tensor at every update would make the host wait for its device.
        self._base_lrs = initial_lrs(optimizer)
        self._default_lr = default_lr(optimizer)
        super().__init__(optimizer, last_epoch)

    def values(self, updates: Any, group: int = 0) -> tuple[Any, Any]:
        """Learning rate and momentum of a group at `updates` (an `int` or an integer array)."""
        progress = Progress(updates, self.plan["num_training_steps"], self.plan["num_warmup_steps"])
        momentum = self._base_momenta[group] if self._base_momenta else None
        return self.schedule.at(progress, self._base_lrs[group], momentum, self._default_lr)

    def double_decay(self) -> str | None:
        momentum = self._base_momenta[0] if self._base_momenta else None
        warmup, total = self.plan["num_warmup_steps"], self.plan["num_training_steps"]
        return double_decay(self.schedule, self._base_lrs[0], momentum, warmup, total)

    def get_lr(self) -> list[Any]:
        """Sets the momenta and returns the learning rate of each group at this update. Called by torch."""
        lrs = []
        for index, group in enumerate(self.optimizer.param_groups):
            lr, momentum = self.values(self.last_epoch, index)
            if not lr >= 0:  # a plug-in's
                entry = self.schedule.entries[0]
                raise LabError(
                    f"{entry.title} gives a learning rate of {lr:g} at update {self.last_epoch}; use 0 or more.{entry.where}"
                )
            lrs.append(float(lr) if self.schedule.sets_lr else group["lr"])
            if momentum is not None:
                write_momentum(group, float(momentum))
        return lrs

    def replan(self, num_warmup_steps: int, num_training_steps: int) -> None:
        """Changes the length of the schedule before the first update, and sets the rate of that update."""
        self.plan = _plan(self.schedule, num_warmup_steps, num_training_steps)
        self.apply()

    def move_to(self, update: int) -> None:
        """Moves to an update, as if by that many steps."""
        self.last_epoch, self._step_count = update, update + 1
        self.apply()

    def apply(self) -> None:
        """Writes learning rate and momentum of this update into the optimizer."""
        write_lrs(self.optimizer.param_groups, self.get_lr())
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["schedule"], state["_default_lr"]
        return {**state, "base_lrs": self._base_lrs, "_last_lr": [float(lr) for lr in self._last_lr]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the saved update. A state of another schedule or length is an error."""
        saved, differing = state_dict.get("plan"), ["not of diffusers_lrlab"]
        if saved is not None:
            differing = [f"{key} {saved.get(key)!r} -> {new!r}" for key, new in self.plan.items() if saved.get(key) != new]
        if differing:
            raise LabError(
                f"The saved schedule is a different one: {', '.join(differing)}. Resume with the arguments of the "
                "checkpoint, or create a new optimizer and schedule and load only the model."
            )
        super().load_state_dict(state_dict)
        # The optimizer ends up with the values of this update, whether its state is restored before or after this.
        for group, momentum in zip(self.optimizer.param_groups, self._base_momenta, strict=False):
            group["initial_momentum"] = momentum
        self.apply()


def _plan(schedule: Schedule, num_warmup_steps: int, num_training_steps: int) -> dict[str, Any]:
    length = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    return {**dataclasses.asdict(schedule), **length}


@checked
def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: float = 0,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
    last_epoch: int = -1,
) -> LRScheduler:
    """
    A learning-rate scheduler by name, with any of its parameters.

    Args:
        name (`str`): A name of [`list_schedulers`] or a spec string such as `"step:step_size=100,gamma=0.5"`.
        optimizer (`torch.optim.Optimizer`): The optimizer whose learning rates are scheduled.
        num_warmup_steps (`float`, *optional*, defaults to 0): Updates of warm-up, or a fraction of the run in (0, 1).
        num_training_steps (`int`, *optional*): Optimizer updates of the whole run. Required by all but `constant`,
            `constant_with_warmup` and `piecewise_constant`.
        scheduler_specific_kwargs (`dict`, *optional*): The schedule's own parameters, as transformers spells it.
        last_epoch (`int`, *optional*, defaults to -1): As for every torch scheduler: -1 starts afresh, and k continues after
            the first k + 1 updates of the optimizer.

    Returns:
        `torch.optim.lr_scheduler.LRScheduler`: call `step()` once after each optimizer update. For schedules that follow
        a metric, call `advance()` after each update and `step(metric)` after each validation.

    Raises:
        LabError: for an unknown name or parameter, a value out of range, or warm-up that does not fit the run.
    """
    schedule = resolve_schedule(name, scheduler_specific_kwargs)
    return build(schedule, optimizer, num_warmup_steps, num_training_steps, last_epoch)


@checked
def get_momentum_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: float = 0,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
    lr_scheduler: str | None = None,
    last_epoch: int = -1,
) -> LRScheduler:
    """
    A scheduler of the momentum, in `betas`, `beta1` or `momentum` of the optimizer.

    Args:
        name (`str`): A name of [`list_momentum_schedulers`] or a spec string such as `"demon:min_momentum=0.5"`.
        optimizer (`torch.optim.Optimizer`): An optimizer with momentum; the schedule starts from its initial momentum.
        num_warmup_steps (`float`, *optional*, defaults to 0): Updates at the start with constant momentum, or a fraction of
            the run in (0, 1).
        num_training_steps (`int`): Optimizer updates of the whole run.
        scheduler_specific_kwargs (`dict`, *optional*): The schedule's own parameters.
        lr_scheduler (`str`, *optional*): A learning-rate schedule for the same object. Without it, `demon`, `one_cycle` and
            `constant` do not set the learning rate, and the `mdlrc` family multiplies the optimizer's learning rate by its
            compensation.
        last_epoch (`int`, *optional*, defaults to -1): As for [`get_scheduler`].

    Returns:
        `torch.optim.lr_scheduler.LRScheduler`: call `step()` once after each optimizer update.

    Raises:
        LabError: as [`get_scheduler`], and for an optimizer without momentum or with a momentum of another meaning.
    """
    schedule = resolve_schedule(lr_scheduler, None, name, scheduler_specific_kwargs)
    scheduler = build(schedule, optimizer, num_warmup_steps, num_training_steps, last_epoch)
    if isinstance(scheduler, CurveLR) and (warning := scheduler.double_decay()):
        warnings.warn(warning, stacklevel=2)
    return scheduler


def build(
    schedule: Schedule, optimizer: Optimizer, num_warmup_steps: float, num_training_steps: int | None, last_epoch: int = -1
) -> LRScheduler:
    warmup, total = resolve_length(schedule, num_warmup_steps, num_training_steps)
    if schedule.entry is not None and schedule.follows_metric:
        if last_epoch != -1:
            raise LabError(f"{schedule.name!r} has more state than the number of updates: restore it by load_state_dict.")
        if schedule.momentum is not None:
            raise LabError(
                f"{schedule.name!r} follows a metric: build a momentum scheduler beside it, without lr_scheduler."
            )
        return cast(LRScheduler, schedule.entry(optimizer, warmup, **schedule.kwargs))
    if last_epoch < -1 or (last_epoch >= 0 and any("initial_lr" not in group for group in optimizer.param_groups)):
        wanted = "-1, or 0 or more for an optimizer that another schedule has driven"
        raise must_be("last_epoch", last_epoch, wanted, "leave it out, and restore the schedule by load_state_dict")
    return CurveLR(optimizer, schedule, warmup, total, last_epoch)


# --- `get_NAME_schedule`, generated from the registrations -----------------------------------------------------------


def _signature(entry: Entry) -> inspect.Signature:
    def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)

    length = parameter("num_training_steps", int | None if "endless" in entry.traits else int, None)
    parameters = [parameter("optimizer", Optimizer), parameter("num_warmup_steps", float, 0), length]
    for own in (*entry.parameters, *entry.common):
        default = list(own.default) if isinstance(own.default, tuple) else own.default
        parameters.append(parameter(own.name, own.kind | None if default is None else own.kind, default))
    return inspect.Signature([*parameters, parameter("last_epoch", int, -1)], return_annotation=LRScheduler)


def _documentation(entry: Entry) -> str:
    own = [
        f"    {each.name} ({each.allowed}; {each.shown_default}): {each.help}."
        for each in (*entry.parameters, *entry.common)
    ]
    about = f"A scheduler: {entry.description}. Arguments that are not listed are those of [`get_scheduler`]."
    return "\n".join([about, "", "Args:", *own, "", f"Source: {entry.source}"])


def __getattr__(name: str) -> Any:
    of = name.removeprefix("get_").removesuffix("_schedule")
    if name != f"get_{of}_schedule":  # such as `__path__`, for which Python looks at every import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    if of not in SCHEDULERS:
        names = [f"get_{known}_schedule" for known in list_schedulers()]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, names)}")
    entry = SCHEDULERS[of]
    signature = _signature(entry)

    def schedule(*args: Any, **kwargs: Any) -> LRScheduler:
        given = dict(signature.bind(*args, **kwargs).arguments)
        clock = {key: given.pop(key) for key in ("num_warmup_steps", "num_training_steps", "last_epoch") if key in given}
        return get_scheduler(of, given.pop("optimizer"), scheduler_specific_kwargs=given, **clock)

    schedule.__name__ = schedule.__qualname__ = name
    schedule.__doc__ = _documentation(entry)
    schedule.__signature__ = signature  # type: ignore[attr-defined]
    # Stored, so that pickle finds the same function again.
    globals()[name] = made = checked(schedule)
    return made


def __dir__() -> list[str]:
    return sorted([*globals(), *(f"get_{name}_schedule" for name in list_schedulers())])
