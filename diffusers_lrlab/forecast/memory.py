"""The memory of training, part by part, from a pass over tensors that have shapes and no contents."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import NamedTuple

import torch

from ..loss import denoising_losses
from ..optimizers import OPTIMIZERS, get_optimizer, optimizer_state_bytes
from ..training.objective import make_noise_scheduler
from ..training.plan import Plan

_ACTIVATIONS = ("ACT", "TEMP", "OTH", "BUFFER")


class MemoryForecast(NamedTuple):
    """
    Bytes on the device of one process at the moment of an update when they are most.

    Args:
        parameters, gradients, optimizer, ema, activations, held_out (`int`): Those of the parts; gradients and activations
            as many as there are at that moment. Gradients of several processes have a copy that is exchanged. Activations
            are what the backward pass needs, inputs, and what is computed on the way; held-out data come with their noise.
    """

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    held_out: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def forecast_memory(
    plan: Plan,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    gradient_checkpointing: bool | None = None,
    mixed_precision: str | None = None,
    device: str = "cpu",
) -> MemoryForecast:
    """
    The memory of a run, or of one that differs from it in something.

    Forward pass, backward pass and optimizer step run on fake tensors under torch's `MemTracker`, which computes nothing:
    what is alive when is counted, for any model and size. What libraries take beside tensors, such as workspaces of
    convolutions, is not in it; `benchmarks/memory_forecast.py` compares it with what processes really take.

    Args:
        plan ([`Plan`]): The run.
        micro_batch (`int`, *optional*): Images per process and forward pass.
        accumulation (`int`, *optional*): Micro-batches of an update.
        gradient_checkpointing (`bool`, *optional*): Whether activations are computed again.
        mixed_precision (`str`, *optional*): "no", "fp16" or "bf16".
        device (`str`, *optional*): The type of the device, which decides what mixed precision keeps in float32.
    """
    config = plan.config
    if gradient_checkpointing is not None:
        config = dataclasses.replace(config, gradient_checkpointing=gradient_checkpointing)
    if mixed_precision is not None:
        config = dataclasses.replace(config, mixed_precision=mixed_precision)  # type: ignore[arg-type]  # one of them
    layout = dataclasses.replace(
        plan.layout,
        micro_batch=micro_batch or plan.layout.micro_batch,
        accumulation=accumulation or plan.layout.accumulation,
    )
    shared = dataclasses.replace(plan, config=config, layout=layout)
    try:
        peak = _track(shared, device, with_optimizer=True)
    except Exception:  # optional optimizers look into tensors, and these hold nothing
        peak = _track(shared, device, with_optimizer=False)
        peak["OPT"] = optimizer_bytes(plan, config.optimizer)
    weights = peak["PARAM"]
    ema = weights if config.use_ema else 0
    gradients = peak["GRAD"] + (weights if layout.num_processes > 1 else 0)
    held_out = 2 * 4 * plan.num_held_out * math.prod(_shape(plan))
    return MemoryForecast(weights, gradients, peak["OPT"], ema, sum(peak[part] for part in _ACTIVATIONS), held_out)


def _shape(plan: Plan) -> tuple[int, ...]:
    """Of an image, or a point."""
    config = plan.config
    if config.point_column is not None:
        return (plan.model_config["dimension"],)
    return (config.image_channels, config.resolution, config.resolution)


def optimizer_bytes(plan: Plan, name: str) -> int:
    """The state of another optimizer with its defaults, on the parameters of this run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            model = plan.kind.model_class()(**plan.model_config)
            optimizer = get_optimizer(name, model.parameters(), 1e-4)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            return optimizer_state_bytes(optimizer)
    except Exception:  # optional ones look into tensors, and these hold nothing
        return int(OPTIMIZERS[name].facts.get("state_bytes", 8) * plan.num_parameters)


def _track(plan: Plan, device: str, with_optimizer: bool) -> dict[str, int]:
    """Bytes by category at the peak of the second update, when the optimizer has its state."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    config, accumulation = plan.config, min(2, plan.layout.accumulation)
    shape = (plan.layout.micro_batch, *_shape(plan))
    with FakeTensorMode(), torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = plan.kind.model_class()(**plan.model_config).train()
        if config.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        scheduler = make_noise_scheduler(config)
        images, noise = torch.zeros(shape), torch.zeros(shape)
        timesteps = torch.zeros(shape[0], dtype=torch.int64)
        optimizer = None
        if with_optimizer:
            optimizer = get_optimizer(config.optimizer, model.parameters(), 1e-4, **config.optimizer_arguments)
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.mixed_precision or "no")
        tracker = MemTracker()
        tracker.track_external(model, images, noise, timesteps, *([optimizer] if optimizer else []))
        with tracker:
            for _ in range(2):
                for _ in range(accumulation):
                    with torch.autocast(device, low, enabled=low is not None):
                        losses = denoising_losses(model, scheduler, images, noise, timesteps)
                    (losses.mean() / accumulation).backward()
                    del losses
                    tracker.reset_mod_stats()  # it refuses a second pass otherwise
                if optimizer is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or 1e9)
                    optimizer.step()
                for parameter in model.parameters():
                    parameter.grad = None
        found = tracker.get_tracker_snapshot("peak").items()
    (snapshot,) = (bytes_of for where, bytes_of in found if where.type == device)
    return {getattr(part, "name", str(part)): int(size) for part, size in snapshot.items()}


def batches_that_fit(plan: Plan, available: int, device: str = "cpu") -> tuple[int, MemoryForecast] | None:
    """
    The largest power of two of images per micro-batch whose updates fit into so many bytes, with its forecast.

    `None` if not even one image does.

    Activations grow with the images: two forecasts give the line that the answer lies on.
    """
    small, large = (forecast_memory(plan, micro_batch=size, device=device) for size in (2, 4))
    per_image = (large.activations - small.activations) / 2
    fixed = small.total - 2 * per_image
    if fixed + per_image > available:
        return None
    most = 1
    while fixed + 2 * most * per_image <= available and most < 2**20:
        most *= 2
    return most, small._replace(activations=int(small.activations + (most - 2) * per_image))


def available_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return int(psutil.virtual_memory().available)
