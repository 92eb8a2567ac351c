"""A pipeline that samples images of given classes, with classifier-free guidance.

This file imports nothing but torch, numpy and diffusers: a copy of it travels beside saved weights, so that they load
where diffusers_lrlab is not installed.
"""

import contextlib
import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor

_CODE = "pipeline.py"  # where diffusers looks for the code of a pipeline


def _check(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}).")


def _is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check_scale(value: Any) -> None:
    is_scale = _is_number(value, (int, float)) and 0 <= value < float("inf")
    _check("guidance_scale", value, is_scale, "a number, 0 or above")


def _names_of_labels(id2label: Any) -> dict[int, str]:
    """The names by label, in the order of labels: files have them in the order of texts."""
    wanted = "the names of labels 0, 1, 2, ... as a dict, or None"
    _check("id2label", id2label, id2label is None or isinstance(id2label, Mapping), wanted)
    given = {str(label): name for label, name in (id2label or {}).items()}
    is_named = all(isinstance(given.get(str(label)), str) for label in range(len(given)))
    _check("id2label", id2label, is_named, wanted)
    return {label: given[str(label)] for label in range(len(given))}


class LabelledImagePipeline(DiffusionPipeline):
    r"""
    Pipeline for images by class.

    With a guidance scale \(s\) other than 1, the prediction at each step is
    \(\epsilon(x, \emptyset) + s\,(\epsilon(x, c) - \epsilon(x, \emptyset))\) (arXiv 2207.12598 has \(s = 1 + w\)), where
    \(\emptyset\) is the label after the last class. The model knows that label if labels were dropped in training.

    Args:
        unet ([`UNet2DModel`], or any `ModelMixin` that is called as it is):
            Predicts from `(num, channels, height, width)` noisy images, a timestep and `class_labels` of shape `(num,)`.
        scheduler ([`SchedulerMixin`]):
            A scheduler of diffusers for the noise process that the model was trained on, such as [`DDPMScheduler`],
            [`DDIMScheduler`] or [`FlowMatchEulerDiscreteScheduler`].
        id2label (`dict` of `int` to `str`, *optional*): The names of the classes; their numbers if not given.
        guidance_scale (`float`, *optional*, defaults to 1.0): Guidance of a call that gives none.
    """

    __module__ = "diffusers_lrlab"
    model_cpu_offload_seq = "unet"

    def __init__(
        self,
        unet: ModelMixin,
        scheduler: SchedulerMixin,
        # Files have the labels as texts. diffusers 0.35 knows a union by this name alone.
        id2label: Union[dict[int, str], dict[str, str], None] = None,  # noqa: UP007
        guidance_scale: float = 1.0,
    ):
        super().__init__()
        # No stricter: compiled and prepared models are allowed, and parts that are loaded later.
        is_model = unet is None or isinstance(unet, torch.nn.Module)
        _check("unet", unet, is_model, "a ModelMixin with class labels, such as UNet2DModel(num_class_embeds=10)")
        is_scheduler = scheduler is None or isinstance(scheduler, SchedulerMixin)
        _check("scheduler", scheduler, is_scheduler, "a scheduler of diffusers, such as DDPMScheduler()")
        _check_scale(guidance_scale)
        named = _names_of_labels(id2label)
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(id2label=named or None, guidance_scale=guidance_scale)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, by label."""
        named = self.config.id2label
        num: Any = getattr(self.unet.config, "num_class_embeds", None)
        fits = num is not None and num >= len(named or ())
        _check("num_class_embeds of the unet", num, fits, "the number of classes, or one more for dropped labels")
        return [*named.values()] if named else [str(label) for label in range(num)]

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | torch.Tensor,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        output_type: Literal["pil", "np", "pt"] = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """
        Samples an image for each label.

        Args:
            class_labels (`int`, `str`, or a list or tensor of them): Labels, or names of classes.
            generator (`torch.Generator`, *optional*): Makes sampling deterministic.
            num_inference_steps (`int`, *optional*): Denoising steps; 100, or all timesteps of the noise schedule if fewer.
            guidance_scale (`float`, *optional*): 1 for no guidance, 0 to ignore the labels, above 1 for images that are more
                typical of their class. That of the pipeline if not given.
            output_type (`"pil"`, `"np"` or `"pt"`, *optional*, defaults to `"pil"`): PIL images, or values in [0, 1]: an
                array `(num, height, width, channels)` or a tensor `(num, channels, height, width)`.
            return_dict (`bool`, *optional*, defaults to `True`): Return an [`ImagePipelineOutput`] rather than a tuple.

        Example:
        ```py
        >>> import diffusers_lrlab
        >>> from diffusers import DiffusionPipeline

        >>> pipeline = DiffusionPipeline.from_pretrained("ddpm-digits-8")
        >>> images = pipeline(class_labels=[3, 3, 7], num_inference_steps=50).images
        ```
        """
        num_timesteps = self.scheduler.config.num_train_timesteps
        steps = min(100, num_timesteps) if num_inference_steps is None else num_inference_steps
        scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        is_count = _is_number(steps, (int, np.integer)) and 1 <= steps <= num_timesteps
        _check("num_inference_steps", steps, is_count, f"1 to {num_timesteps}")
        _check_scale(scale)
        _check("generator", generator, isinstance(generator, torch.Generator | None), "a torch.Generator or None")
        _check("output_type", output_type, output_type in ("pil", "np", "pt"), "'pil', 'np' or 'pt'")
        _check("return_dict", return_dict, isinstance(return_dict, bool), "True or False")
        labels, device = self.label_ids(class_labels), self._execution_device
        has_null = scale == 1 or self.unet.config.num_class_embeds > len(self.class_names)
        _check("guidance_scale", scale, has_null, "1 for a model that was trained without dropped labels")

        config = self.unet.config
        size = (config.sample_size,) * 2 if isinstance(config.sample_size, int) else tuple(config.sample_size)
        shape = (len(labels), config.in_channels, *size)
        images = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
        self.scheduler.set_timesteps(steps, device=device)
        images = images * getattr(self.scheduler, "init_noise_sigma", 1.0)
        arguments = {"generator": generator} if "generator" in inspect.signature(self.scheduler.step).parameters else {}
        labels = labels.to(device)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            noisy = images
            if hasattr(self.scheduler, "scale_model_input"):
                noisy = self.scheduler.scale_model_input(images, timestep)
            prediction = self._predict(noisy, timestep, labels, scale)
            images = self.scheduler.step(prediction, timestep, images, **arguments).prev_sample
        images = (images / 2 + 0.5).clamp(0, 1)
        if output_type != "pt":
            images = images.float().cpu().permute(0, 2, 3, 1).numpy()
        if output_type == "pil":
            images = self.numpy_to_pil(images)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _predict(self, noisy: torch.Tensor, timestep: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        if scale == 1:
            return self.unet(noisy, timestep, class_labels=labels).sample
        null_labels = torch.full_like(labels, len(self.class_names))
        both = self.unet(torch.cat([noisy, noisy]), timestep, class_labels=torch.cat([labels, null_labels])).sample
        with_label, without = both.chunk(2)
        return without + scale * (with_label - without)

    def label_ids(self, class_labels: int | str | Sequence[int | str] | torch.Tensor) -> torch.Tensor:
        """Labels or names of classes as labels, int64 `(num,)`."""
        given: Any = class_labels.tolist() if isinstance(class_labels, (torch.Tensor, np.ndarray)) else class_labels
        given = [given] if isinstance(given, (int, str, np.integer)) else given
        is_list = isinstance(given, Sequence) and len(given) > 0
        _check("class_labels", class_labels, is_list, "a label, a name of a class, or a list of them")
        names = self.class_names
        by_name: dict[Any, int] = {name: label for label, name in enumerate(names)}
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        labels = []
        for value in given:
            is_label = _is_number(value, (int, np.integer)) and 0 <= value < len(names)
            is_name = isinstance(value, str) and value in by_name
            _check("class_labels", value, is_label or is_name, f"labels from 0 to {len(names) - 1}, or names ({shown})")
            labels.append(by_name[value] if is_name else int(value))
        return torch.tensor(labels)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """
        Saves the pipeline, and its code, which loads it where diffusers_lrlab is not installed.

        `DiffusionPipeline.from_pretrained(path, custom_pipeline=path, trust_remote_code=True)` runs that code; after
        `import diffusers_lrlab` it is not needed and not run. See `DiffusionPipeline.save_pretrained` for the arguments.
        """
        folder = Path(save_directory)
        if not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(shutil.SameFileError):
                shutil.copyfile(inspect.getfile(inspect.unwrap(type(self).__call__)), folder / _CODE)
        # After the code, as this may upload the folder.
        super().save_pretrained(save_directory, *args, **kwargs)
