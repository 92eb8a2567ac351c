"""The memory of training by part, from a pass over fake tensors, which have shapes and no contents."""

import dataclasses
import math
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data.batch import Batch
from ..optimizers.build import get_optimizer, optimizer_state_bytes
from ..optimizers.entries import OPTIMIZERS
from ..training.lora import trained_parameters
from ..training.plan import Plan
from ..training.resolve_timesteps import objective_spec
from ..training.sharding import fsdp_is_asked_for
from .decoding import decoding_bytes

_MANY, _MOST_POWER = 64, 20  # images of a batch
_ACTIVATIONS = ("ACT", "TEMP", "OTH", "BUFFER")


class MemoryForecast(NamedTuple):
    """Bytes on the device of one process at the peak of an update."""

    parameters: int
    gradients: int  # that exist at the peak; several processes exchange them in place
    optimizer: int
    ema: int
    activations: int  # for the backward pass, with inputs and temporary results
    held_out: int  # data, conditions and noise
    copies: int = 0  # inputs and outputs of the largest convolution, which the CPU library copies
    checkpoint: int = 0  # the copy that a thread writes during updates, on the CPU
    autoencoder: int = 0  # that decodes samples, and what decoding takes beyond the passes of training

    @property
    def total(self) -> int:
        return sum(self)


def forecast_memory(
    plan: Plan, micro_batch: int | None = None, accumulation: int | None = None, device: str = "cpu", **options: Any
) -> MemoryForecast:
    """
    The memory of a run, or of one with another batch and other `options`.

    Forward and backward passes run on fake tensors under torch's `MemTracker`, which counts living tensors and computes
    nothing, for any model and size. `benchmarks/memory_forecast.py` compares it with real processes. The type of `device`
    decides what mixed precision keeps in float32.
    """
    config = dataclasses.replace(plan.config, **options)
    layout = dataclasses.replace(
        plan.layout,
        micro_batch=micro_batch or plan.layout.micro_batch,
        accumulation=accumulation or plan.layout.accumulation,
    )
    peak, copies = _track(dataclasses.replace(plan, config=config, layout=layout), device)
    state = optimizer_bytes(plan, config.optimizer, plan.optimizer_kwargs)
    weights, trained = peak["PARAM"], trained_bytes(plan, peak["PARAM"])
    passing = sum(peak[part] for part in _ACTIVATIONS)
    told = sum(values.element_size() * math.prod(values.shape[1:]) for values in plan.conditions.values())
    held_out = plan.num_held_out * (2 * 4 * math.prod(plan.item_shape) + told)
    gradients = peak["GRAD"]
    if gradients + passing < trained:  # the peak is the optimizer's step, with all gradients
        gradients, passing = trained, 0
    decoding = decoding_bytes(plan, device)
    more = max(0, decoding.activations - gradients - passing - copies)  # which are free while samples are decoded
    average, num = trained * len(config.ema_forms) if config.use_ema else 0, layout.num_processes
    if num > 1 and fsdp_is_asked_for():  # shards, and the gathered model, unless blocks are wrapped
        shard, gathered = weights // num, max(gradients, weights)
        sharded = MemoryForecast(weights + shard, gathered + shard, state // num, average // num, passing, held_out, copies)
        return sharded._replace(autoencoder=decoding.weights + more)
    if num > 1:  # DDP keeps its buckets, which hold the gradients
        gradients = max(gradients, trained)
    is_written_meanwhile = device == "cpu" and plan.num_updates > config.checkpointing_steps
    checkpoint = trained + state + average if is_written_meanwhile else 0
    return MemoryForecast(weights, gradients, state, average, passing, held_out, copies, checkpoint, decoding.weights + more)


def trained_bytes(plan: Plan, weights: int) -> int:
    """Bytes of the `weights` that are trained, which have gradients, averages and checkpoints, in float32."""
    return weights if plan.config.lora_rank is None else 4 * plan.num_trained_parameters


def optimizer_bytes(plan: Plan, name: str, arguments: dict[str, Any] | None = None) -> int:
    """The state of an optimizer on the parameters of this run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            trained = trained_parameters(_model_of(plan))
            optimizer = get_optimizer(name, trained.items(), 1e-4, **(arguments or {}))
            for parameter in trained.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            return optimizer_state_bytes(optimizer)
    except Exception:  # some optimizers read values, which fake tensors do not have
        return int(OPTIMIZERS[name].facts.get("state_bytes", 8) * plan.num_trained_parameters)


def _model_of(plan: Plan) -> Any:
    """The model of a plan on the present device, under fake tensors, which a LoRA cannot be added to."""
    if plan.config.lora_rank is None:
        return plan.new_model()
    model = plan.model_on_meta
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = torch.nn.Parameter(torch.zeros(value.shape), value.requires_grad)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.zeros(value.shape, dtype=value.dtype)
    return model


def _track(plan: Plan, device: str) -> tuple[dict[str, int], int]:
    """Peak bytes by category in the passes of an update, and bytes of the largest convolution's copies."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """A tracker without statistics per module, which take most of the time; it tells only gradients apart."""

        def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
            if not self._param_to_grad_hook_handles:
                self._track_module_params_and_buffers(with_gradients)

        def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
            pass

        def _pre_bw_hook(self, module: Any, args: Any) -> None:
            pass

        _post_bw_hook = _pre_bw_hook

    config, accumulation = plan.config, min(2, plan.layout.accumulation)
    shape = (plan.layout.micro_batch, *plan.item_shape)
    process = objective_spec(config).make_process()  # whose scheduler may read its own tables
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model_of(plan).train()
        with_gradients = torch.nn.ParameterList(value for value in model.parameters() if value.requires_grad)
        if config.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        if config.channels_last:
            for parameter in model.parameters():  # fake tensors cannot be swapped, as `Module.to` would do
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        sizes = [0]
        for module in model.modules() if device == "cpu" else ():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(lambda _, given, made: sizes.append(4 * (given[0].numel() + made.numel())))
        images, noise = torch.zeros(shape), torch.zeros(shape)
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        timesteps = torch.zeros(shape[0], dtype=torch.int64)
        told = {name: torch.zeros(shape[0], *own.shape[1:], dtype=own.dtype) for name, own in plan.conditions.items()}
        batch = Batch(images, told)
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.mixed_precision or "no")
        tracker = Tracker()
        tracker.track_external(model, images, noise, timesteps, *told.values())
        with tracker:
            for _ in range(accumulation):
                with torch.autocast(device, low, enabled=low is not None):
                    losses = process.losses(model, batch, noise, timesteps)
                losses.mean().backward()
                del losses
    found = tracker.get_tracker_snapshot("peak").items()
    (snapshot,) = (bytes_of for where, bytes_of in found if where.type == device)
    return {getattr(part, "name", str(part)): int(size) for part, size in snapshot.items()}, max(sizes)


