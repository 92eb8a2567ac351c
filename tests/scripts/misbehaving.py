"""Functions of every registry that misbehave, for `--import`: each in one way, which its name says."""

import sys

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

import diffusers_lrlab as lab
from diffusers_lrlab.averaging.forms import EMA_FORMS
from diffusers_lrlab.data.toy2d import TOY_DATASETS
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiserOutput
from diffusers_lrlab.training.kinds import KINDS
from diffusers_lrlab.training.kinds.points import Points

ABOUT = {"description": "misbehaves", "source": "a test"}


def using(register):
    return lambda name, function, **more: register(name, **ABOUT, **more)(function)


schedule, momentum = using(lab.register_schedule), using(lab.register_momentum_schedule)
sampler, weighting = using(lab.register_timestep_sampler), using(lab.register_loss_weighting)
noise, optimizer = using(lab.register_noise), using(lab.register_optimizer)
ema, toy = using(EMA_FORMS.register), using(TOY_DATASETS.register)

schedule("schedule_raises", lambda progress: progress.fraction * undefined)  # noqa: F821
schedule("schedule_needs_arrays", lambda progress: np.ones(len(progress.update)))
schedule("schedule_needs_numbers", lambda progress: 1.0 if progress.fraction < 0.5 else 0.5)
schedule("schedule_none", lambda progress: None)
schedule("schedule_exits", lambda progress: sys.exit(0))
schedule("schedule_of_others", lambda progress: np.ones(3))
schedule("schedule_nan", lambda progress: np.where(progress.fraction > 0.5, np.nan, 1.0))
schedule("schedule_alone_negative", lambda progress: 1.0 + 0.0 * progress.fraction if np.ndim(progress.update) else -1.0)


class FailingFeedback(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def __init__(self, optimizer, num_warmup_steps, **kwargs):
        raise RuntimeError("not today")


schedule("feedback_raises", "lrlab_plugin_misbehaving:FailingFeedback", traits=("feedback",))

momentum("momentum_raises", lambda progress, momentum: momentum * undefined)  # noqa: F821
momentum("momentum_one_number", lambda progress, momentum: momentum)
momentum("momentum_above_one", lambda progress, momentum: (1.5, 1.0))

sampler("sampler_raises", lambda progress, levels: levels.nothing)
sampler("sampler_zeros", lambda progress, levels: np.zeros(levels.num_train_timesteps))
sampler("sampler_nan", lambda progress, levels: np.full(levels.num_train_timesteps, np.nan))
sampler("sampler_complex", lambda progress, levels: np.ones(levels.num_train_timesteps) + 0j)
sampler("sampler_changes", lambda progress, levels: 1.0 + (progress.update > 2) * levels.position)
sampler("sampler_changes_late", lambda progress, levels: 1.0 + (progress.fraction > 0.9) * levels.position)
sampler("sampler_random", lambda progress, levels: np.random.random(levels.num_train_timesteps))


class FailingState:
    """Of a sampler that follows the losses."""

    def __init__(self, levels, device=None):
        self.density = torch.full((levels.num_train_timesteps,), 1.0 / levels.num_train_timesteps, dtype=torch.float64)

    def probabilities(self):
        return self.density

    def observe(self, timesteps, losses):
        raise KeyError("nothing would be learned")


sampler("sampler_state_raises", "lrlab_plugin_misbehaving:FailingState", traits=("feedback",))

weighting("weighting_raises", lambda levels: levels.nothing)
weighting("weighting_random", lambda levels: np.random.random(levels.num_train_timesteps))
weighting("weighting_zeros", lambda levels: np.zeros(levels.num_train_timesteps))
weighting("weighting_negative", lambda levels: -np.ones(levels.num_train_timesteps))
weighting("weighting_nan", lambda levels: np.full(levels.num_train_timesteps, np.nan))


def _drawn_by_numpy(noise, images, generator):
    return torch.from_numpy(np.random.standard_normal(tuple(noise.shape)).astype(np.float32))


noise("noise_raises", lambda noise, images, generator: noise + images)  # which are None
noise("noise_array", lambda noise, images, generator: noise.numpy())
noise("noise_ints", lambda noise, images, generator: noise.round().long())
noise("noise_of_one", lambda noise, images, generator: noise[:1])
noise("noise_nan", lambda noise, images, generator: noise / 0 * 0)
noise("noise_global", lambda noise, images, generator: torch.randn_like(noise))
noise("noise_global_of_numpy", _drawn_by_numpy)


class Still(torch.optim.SGD):
    def step(self, closure=None):
        return None


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("no step is taken")


optimizer("optimizer_raises", lambda params, lr: params.nothing)
optimizer("optimizer_object", lambda params, lr: object())
optimizer("optimizer_still", lambda params, lr: Still(params, lr=lr))
optimizer("optimizer_of_others", lambda params, lr: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr))
optimizer("optimizer_step_raises", lambda params, lr: Failing(params, lr=lr))
optimizer("optimizer_lbfgs", lambda params, lr: torch.optim.LBFGS(params, lr=lr))

