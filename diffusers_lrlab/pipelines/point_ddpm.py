"""A pipeline that samples points.

This file imports nothing but torch, numpy and diffusers: a copy of it travels beside saved weights, so that they load
where diffusers_lrlab is not installed.
"""

import contextlib
import inspect
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor

# The files by which diffusers finds the code of components and of pipelines.
_DENOISER_CODE, _PIPELINE_CODE = "denoiser/diffusers_lrlab.py", "pipeline.py"
_MOST_POINTS = 10**12  # more is a slip


@dataclass
class PointPipelineOutput(BaseOutput):
    """
    What [`PointDDPMPipeline`] returns.

    Args:
        points (`np.ndarray` or `torch.Tensor`): Of shape `(num_points, dimension)`.
        frames (`np.ndarray`, `torch.Tensor` or `None`): The points on their way from noise, of shape
            `(num_frames, num_points, dimension)`, if requested.
        frame_timesteps (`list` of `int`, or `None`): The timesteps still ahead of each frame: all for pure noise, 0 for the
            points themselves.
    """

    points: np.ndarray | torch.Tensor
    frames: np.ndarray | torch.Tensor | None = None
    frame_timesteps: list[int] | None = None


def _check(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}).")


def _check_count(name: str, value: Any, least: int, most: int, also: tuple[int, ...] = ()) -> None:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    allowed = "".join(f"{each}, or " for each in also) + f"{least} to {most}"
    _check(name, value, is_whole and (least <= value <= most or value in also), allowed)


def _timesteps_left(scheduler: Any, step: int, timestep: torch.Tensor) -> int:
    """The number of training timesteps that remain before a sampling step; times of flow matching are not indices."""
    total = scheduler.config.num_train_timesteps
    if step == 0 or not hasattr(scheduler, "alphas_cumprod"):
        return round(total * (1 - step / len(scheduler.timesteps)))
    return min(total, int(timestep) + 1)


