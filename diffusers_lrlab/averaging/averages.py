"""Averages of the weights: the exponential moving average, and what a schedule-free optimizer makes by itself."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.training_utils import EMAModel
from diffusers.utils import logging


@contextmanager
def without_config_warnings() -> Iterator[None]:
    """
    Diffusers takes what an EMA keeps in its config.json for misspelt arguments of the model, and says so; and its own
    `EMAModel.from_pretrained` calls what it has deprecated.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "It is deprecated to pass a pretrained model name or path", FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)


class EMA:
    """
    The exponential moving average of diffusers, stepped by the clock; the model's parameters must stay where they are.

    It is a copy of the weights until `start_update`, and n updates later its decay is 1 - (1 + n / inv_gamma)^-power,
    `max_decay` at most.
    """

    def __init__(
        self, model: Any, device: Any, max_decay: float, inv_gamma: float, power: float, start_update: int, update_every: int
    ):
        self.parameters, self.model_class, self.device = list(model.parameters()), type(model), device
        self.update_every = update_every
        self.ema = EMAModel(
            self.parameters,
            decay=max_decay,
            use_ema_warmup=True,
            update_after_step=start_update,
            inv_gamma=inv_gamma,
            power=power,
            foreach=True,
            model_cls=self.model_class,
            model_config=model.config,
        )
        self.ema.to(device)

    @property
    def decay(self) -> float:
        return self.ema.cur_decay_value

    def step(self, update: int) -> None:
        if update % self.update_every == 0:
            # Its decay follows the clock, however often it is updated.
            self.ema.optimization_step = update - 1
            self.ema.step(self.parameters)

    @contextmanager
    def weights(self) -> Iterator[None]:
        self.ema.store(self.parameters)
        self.ema.copy_to(self.parameters)
        try:
            yield
        finally:
            self.ema.restore(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        return self.ema.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ema.load_state_dict(state)
        self.ema.to(self.device)
        if self.ema.optimization_step:  # not in the state, and the log asks for it before the next step
            self.ema.cur_decay_value = self.ema.get_decay(self.ema.optimization_step)

    def save(self, folder: Path) -> None:
        # diffusers builds a model for this, which draws random numbers that dropout would miss.
        with torch.random.fork_rng(devices=[]):
            self.ema.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        with torch.random.fork_rng(devices=[]), without_config_warnings():
            saved = EMAModel.from_pretrained(str(folder), self.model_class, foreach=self.ema.foreach)
        self.load_state_dict(saved.state_dict())


def ema_decays(
    num_updates: int, max_decay: float, inv_gamma: float, power: float, start_update: int, update_every: int
) -> np.ndarray:
    """The decay of an [`EMA`] at each update of a run, 1 where it is not updated: float64 `(num_updates,)`."""
    update = np.arange(num_updates)
    since = np.maximum(update - start_update, 0)
    decays = 1 - (1 + since / inv_gamma) ** -power
    decays = np.where(since == 0, 0.0, np.clip(decays, 0.0, max_decay))
    return np.where((update + 1) % update_every == 0, decays, 1.0)


def averages_itself(optimizer: Any) -> bool:
    """Whether the optimizer is one whose weights are to be evaluated only after its `eval()`."""
    return "train_mode" in optimizer.param_groups[0]


@contextmanager
def own_average(parameters: list[torch.nn.Parameter], optimizer: Any) -> Iterator[None]:
    """The parameters hold the average of an optimizer that makes one; afterwards they are back to the bit."""
    if not averages_itself(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    # There and back by its own arithmetic would round, and validating more often would change the run.
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_([parameter.data for parameter in parameters], before)