ema("ema_raises", lambda since, every: since * undefined)  # noqa: F821
ema("ema_complex", lambda since, every: 0.9 + 0j)
ema("ema_above_one", lambda since, every: 1.5 + 0.0 * since)


def _late(since, every):
    if np.ndim(since) == 0 and since > 1:
        raise OSError("too late")
    return 0.9 + 0.0 * since


ema("ema_raises_late", _late)

toy("toy_raises", lambda n, rng: rng.nothing)
toy("toy_flat", lambda n, rng: rng.standard_normal(n))
toy("toy_nan", lambda n, rng: np.full((n, 2), np.nan))


def denoiser(name, answer, build=None):
    class_name = "".join(part.title() for part in name.split("_"))

    def forward(self, sample, timestep, return_dict=True):
        return answer(self, self.linear(sample))

    @register_to_config
    def __init__(self, dimension: int):
        ModelMixin.__init__(self)
        self.linear = torch.nn.Linear(dimension, dimension)
        if build is not None:
            build(self)

    body = {"forward": forward, "__init__": __init__, "__module__": __name__}
    lab.register_denoiser(name, **ABOUT)(type(class_name, (ModelMixin, ConfigMixin), body))


def _not_on_a_real_device(model):
    if model.linear.weight.device.type != "meta":
        raise LookupError("only on paper")


def _tied(model):
    model.again = torch.nn.Linear(2, 2, bias=False)
    model.again.weight = model.linear.weight


def _overlapping(model):
    rows = torch.randn(3, 2)
    model.upper, model.lower = torch.nn.Parameter(rows[:2]), torch.nn.Parameter(rows[1:])


def _one_value_in_evaluation(model, values):
    return MLPDenoiserOutput(values if model.training else values[:, :1])


denoiser("denoiser_tensor", lambda model, values: values)
denoiser("denoiser_exits", lambda model, values: sys.exit(0))
denoiser("denoiser_one_value", lambda model, values: MLPDenoiserOutput(values[:, :1]))
denoiser("denoiser_raises", lambda model, values: MLPDenoiserOutput(values @ values))
denoiser("denoiser_nan", lambda model, values: MLPDenoiserOutput(values / 0 * 0))
denoiser("denoiser_ints", lambda model, values: MLPDenoiserOutput(values.long()))
denoiser("denoiser_detached", lambda model, values: MLPDenoiserOutput(values.detach()))
denoiser("denoiser_one_value_in_evaluation", _one_value_in_evaluation)
denoiser("denoiser_not_built", lambda model, values: MLPDenoiserOutput(values), _not_on_a_real_device)
denoiser("denoiser_tied", lambda model, values: MLPDenoiserOutput(model.again(values)), _tied)
denoiser("denoiser_overlapping", lambda model, values: MLPDenoiserOutput(values @ model.upper @ model.lower), _overlapping)


@KINDS.register("kind_cannot_sample", **ABOUT)
class KindCannotSample(Points):
    name = "kind_cannot_sample"

    def sample(self, pipeline, num, generator, num_inference_steps):
        return pipeline.nothing
