"""Averages of the weights: the exponential moving average, and the one that a schedule-free optimizer makes."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from diffusers.utils import logging

from .forms import EMAForm


@contextmanager
def without_config_warnings() -> Iterator[None]:
    """
    Silences two warnings of diffusers: that the state of an EMA in config.json looks like misspelt arguments of the model,
    and that its own `EMAModel.from_pretrained` calls a deprecated function.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "It is deprecated to pass a pretrained model name or path", FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)


class EMA(EMAModel):
    """
    The exponential moving average of parameters, with the decay of a form at each update of a run.

    The parameters must stay in place. They are those of a model, a process's shards of them, or those that a third-party
    script trains.
    """

    shadow_params: list[torch.Tensor]

    def __init__(self, parameters: Iterable[Any], form: EMAForm, device: Any = None, dtype: torch.dtype | None = None):
        self.parameters, self.form = list(parameters), form
        known, is_warmup = form.kwargs, form.name == "warmup_power"
        super().__init__(
            self.parameters,
            # Only what is saved with it: the decay is that of the form.
            decay=known.get("max_decay", known.get("decay", 0.9999)),
            min_decay=known.get("min_decay", known.get("decay", 0.0)),
            use_ema_warmup=is_warmup,
            update_after_step=known["start_update"],
            foreach=True,
            **({"inv_gamma": known["inv_gamma"], "power": known["power"]} if is_warmup else {}),
        )
        self.to(device, dtype)

    def get_decay(self, optimization_step: int) -> float:
        return self.form.decay(optimization_step)

    def advance(self, update: int) -> None:
        """Averages the weights after this many updates, if an update of the average is due."""
        if update % self.form.update_every == 0:
            self.optimization_step = update - 1
            self.step(self.parameters)

    def move_to(self, update: int) -> None:
        """Sets its clock to this many updates, whose weights a stack of runs has averaged."""
        if last := update - update % self.form.update_every:
            self.optimization_step, self.cur_decay_value = last, self.get_decay(last)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The parameters hold the average inside this block; afterwards they are back to the bit."""
        self.store(self.parameters)
        self.copy_to(self.parameters)
        try:
            yield
        finally:
            self.restore(self.parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, in place: a file has neither the device nor the memory format."""
        kept = self.shadow_params
        super().load_state_dict(state_dict)
        torch._foreach_copy_(kept, self.shadow_params)
        self.shadow_params = kept
        self.move_to(self.optimization_step)  # the decay is not in the state, and the log may need it before the next step


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
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_([parameter.data for parameter in parameters], before)