def scaled_input(scheduler: Any, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """The input of the model for a sample; schedulers without `scale_model_input`, as of flow matching, do not scale it."""
    return scheduler.scale_model_input(sample, timestep) if hasattr(scheduler, "scale_model_input") else sample


class PointDDPMPipeline(DiffusionPipeline):
    """
    Pipeline for points.

    Args:
        denoiser ([`MLPDenoiser`], or any `ModelMixin` that is called as it is):
            Predicts from `(num_points, dimension)` noisy points and a timestep.
        scheduler ([`SchedulerMixin`]):
            [`DDPMScheduler`], [`DDIMScheduler`], [`DPMSolverMultistepScheduler`], [`FlowMatchEulerDiscreteScheduler`] or
            another one of diffusers', for the noise process that the denoiser was trained on; with `clip_sample=False`,
            unless all data are within its `clip_sample_range`.
    """

    __module__ = "diffusers_lrlab"
    model_cpu_offload_seq = "denoiser"

    def __init__(self, denoiser: ModelMixin, scheduler: SchedulerMixin):
        super().__init__()
        # No stricter: compiled and prepared models are allowed, and parts that are loaded later.
        is_model = denoiser is None or isinstance(denoiser, torch.nn.Module)
        _check("denoiser", denoiser, is_model, "a ModelMixin, such as MLPDenoiser()")
        is_scheduler = scheduler is None or isinstance(scheduler, SchedulerMixin)
        _check("scheduler", scheduler, is_scheduler, "a scheduler of diffusers, such as DDPMScheduler()")
        self.register_modules(denoiser=denoiser, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        num_points: int = 1000,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        num_frames: int = 0,
        chunk_size: int = 65_536,
        output_type: Literal["np", "pt"] = "np",
        return_dict: bool = True,
    ) -> PointPipelineOutput | tuple[Any, ...]:
        """
        Samples points.

        Args:
            num_points (`int`, *optional*, defaults to 1000): How many.
            generator (`torch.Generator`, *optional*): Makes sampling deterministic: the same points for the same state,
                whatever `chunk_size` is, up to rounding.
            num_inference_steps (`int`, *optional*): Denoising steps; 100, or all timesteps of the noise schedule if fewer.
            num_frames (`int`, *optional*, defaults to 0): Frames of the way from noise (the first) to the points (the last),
                evenly spread over the steps; 0, or at least 2.
            chunk_size (`int`, *optional*, defaults to 65536): Points per pass through the model, which bounds the memory.
            output_type (`"np"` or `"pt"`, *optional*, defaults to `"np"`): Arrays, or tensors on the device of the model.
            return_dict (`bool`, *optional*, defaults to `True`): Return a [`PointPipelineOutput`] rather than a tuple
                `(points, frames, frame_timesteps)`.

        Example:
        ```py
        >>> import diffusers_lrlab
        >>> from diffusers import DiffusionPipeline

        >>> pipeline = DiffusionPipeline.from_pretrained("ddpm-dino")
        >>> points = pipeline(num_points=10_000).points
        ```
        """
        num_timesteps = self.scheduler.config.num_train_timesteps
        steps = min(100, num_timesteps) if num_inference_steps is None else num_inference_steps
        _check_count("num_points", num_points, 1, _MOST_POINTS)
        _check_count("num_inference_steps", steps, 1, num_timesteps)
        _check_count("num_frames", num_frames, 2, steps + 1, also=(0,))
        _check_count("chunk_size", chunk_size, 1, _MOST_POINTS)
        _check("output_type", output_type, isinstance(output_type, str) and output_type in ("np", "pt"), "'np' or 'pt'")
        _check("generator", generator, isinstance(generator, torch.Generator | None), "a torch.Generator or None")
        _check("return_dict", return_dict, isinstance(return_dict, bool), "True or False")
        device = self._execution_device
        shape = (num_points, self.denoiser.config.dimension)
        points = randn_tensor(shape, generator=generator, device=device, dtype=self.denoiser.dtype)
        self.scheduler.set_timesteps(steps, device=device)
        points = points * getattr(self.scheduler, "init_noise_sigma", 1.0)
        arguments = {"generator": generator} if "generator" in inspect.signature(self.scheduler.step).parameters else {}

        # Solvers of higher order take more steps than requested.
        shown = {round(position) for position in np.linspace(0, len(self.scheduler.timesteps), num_frames)}
        frames, ahead = [], []
        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            if step in shown:
                frames.append(points)
                ahead.append(_timesteps_left(self.scheduler, step, timestep))
            noisy = scaled_input(self.scheduler, points, timestep)
            prediction = torch.cat([self.denoiser(part, timestep).sample for part in noisy.split(chunk_size)])
            points = self.scheduler.step(prediction, timestep, points, **arguments).prev_sample
        drawn: list[Any] = [points, torch.stack([*frames, points])] if num_frames else [points]
        if output_type == "np":
            drawn = [values.float().cpu().numpy() for values in drawn]
        self.maybe_free_model_hooks()
        output = (*drawn, [*ahead, 0]) if num_frames else (*drawn, None, None)
        return PointPipelineOutput(*output) if return_dict else output

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """
        Saves the pipeline, and the code that loads it where diffusers_lrlab is not installed.

        `DiffusionPipeline.from_pretrained(path, custom_pipeline=path, trust_remote_code=True)` runs that code; after
        `import diffusers_lrlab` it is not needed and not run. See `DiffusionPipeline.save_pretrained` for the arguments.
        """
        folder = Path(save_directory)
        if type(self.denoiser).__module__ == "diffusers_lrlab" and not folder.is_file():
            sources = {_DENOISER_CODE: type(self.denoiser).forward, _PIPELINE_CODE: type(self).__call__}
            for name, method in sources.items():
                source = inspect.getfile(inspect.unwrap(method))
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(shutil.SameFileError):
                    shutil.copyfile(source, folder / name)
        # After the code, as this may upload the folder.
        super().save_pretrained(save_directory, *args, **kwargs)
