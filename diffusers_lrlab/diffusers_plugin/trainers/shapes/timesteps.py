"""How trainers draw timesteps, a function for each shape of call.

Each calls the trainer's own function first, so that the trainer's random numbers stay as they are, and replaces its
timesteps. A timestep is an index that grows with the noise. In flow matching it stands for a fraction of noise in the
middle of its share of [0, 1].
"""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch

from ....core.errors import LabError
from ....timesteps.noise_levels import FLOW_VELOCITY, NoiseLevels, noise_levels

_NUM_FLOW_TIMESTEPS = 1000
_PACKAGE = __name__.partition(".")[0]


class Draws(Protocol):
    """An object that takes a trainer's timesteps and returns others."""

    seed: int | None

    def is_training(self) -> bool: ...
    def begin(self, levels: NoiseLevels, prediction_type: str, converts_to_data: bool = False) -> None: ...
    def set_layout(self, accumulation: int) -> None: ...
    def replaced(self, own: torch.Tensor) -> torch.Tensor: ...
    def density(self) -> np.ndarray: ...
    def argument(self, name: str) -> Any: ...


def flow_levels_of(sigmas: np.ndarray) -> NoiseLevels:
    """The noise levels of fractions of noise, float64 of shape `(T,)`."""
    return NoiseLevels((1 - sigmas) ** 2 / ((1 - sigmas) ** 2 + sigmas**2))


def _flow_levels() -> NoiseLevels:
    return flow_levels_of((np.arange(_NUM_FLOW_TIMESTEPS) + 0.5) / _NUM_FLOW_TIMESTEPS)


def trainer_frame() -> FrameType:
    """The trainer's frame that made the running call."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _must(name: str, wanted: str, value: Any, hint: str) -> LabError:
    return LabError(f"--timestep_sampler: {name} must be {wanted}, got {value}. Hint: {hint}.")


def indices_in_range(
    hook: Draws, draw: Callable[..., torch.Tensor], min_timestep: int, max_timestep: int, b_size: int, device: Any
) -> torch.Tensor:
    """sd-scripts without flow matching: indices in `[min_timestep, max_timestep)`; of one timestep where it validates."""
    own = draw(min_timestep, max_timestep, b_size, device)
    if min_timestep >= max_timestep or not hook.is_training():
        return own
    values = trainer_frame().f_locals.values()
    schedulers = [each for each in values if hasattr(each, "alphas_cumprod") and hasattr(each, "config")]
    if len(schedulers) != 1:
        raise _must("the noise scheduler", "one variable of the function that draws timesteps", len(schedulers), "remove it")
    if (min_timestep, max_timestep) != (0, schedulers[0].config.num_train_timesteps):
        raise _must("the range of timesteps", "the whole", f"[{min_timestep}, {max_timestep})", "remove its limits")
    hook.begin(noise_levels(schedulers[0]), "v_prediction" if hook.argument("v_parameterization") else "epsilon")
    return hook.replaced(own)


def _mixed_anew(
    hook: Draws, call: Callable[..., Any], offset: float, args: Any, kwargs: Any, converts_to_data: bool = False
) -> tuple[torch.Tensor, ...]:
    """The result of a trainer's function that mixes latents and noise, mixed again at the sampler's fractions of noise."""
    own = call(*args, **kwargs)
    if not hook.is_training():
        return own
    given = inspect.signature(call).bind(*args, **kwargs).arguments
    latents, noise = given["latents"], given["noise"]
    noisy, timesteps = own[0], own[1]
    scale = float(_NUM_FLOW_TIMESTEPS)
    sigmas = own[2].flatten() if len(own) > 2 else (timesteps.float() - offset) / scale

    def mixed(sigmas: torch.Tensor) -> torch.Tensor:
        wide = sigmas.view(-1, *[1] * (latents.ndim - 1))
        return ((1.0 - wide) * latents + wide * noise).to(noisy.dtype)

    if not torch.allclose(mixed(sigmas).float(), noisy.float(), rtol=0.02, atol=0.02):
        raise _must(
            "the model's input", "(1 - sigma) * latents + sigma * noise", "another mixture", "remove options for noise"
        )
    hook.begin(_flow_levels(), FLOW_VELOCITY, converts_to_data)
    indices = _indices(sigmas)
    replaced = hook.replaced(indices)
    if replaced is indices:
        return own
    sigmas = _middles(replaced).to(sigmas)
    result = mixed(sigmas), (sigmas * scale + offset).to(timesteps.dtype)
    return (*result, sigmas.view_as(own[2])) if len(own) > 2 else result


def _indices(sigmas: torch.Tensor) -> torch.Tensor:
    return (sigmas.double() * _NUM_FLOW_TIMESTEPS).long().clamp(0, _NUM_FLOW_TIMESTEPS - 1)


def _middles(indices: torch.Tensor) -> torch.Tensor:
    return (indices + 0.5) / _NUM_FLOW_TIMESTEPS


def noisy_input_and_sigmas(hook: Draws, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """sd-scripts, flow matching: the noisy input, 1000 sigma, and sigma."""
    return _mixed_anew(hook, call, 0.0, args, kwargs)


def noisy_input_and_sigmas_for_data(
    hook: Draws, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """sd-scripts, SD 3, whose loss compares data: its model's output is converted by `noisy - sigma * output`."""
    return _mixed_anew(hook, call, 0.0, args, kwargs, converts_to_data=True)


