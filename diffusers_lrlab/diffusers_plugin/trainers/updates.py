"""Optimizer updates of any program, counted by the optimizer's real steps."""

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...audit.recorder.recorder import is_nested_step
from ..host.patches import Patches


def is_left_out(optimizer: Optimizer) -> bool:
    """Whether an optimizer that gets the flag of a gradient scaler, such as a fused one, leaves out the running step."""
    return bool(getattr(optimizer, "found_inf", False))


class RealUpdates:
    """
    The updates of the first optimizer that steps, with those before a resume, as its loaded state counts them.

    `before_first` is called before its first step in this process.
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self.is_known = True  # not after a resume of an optimizer whose state counts no steps
        self.before_first: list[Any] = []
        self._optimizer: Optimizer | None = None
        self._loaded: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()  # updates, whether they are known

    def install(self, patches: Patches) -> None:
        patches.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.callback(register_optimizer_step_post_hook(self._after_step).remove)
        patches.wrap(Optimizer, "load_state_dict", self._load)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self.num_updates, self.is_known = self._loaded.get(optimizer, (0, True))
            for call in self.before_first:
                call()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and not is_nested_step():  # it may call the step of its base class
            self.num_updates += not is_left_out(optimizer)

    def _load(self, load: Any, optimizer: Optimizer, state: dict[str, Any]) -> None:
        load(optimizer, state)
        states = state["state"].values()
        steps = [int(each["step"]) for each in states if "step" in each]
        self._loaded[optimizer] = found = max(steps, default=0), bool(steps) or not states
        if self._optimizer in (None, optimizer):
            self.num_updates, self.is_known = found