def batch_that_fits(plan: Plan, available: float, device: str = "cpu", memory: MemoryForecast | None = None) -> int | None:
    """
    The largest micro-batch, a power of two, whose updates fit into `available` bytes; `None` if not even one image fits.

    Once activations outweigh gradients, memory is linear in the number of images. One forecast there gives the line, and
    another one confirms the answer or the next smaller one, unless it is far beyond the data. `memory` is that of the plan,
    if known.
    """

    def forecast(images: int) -> MemoryForecast:
        known = memory if images == plan.layout.micro_batch else None
        return known or forecast_memory(plan, micro_batch=images, device=device)

    images = max(_MANY, plan.layout.micro_batch)
    some = forecast(images)
    while some.activations < some.gradients:
        images *= 4
        some = forecast(images)
    room = (available - some.total) / ((some.activations + some.copies) / images) + images
    most = 2 ** min(_MOST_POWER, int(math.log2(max(room, 1))))
    if plan.num_images is not None and most > 2 * max(plan.num_images, images):
        return most
    while most and forecast(most).total > available:
        most //= 2
    return most or None


def available_bytes(device: torch.device) -> float:
    """Free memory of a device; on a CPU, within the limit of the container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return min(int(psutil.virtual_memory().available), container_room())


def container_room(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Free bytes of this process's container (Linux, cgroups v1 and v2); infinite without a limit."""
    for folder, limit, usage in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most, used = ((folder / name).read_text().strip() for name in (limit, usage))
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except OSError:
            continue
        if most.isdecimal():  # "max" otherwise
            return int(most) - int(used) + (int(cached[1]) if cached else 0)  # the cache is released when needed
    return math.inf