def noisy_input(hook: Draws, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """musubi-tuner: the noisy input, and 1000 sigma + 1."""
    return _mixed_anew(hook, call, 1.0, args, kwargs)


def sigmas_and_timesteps(
    hook: Draws, call: Callable[..., Any], model: Any, batch: Any, state: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """SimpleTuner: sigma, and 1000 sigma."""
    sigmas, timesteps = call(model, batch, state)
    if not hook.is_training():
        return sigmas, timesteps
    if not torch.allclose(timesteps.float(), sigmas.float() * 1000, rtol=0.01):
        raise _must("its timesteps", "1000 times its sigmas", timesteps.tolist(), "this model cannot be used")
    hook.begin(_flow_levels(), FLOW_VELOCITY)
    indices = _indices(sigmas)
    replaced = hook.replaced(indices)
    if replaced is indices:
        return sigmas, timesteps
    own = _middles(replaced)
    return own.to(sigmas), (own * 1000).to(timesteps)


def indices_by_config(hook: Draws, draw: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """OneTrainer: indices; of one timestep where it validates. The fraction of noise of a flow is (index + 1) / T."""
    own = draw(*args, **kwargs)
    given = inspect.signature(draw).bind(*args, **kwargs).arguments
    config, num = given["config"], given["num_train_timesteps"]
    if given["deterministic"]:
        return own
    if (config.min_noising_strength, config.max_noising_strength) != (0.0, 1.0):
        limits = f"[{config.min_noising_strength}, {config.max_noising_strength}]"
        raise _must("its noising strength", "in [0.0, 1.0], the whole range", limits, "remove its limits")
    scheduler = getattr(trainer_frame().f_locals.get("model"), "noise_scheduler", None)
    if scheduler is None:
        raise _must("its model", "one with a noise scheduler", "none", "this model cannot be used")
    if hasattr(scheduler, "alphas_cumprod"):
        hook.begin(noise_levels(scheduler), str(scheduler.config.prediction_type))
    else:
        hook.begin(flow_levels_of(np.arange(1, num + 1) / num), FLOW_VELOCITY)
    hook.seed = config.seed
    hook.set_layout(config.gradient_accumulation_steps)
    return hook.replaced(own.long()).to(own)


# --- tables from which a trainer draws uniformly -----------------------------------------------------------------------


def _quantiles(density: np.ndarray, num: int) -> np.ndarray:
    """The fractions of noise at the middles of `num` equal shares of a density, rising."""
    cumulative = np.concatenate([[0.0], np.cumsum(density)])
    return np.interp((np.arange(num) + 0.5) / num, cumulative / cumulative[-1], np.linspace(0, 1, len(density) + 1))


def table_of_timesteps(
    hook: Draws, call: Callable[..., torch.Tensor], scheduler: Any, num_timesteps: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """ai-toolkit: timesteps from the most noise, 1000 sigma, of which it draws one uniformly."""
    own = call(scheduler, num_timesteps, *args, **kwargs)
    config = getattr(trainer_frame().f_locals.get("self"), "train_config", None)
    if config is None:
        return own
    harmless = {
        "content_or_style": ("balanced",),
        "content_or_style_reg": ("balanced",),
        "timestep_type": ("linear", "sigmoid", "flux_shift", "lumina2_shift", "shift", "lognorm_blend"),
        "linear_timesteps": (None, False),
        "linear_timesteps2": (None, False),
    }
    for name, values in harmless.items():
        value = getattr(config, name, values[0])
        if value not in values:
            raise _must(f"train.{name}", " or ".join(map(str, values)), value, "its draw would not follow the density")
    hook.begin(_flow_levels(), FLOW_VELOCITY)
    table = torch.from_numpy(_quantiles(hook.density(), num_timesteps)[::-1] * 1000)
    scheduler.timesteps = table.to(own)
    return scheduler.timesteps


def table_of_quantiles(hook: Draws, call: Callable[..., torch.Tensor], model_config: Any) -> torch.Tensor:
    """diffusion-pipe: sigma at equal steps of the probability, made once before training."""
    own = call(model_config)
    for name in ("shift", "flux_shift", "min_t", "max_t"):
        if model_config.get(name):
            raise _must(f"{name} of [model]", "left out", model_config[name], "it would change the density")
    hook.begin(_flow_levels(), FLOW_VELOCITY)
    return torch.from_numpy(_quantiles(hook.density(), len(own))).to(own)


TABLES: tuple[Callable[..., Any], ...] = (table_of_timesteps, table_of_quantiles)
"""Shapes whose trainer draws the timesteps itself, so that they are not known here."""

STATIC: tuple[Callable[..., Any], ...] = (table_of_quantiles,)
"""Shapes that are called once, before training."""
