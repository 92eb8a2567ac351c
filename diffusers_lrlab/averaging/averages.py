"""Averages of the weights: the exponential moving average, and the one that a schedule-free optimizer makes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .forms import EMAForm


class EMA:
    """
    The exponential moving average of parameters, with the decay of a form at each update of a run.

    The parameters, which must stay in place, are those of a model or those that a third-party script trains. In a stack of
    runs, the averages are rows of a matrix, which the stack updates.
    """

    def __init__(self, parameters: Iterable[Any], form: EMAForm, device: Any = None, dtype: torch.dtype | None = None):
        self.parameters, self.form = list(parameters), form
        self.shadow_params = [each.detach().clone().to(device, dtype) for each in self.parameters]
        self.decay: float | None = None  # of the last update of the average

    @torch.no_grad()
    def advance(self, update: int) -> None:
        """Averages the weights after this many updates, if an update of the average is due."""
        if update % self.form.update_every:
            return
        self.decay = self.form.decay(update)
        changes = torch._foreach_sub(self.shadow_params, self.parameters)
        torch._foreach_sub_(self.shadow_params, changes, alpha=1 - self.decay)

    def move_to(self, update: int) -> None:
        """Sets its clock to this many updates, whose weights it holds."""
        if last := update - update % self.form.update_every:
            self.decay = self.form.decay(last)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The parameters hold the average inside this block; afterwards they are back to the bit."""
        with _restored(self.parameters):
            _copy(self.shadow_params, self.parameters)
            yield

    def state_dict(self) -> dict[str, Any]:
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state, in place: a file has neither the device nor the memory format. The clock is that of the run."""
        _copy(state["shadow_params"], self.shadow_params)


def averages_itself(optimizer: Any) -> bool:
    """Whether the optimizer is one whose weights are to be evaluated only after its `eval()`."""
    return "train_mode" in optimizer.param_groups[0]


@contextmanager
def own_average(parameters: list[torch.nn.Parameter], optimizer: Any) -> Iterator[None]:
    """The parameters hold the average that an optimizer makes, if it makes one; afterwards they are back to the bit."""
    if not averages_itself(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    # Its own arithmetic would round on the way back, so how often a run validates would change it.
    with _restored(parameters):
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()


@contextmanager
def _restored(parameters: list[Any]) -> Iterator[None]:
    """The parameters get their values back at the end of this block, in which others replace them."""
    before = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    try:
        yield
    finally:
        _copy(before, parameters)


def _copy(values: list[Any], into: list[Any]) -> None:
    torch._foreach_copy_([each.data for each in into], values)
