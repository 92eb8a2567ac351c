"""A pipeline that samples latents and decodes them to images.

This file imports nothing but torch, numpy and diffusers: a copy of it travels beside saved weights, so that they load where
diffusers_lrlab is not installed.
"""

import contextlib
import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor

# The file by which diffusers finds the code of a pipeline.
_PIPELINE_CODE = "pipeline.py"
_OUTPUTS = ("pil", "np", "pt", "latent")
_MOST_IMAGES = 10**9  # more is a slip
_PIXELS_AT_ONCE = 2**20  # decoded in one pass, unless the caller says


def _check(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}).")


def _check_count(name: str, value: Any, most: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    _check(name, value, is_whole and 1 <= value <= most, f"a whole number from 1 to {most}")


def _check_scale(value: Any) -> None:
    is_scale = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    _check("guidance_scale", value, is_scale, "a number, 0 or above")


def _names_by_label(id2label: Any) -> dict[int, str]:
    """The names in the order of their labels; files have them in the order of texts."""
    wanted = "the names of labels 0, 1, 2, ... as a dict, or None"
    _check("id2label", id2label, id2label is None or isinstance(id2label, Mapping), wanted)
    given = {str(label): name for label, name in (id2label or {}).items()}
    is_named = all(isinstance(given.get(str(label)), str) for label in range(len(given)))
    _check("id2label", id2label, is_named, wanted)
    return {label: given[str(label)] for label in range(len(given))}


class LatentImagePipeline(DiffusionPipeline):
    r"""
    Pipeline for images by a model of their latents, which may take class labels.

    With labels and a guidance scale \(s\) other than 1, the prediction at each step is
    \(\epsilon(x, \emptyset) + s\,(\epsilon(x, c) - \epsilon(x, \emptyset))\) (arXiv 2207.12598 has \(s = 1 + w\)), where
    \(\emptyset\) is the label after the last class. The model knows that label if labels were dropped in training.

    Args:
        unet ([`~diffusers.UNet2DModel`]): Predicts noise, latent or velocity, as the scheduler says.
        scheduler ([`~diffusers.SchedulerMixin`]): A scheduler of diffusers.
        vae ([`~diffusers.AutoencoderKL`], *optional*): Decodes the latents; loaded from `vae_source` when it is first needed
            if it is not given.
        vae_source (`dict`, *optional*): The `class_name` of an autoencoder of diffusers, its `name_or_path`, and a
            `subfolder` and a `revision` or `None`.
        id2label (`dict` of `int` to `str`, *optional*): The names of the classes, for a model that takes `class_labels`.
        guidance_scale (`float`, *optional*, defaults to 1.0): Guidance of a call that gives none.
    """

    model_cpu_offload_seq = "unet->vae"
    _optional_components = ["vae"]  # as diffusers declares it

    def __init__(
        self,
        unet: ModelMixin,
        scheduler: SchedulerMixin,
        vae: Optional[ModelMixin] = None,  # noqa: UP045  # diffusers 0.35 reads annotations, and no others than these
        vae_source: Optional[dict] = None,  # noqa: UP045
        id2label: Union[dict[int, str], dict[str, str], None] = None,  # noqa: UP007
        guidance_scale: float = 1.0,
    ):
        super().__init__()
        # No stricter: compiled and prepared models are allowed, and parts that are loaded later.
        _check("unet", unet, isinstance(unet, torch.nn.Module | None), "a model, such as a UNet2DModel")
        _check("scheduler", scheduler, isinstance(scheduler, SchedulerMixin | None), "a scheduler of diffusers")
        _check("vae", vae, isinstance(vae, torch.nn.Module | None), "an autoencoder of diffusers, or None")
        known = isinstance(vae_source, dict) and {"class_name", "name_or_path"} <= vae_source.keys()
        _check("vae_source", vae_source, vae_source is None or known, "a dict with class_name and name_or_path, or None")
        _check_scale(guidance_scale)
        named = _names_by_label(id2label)
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)
        self.register_to_config(vae_source=vae_source, id2label=named or None, guidance_scale=guidance_scale)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, by label; none of a model without class labels."""
        return [*(self.config.id2label or {}).values()]

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        output_type: str = "pil",
        decode_batch_size: int | None = None,
        return_dict: bool = True,
        class_labels: int | str | Sequence[int | str] | torch.Tensor | None = None,
        guidance_scale: float | None = None,
    ) -> ImagePipelineOutput | tuple[Any]:
        """
        Samples images.

        Args:
            batch_size (`int`, *optional*): Images; one for each label, or one without labels, if not given.
            generator (`torch.Generator`, *optional*): Makes the result reproducible.
            num_inference_steps (`int`, *optional*): Steps; 100, or all timesteps if there are fewer, if not given.
            output_type (`str`): "pil", "np" for arrays `(num, height, width, channels)` in [0, 1], "pt" for such tensors
                `(num, channels, height, width)`, or "latent" for latents as the model sees them.
            decode_batch_size (`int`, *optional*): Images that are decoded at once; as many as have 2^20 pixels if not given.
            return_dict (`bool`): Whether to return an [`~diffusers.ImagePipelineOutput`] instead of a tuple.
            class_labels (`int`, `str`, or a list or tensor of them): Labels or names of classes, if the model takes them.
            guidance_scale (`float`, *optional*): 1 for no guidance, 0 to ignore the labels, above 1 for images that are more
                typical of their class. That of the pipeline if not given.

        Example:
        ```py
        >>> import diffusers_lrlab
        >>> from diffusers import DiffusionPipeline

        >>> pipeline = DiffusionPipeline.from_pretrained("digits-latents-model")
        >>> images = pipeline(batch_size=16).images

        >>> pipeline = DiffusionPipeline.from_pretrained("labelled-latents-model")
        >>> images = pipeline(class_labels=[3, 3, 7], guidance_scale=2.0).images
        ```
        """
        scheduler, config = self.scheduler, self.unet.config
        total = scheduler.config.num_train_timesteps
        steps = min(100, total) if num_inference_steps is None else num_inference_steps
        labels, scale = self._labels_and_scale(class_labels, guidance_scale)
        batch_size = (1 if labels is None else len(labels)) if batch_size is None else batch_size
        _check_count("batch_size", batch_size, _MOST_IMAGES)
        is_one_each = labels is None or batch_size == len(labels)
        _check("batch_size", batch_size, is_one_each, "the number of class_labels, or left out")
        _check_count("num_inference_steps", steps, total)
        if decode_batch_size is not None:
            _check_count("decode_batch_size", decode_batch_size, _MOST_IMAGES)
        is_known = isinstance(output_type, str) and output_type in _OUTPUTS
        _check("output_type", output_type, is_known, f"one of {', '.join(_OUTPUTS)}")
        _check("generator", generator, isinstance(generator, torch.Generator | None), "a torch.Generator or None")
        _check("return_dict", return_dict, isinstance(return_dict, bool), "True or False")
        size = config.sample_size if isinstance(config.sample_size, int) else tuple(config.sample_size)
        height, width = (size, size) if isinstance(size, int) else size
        shape, device = (batch_size, config.in_channels, height, width), self._execution_device
        latents = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
        scheduler.set_timesteps(steps, device=device)
        latents = latents * getattr(scheduler, "init_noise_sigma", 1.0)
        arguments = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
        labels = labels if labels is None else labels.to(device)
        scales = hasattr(scheduler, "scale_model_input")  # schedulers of flow matching have none
        for timestep in self.progress_bar(scheduler.timesteps):
            noisy = scheduler.scale_model_input(latents, timestep) if scales else latents
            prediction = self._predict(noisy, timestep, labels, scale)
            latents = scheduler.step(prediction, timestep, latents, **arguments).prev_sample
        images = latents if output_type == "latent" else self.decoded(latents, output_type, decode_batch_size)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels_and_scale(self, class_labels: Any, guidance_scale: Any) -> tuple[torch.Tensor | None, float]:
        """Labels of images, `None` of a model without, and the guidance scale."""
        names = self.class_names
        if not names:
            for name, value in (("class_labels", class_labels), ("guidance_scale", guidance_scale)):
                _check(name, value, value is None, "left out for a model without class labels")
            return None, 1.0
        scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        _check_scale(scale)
        has_null = scale == 1 or self.unet.config.num_class_embeds > len(names)
        _check("guidance_scale", scale, has_null, "1 for a model that was trained without dropped labels")
        return self.label_ids(class_labels), scale

    def _predict(self, noisy: torch.Tensor, timestep: torch.Tensor, labels: torch.Tensor | None, scale: float) -> Any:
        if labels is None:
            return self.unet(noisy, timestep).sample
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
            is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            is_label, is_name = is_whole and 0 <= value < len(names), isinstance(value, str) and value in by_name
            _check("class_labels", value, is_label or is_name, f"labels from 0 to {len(names) - 1}, or names ({shown})")
            labels.append(by_name[value] if is_name else int(value))
        return torch.tensor(labels)

    @torch.no_grad()
    def decoded(self, latents: torch.Tensor, output_type: str = "pt", batch_size: int | None = None) -> Any:
        """Images of latents as the model sees them, scaled by the factor and the shift of the autoencoder."""
        vae = self._autoencoder(latents.device)
        factor, shift = (getattr(vae.config, name, None) for name in ("scaling_factor", "shift_factor"))
        latents = (latents / (1.0 if factor is None else factor) + (shift or 0.0)).to(vae.dtype)
        num = batch_size or images_at_once(vae, tuple(latents.shape[1:]))
        parts = [vae.decode(part, return_dict=False)[0].float() for part in latents.split(num)]
        return VaeImageProcessor().postprocess(torch.cat(parts), output_type=output_type)

    def _autoencoder(self, device: torch.device) -> Any:
        """The autoencoder, loaded from its source if it was not given."""
        if self.vae is None:
            source = self.config.vae_source
            if not source:
                raise ValueError("The pipeline has no vae, which decodes latents: pass vae=..., or output_type='latent'.")
            self.register_modules(vae=load_source(source).to(device))
        return self.vae

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """
        Saves the pipeline, and the code that loads it where diffusers_lrlab is not installed.

        `DiffusionPipeline.from_pretrained(path, custom_pipeline=path, trust_remote_code=True)` runs that code; after
        `import diffusers_lrlab` it is not needed and not run. See `DiffusionPipeline.save_pretrained` for the arguments.
        """
        folder = Path(save_directory)
        if not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(shutil.SameFileError):
                shutil.copyfile(inspect.getfile(inspect.unwrap(type(self).__call__)), folder / _PIPELINE_CODE)
        # After the code, as this may upload the folder.
        super().save_pretrained(save_directory, *args, **kwargs)


def load_source(source: dict[str, Any]) -> Any:
    """The autoencoder that a `vae_source` names, for inference; only classes of diffusers are loaded."""
    model_class: Any = getattr(diffusers, str(source.get("class_name")), None)
    is_model = inspect.isclass(model_class) and issubclass(model_class, ModelMixin)
    if not is_model:
        raise ValueError(f"vae_source names {source.get('class_name')!r}, which is not a model of diffusers.")
    options = {name: source[name] for name in ("subfolder", "revision") if source.get(name) is not None}
    return model_class.from_pretrained(source["name_or_path"], **options).eval().requires_grad_(False)


def images_at_once(vae: Any, shape: tuple[int, ...]) -> int:
    """The number of latents of this shape, `(channels, height, width)`, that are decoded in one pass."""
    known = (getattr(vae.config, name, None) for name in ("block_out_channels", "encoder_block_out_channels"))
    levels = next((channels for channels in known if channels), (1,) * 4)
    reduction = 2 ** (len(levels) - 1)  # each level but the last halves the image
    return max(1, _PIXELS_AT_ONCE // (shape[-1] * shape[-2] * reduction**2))
