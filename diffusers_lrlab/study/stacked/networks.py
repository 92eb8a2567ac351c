"""The networks of a stack as one computation, a batched product for each layer: predictions, gradients and samples."""

import inspect
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor

from ...core.streams import stream_generator
from ...pipelines.point_ddpm import scaled_input
from ..measure import Drawing, drawing_of
from ..spec.spec import RunSpec
from .member import Member

# Points of all members in a pass: on a CPU as many as fit its caches, elsewhere as many as fill the device.
_POINTS_ON_CPU, _POINTS_ON_DEVICE = 1000, 262_144


@torch.no_grad()
def stack_parameters(parameters: Iterable[Iterable[torch.Tensor]]) -> list[torch.Tensor]:
    """The parameters of all networks, `(members, ...)` each, in the order of a network."""
    return [torch.stack(own) for own in zip(*parameters, strict=True)]


def own_parameters(stacked: Sequence[torch.Tensor], member: int) -> list[torch.Tensor]:
    """The parameters of one network, as views."""
    return [values[member] for values in stacked]


def per_member(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers `(members,)` in the precision of `like`, so that they are broadcast over its other dimensions."""
    return values.to(like).view(-1, *[1] * (like.ndim - 1))


def embed(model: Any, points: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """The embeddings that [`predict`] takes, of points `(members, batch, dimension)` at timesteps `(members, batch)`."""
    return model.embed(points.flatten(0, 1), timesteps.flatten()).unflatten(0, points.shape[:2])


def predict(
    parameters: Sequence[torch.Tensor], embedding: torch.Tensor, inputs: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """
    Predictions of [`MLPDenoiser`]s: `(members, batch, dimension)`. No operation mixes networks.

    If `inputs` is given, the input of each layer is appended to it, for [`gradients_of`]; else sums are rounded as in
    `MLPDenoiser.forward`.
    """
    first, *blocks, last = zip(parameters[::2], parameters[1::2], strict=True)
    active = embedding.to(parameters[0].dtype)
    kept, hidden = [active], _linear(active, *first)
    for weight, bias in blocks:
        active = hidden.relu()
        if inputs is None:
            hidden = _linear(active, weight, bias).add_(hidden)
        else:  # both terms beside the product are added first, which saves a pass
            kept.append(active)
            hidden = hidden.add_(bias[:, None]).baddbmm_(active, weight.mT)
    active = hidden.relu_()
    if inputs is not None:
        inputs += [*kept, active]
    return _linear(active, *last)


def _linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(bias[:, None], values, weight.mT)


def gradients_of(
    parameters: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor]:
    """
    Gradients of all parameters, by the `gradient` of the predictions `(members, batch, dimension)` and the layers' `inputs`.

    Autograd would transpose the gradients of weights, and torch's fused optimizers for CPUs are wrong unless gradients lie
    in memory as weights do. It would also take new memory for the gradient of the ReLU and for sums.
    """
    weights, found = parameters[::2], []
    for index in reversed(range(len(weights))):
        active = inputs[index]
        found += [gradient.sum(1), torch.bmm(gradient.mT, active)]
        if index:
            through = torch.bmm(gradient, weights[index])
            torch.ops.aten.threshold_backward.grad_input(through, active, 0, grad_input=through)
            is_block = index < len(weights) - 1
            gradient = through.add_(gradient) if is_block else through
    return found[::-1]


def clip(gradients: Sequence[torch.Tensor], max_norms: torch.Tensor) -> torch.Tensor:
    """
    Clips the gradient of each network as `torch.nn.utils.clip_grad_norm_` does, and returns the norms before clipping.

    `max_norms` is `(members,)`, infinite for networks without clipping.
    """
    # Members are the first dimension, so that the order of a sum does not depend on their number.
    parts = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients], dim=1)
    norms = torch.linalg.vector_norm(parts, dim=1)
    factors = (max_norms / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(per_member(factors, gradient))
    return norms


def draw_together(runs: list[tuple[Member, RunSpec]], drawn: dict[str, np.ndarray]) -> Iterator[bool]:
    """
    Generates the samples of all runs into `drawn`, by run id, and yields `True` after each step.

    They equal the samples of each run's own pipeline up to the rounding of batched products.
    """
    alike: dict[Any, list[tuple[Member, str, Drawing]]] = {}
    for member, spec in runs:
        drawing = drawing_of(member.run, spec)
        if drawing is not None and drawing.num <= member.run.kind.sampling_batch:  # else the run samples by itself, in parts
            alike.setdefault((drawing.num, drawing.num_steps), []).append((member, spec.id, drawing))
    for some in alike.values():
        started = time.perf_counter()
        members, run_ids, drawings = zip(*some, strict=True)
        samples = yield from _sample(members, drawings)
        drawn.update(zip(run_ids, samples, strict=True))
        for member in members:
            member.run.sampling_seconds = (time.perf_counter() - started) / len(some)


def _sample(members: Sequence[Member], drawings: Sequence[Drawing]) -> Generator[bool, None, np.ndarray]:
    parameters = stack_parameters(_averaged(member) for member in members)
    model, like = members[0].run.model, parameters[0]
    num, num_steps, *_ = drawings[0]
    scheduler = members[0].run.process.sampling_scheduler()
    scheduler.set_timesteps(num_steps, device=like.device)
    generators = [stream_generator(*drawing.stream, device=like.device) for drawing in drawings]
    shape = (len(members), num, model.config.dimension)
    points = randn_tensor(shape, generators, like.device, like.dtype) * getattr(scheduler, "init_noise_sigma", 1.0)
    draws_noise = "generator" in inspect.signature(scheduler.step).parameters
    arguments = {"generator": generators} if draws_noise else {}
    for timestep in scheduler.timesteps:
        with torch.no_grad():
            prediction = _predict(model, parameters, scaled_input(scheduler, points, timestep), timestep)
            points = scheduler.step(prediction, timestep, points, **arguments).prev_sample
        yield True
    return points.float().cpu().numpy()


def _predict(model: Any, parameters: list[torch.Tensor], points: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    most, num = _POINTS_ON_CPU if points.device.type == "cpu" else _POINTS_ON_DEVICE, points.shape[1]
    num_parts = -(-num // most)
    num_members = max(1, most * num_parts // num)
    predictions = []
    for start in range(0, len(points), num_members):
        some = slice(start, start + num_members)
        own = [values[some] for values in parameters]
        parts = points[some].tensor_split(num_parts, 1)
        predictions.append(
            torch.cat([predict(own, embed(model, part, timestep.expand(part.shape[:2]))) for part in parts], 1)
        )
    return torch.cat(predictions)


def _averaged(member: Member) -> list[torch.Tensor]:
    with member.run.averaged_weights():
        return [parameter.detach().clone() for parameter in member.run.model.parameters()]
