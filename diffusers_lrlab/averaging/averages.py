"""Averages of the weights: the exponential moving average, and what a schedule-free optimizer makes by itself."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from diffusers.utils import logging

from .forms import EMAForm


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


class FormedEMA(EMAModel):
    """Diffusers' average of these parameters, with the decay of a form."""

    def __init__(self, parameters: list[Any], form: EMAForm, **about_model: Any):
        known, is_warmup = form.kwargs, form.name == "warmup_power"
        super().__init__(
            parameters,
            # What is saved with it, and what diffusers makes of it.
            decay=known.get("max_decay", known.get("decay", 0.9999)),
            min_decay=known.get("min_decay", known.get("decay", 0.0)),
            use_ema_warmup=is_warmup,
            update_after_step=known["start_update"],
            foreach=True,
            **({"inv_gamma": known["inv_gamma"], "power": known["power"]} if is_warmup else {}),
            **about_model,
        )
        self.form = form

    def get_decay(self, optimization_step: int) -> float:
        return self.form.decay(optimization_step)


class EMA:
    """The exponential moving average of a model, stepped by the clock; its parameters must stay where they are."""

    def __init__(self, model: Any, device: Any, form: EMAForm, parameters: list[Any] | None = None):
        # Those of the model, or what is to be averaged in their place, such as shards of them.
        self.parameters = list(model.parameters()) if parameters is None else parameters
        self.model_class, self.device = type(model), device
        self.update_every = form.update_every
        self.ema = FormedEMA(self.parameters, form, model_cls=self.model_class, model_config=model.config)
        self.ema.to(device)

    @property
    def decay(self) -> float:
        return self.ema.cur_decay_value

    def step(self, update: int) -> None:
        if update % self.update_every == 0:
            # Its decay follows the clock, however often it is updated.
            self.ema.optimization_step = update - 1
            self.ema.step(self.parameters)

    def move_to(self, update: int) -> None:
        """Its clock after so many updates, of which somebody else averaged the weights."""
        if last := update - update % self.update_every:
            self.ema.optimization_step, self.ema.cur_decay_value = last, self.ema.get_decay(last)

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
        places = self.ema.shadow_params
        self.ema.load_state_dict(state)
        self.ema.to(self.device)
        for index, (place, saved) in enumerate(zip(places, self.ema.shadow_params, strict=True)):
            if saved.stride() != place.stride():  # files hold no memory format
                self.ema.shadow_params[index] = torch.empty_like(place).copy_(saved)
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
