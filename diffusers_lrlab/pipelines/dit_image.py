"""A pipeline that samples images by a DiT, of pixels or of latents, with or without class labels.

This file imports nothing but torch, numpy and diffusers: a copy of it travels beside saved weights, so that they load
where diffusers_lrlab is not installed.
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

_CODE = "pipeline.py"  # where diffusers looks for the code of a pipeline
_OUTPUTS = ("pil", "np", "pt", "latent")
_MOST_IMAGES = 10**9  # more is a slip
_PIXELS_AT_ONCE = 2**20  # decoded in one pass, unless the caller says


def _check(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}).")


def _is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check_count(name: str, value: Any, most: int) -> None:
    is_count = _is_number(value, (int, np.integer)) and 1 <= value <= most
    _check(name, value, is_count, f"a whole number from 1 to {most}")


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


class DiTImagePipeline(DiffusionPipeline):
    r"""
    Pipeline for images by a DiT of pixels or latents.

    diffusers' `DiTPipeline` needs latents, class labels and a scheduler with `scale_model_input`; this one does not. With a
    guidance scale \(s\) other than 1, the prediction at each step is
    \(\epsilon(x, \emptyset) + s\,(\epsilon(x, c) - \epsilon(x, \emptyset))\) (arXiv 2207.12598 has \(s = 1 + w\)), where
    \(\emptyset\) is the last label of the model's table.

    Args:
        transformer ([`DiTTransformer2DModel`]): Predicts from noisy images, timesteps and `class_labels`.
        scheduler ([`SchedulerMixin`]):
            A scheduler of diffusers for the noise process that the model was trained on, such as [`DDPMScheduler`],
            [`DDIMScheduler`] or [`FlowMatchEulerDiscreteScheduler`].
        vae ([`AutoencoderKL`], *optional*): Decodes latents; loaded from `vae_source` when it is first needed if it is not
            given. With neither, the model is one of pixels.
        vae_source (`dict`, *optional*): The `class_name` of an autoencoder of diffusers, its `name_or_path`, and a
            `subfolder` and a `revision` or `None`.
        id2label (`dict` of `int` to `str`, *optional*): The names of the classes, of a model with labels.
        guidance_scale (`float`, *optional*, defaults to 1.0): Guidance of a call that gives none.
        has_null_label (`bool`, *optional*, defaults to `True`): Whether the model was trained to sample without a label.
    """

    __module__ = "diffusers_lrlab"
    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]  # as diffusers declares it

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        vae: Optional[ModelMixin] = None,  # noqa: UP045  # diffusers 0.35 reads annotations, and no others than these
        vae_source: Optional[dict] = None,  # noqa: UP045
        # Files have the labels as texts.
        id2label: Union[dict[int, str], dict[str, str], None] = None,  # noqa: UP007
        guidance_scale: float = 1.0,
        has_null_label: bool = True,
    ):
        super().__init__()
        # No stricter: compiled and prepared models are allowed, and parts that are loaded later.
        is_model = isinstance(transformer, torch.nn.Module | None)
        _check("transformer", transformer, is_model, "a model, such as a DiTTransformer2DModel")
        is_scheduler = isinstance(scheduler, SchedulerMixin | None)
        _check("scheduler", scheduler, is_scheduler, "a scheduler of diffusers, such as DDPMScheduler()")
        _check("vae", vae, isinstance(vae, torch.nn.Module | None), "an autoencoder of diffusers, or None")
        known = isinstance(vae_source, dict) and {"class_name", "name_or_path"} <= vae_source.keys()
        _check("vae_source", vae_source, vae_source is None or known, "a dict with class_name and name_or_path, or None")
        named = _names_of_labels(id2label)
        _check_scale(guidance_scale)
        _check("has_null_label", has_null_label, isinstance(has_null_label, bool), "True or False")
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        more = {"id2label": named or None, "guidance_scale": guidance_scale, "has_null_label": has_null_label}
        self.register_to_config(vae_source=vae_source, **more)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, by label; empty for a model without labels."""
        return [*(self.config.id2label or {}).values()]

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | torch.Tensor | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        output_type: str = "pil",
        decode_batch_size: int | None = None,
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """
        Samples an image for each label, or `batch_size` images without labels.

        Args:
            class_labels (`int`, `str`, or a list or tensor of them, *optional*): Labels, or names of classes.
            batch_size (`int`, *optional*): Images without labels; 1 if not given.
            generator (`torch.Generator`, *optional*): Makes sampling deterministic.
            num_inference_steps (`int`, *optional*): Denoising steps; 100, or all timesteps of the noise schedule if fewer.
            guidance_scale (`float`, *optional*): 1 for no guidance, 0 to ignore the labels, above 1 for images that are more
                typical of their class. That of the pipeline if not given.
            output_type (`str`, *optional*, defaults to `"pil"`): "pil", "np" for arrays `(num, height, width, channels)` in
                [0, 1], "pt" for such tensors `(num, channels, height, width)`, or "latent" for samples as the model sees
                them.
            decode_batch_size (`int`, *optional*): Latents that are decoded at once; as many as have 2^20 pixels if not
                given.
            return_dict (`bool`, *optional*, defaults to `True`): Return an [`ImagePipelineOutput`] rather than a tuple.

        Example:
        ```py
        >>> import diffusers_lrlab
        >>> from diffusers import DiffusionPipeline

        >>> pipeline = DiffusionPipeline.from_pretrained("dit-digits")
        >>> images = pipeline(class_labels=[3, 3, 7], num_inference_steps=50).images
        ```
        """
        total = self.scheduler.config.num_train_timesteps
        steps = min(100, total) if num_inference_steps is None else num_inference_steps
        scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        _check_count("num_inference_steps", steps, total)
        if decode_batch_size is not None:
            _check_count("decode_batch_size", decode_batch_size, _MOST_IMAGES)
        _check("generator", generator, isinstance(generator, torch.Generator | None), "a torch.Generator or None")
        _check("output_type", output_type, output_type in _OUTPUTS, f"one of {', '.join(_OUTPUTS)}")
        _check("return_dict", return_dict, isinstance(return_dict, bool), "True or False")
        labels, scale = self._labels(class_labels, batch_size, scale)
        samples = self._samples(labels.to(self._execution_device), steps, scale, generator)
        if output_type == "latent":
            images: Any = samples
        elif self.vae is None and not self.config.vae_source:
            images = VaeImageProcessor().postprocess(samples.float(), output_type=output_type)
        else:
            images = self.decoded(samples, output_type, decode_batch_size)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels(self, class_labels: Any, batch_size: Any, scale: Any) -> tuple[torch.Tensor, float]:
        """The labels of all images, int64 `(num,)`, and the scale of their guidance."""
        has_null = self.config.has_null_label
        _check_scale(scale)
        if class_labels is None:
            _check("class_labels", class_labels, has_null, "given for a model that was trained with all labels")
            num = 1 if batch_size is None else batch_size
            _check_count("batch_size", num, _MOST_IMAGES)
            return torch.full((num,), self._null_label), 1.0
        _check("batch_size", batch_size, batch_size is None, "left out beside class_labels")
        _check("class_labels", class_labels, bool(self.class_names), "left out for a model without labels")
        _check("guidance_scale", scale, scale == 1 or has_null, "1 for a model that was trained without dropped labels")
        return self.label_ids(class_labels), scale

    @property
    def _null_label(self) -> int:
        return getattr(self.transformer.config, "num_embeds_ada_norm", 1000)

    def _samples(self, labels: torch.Tensor, steps: int, scale: float, generator: torch.Generator | None) -> torch.Tensor:
        """Samples as the model sees them."""
        scheduler, config = self.scheduler, self.transformer.config
        shape = (len(labels), config.in_channels, config.sample_size, config.sample_size)
        samples = randn_tensor(shape, generator=generator, device=labels.device, dtype=self.transformer.dtype)
        scheduler.set_timesteps(steps, device=labels.device)
        samples = samples * getattr(scheduler, "init_noise_sigma", 1.0)
        arguments = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
        scales = hasattr(scheduler, "scale_model_input")  # schedulers of flow matching have none
        for timestep in self.progress_bar(scheduler.timesteps):
            noisy = scheduler.scale_model_input(samples, timestep) if scales else samples
            prediction = self._predict(noisy, timestep, labels, scale)
            samples = scheduler.step(prediction, timestep, samples, **arguments).prev_sample
        return samples

    def _predict(self, noisy: torch.Tensor, timestep: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        if scale != 1:
            noisy, labels = torch.cat([noisy, noisy]), torch.cat([labels, torch.full_like(labels, self._null_label)])
        timesteps = timestep.to(noisy.device).expand(len(noisy))
        prediction = self.transformer(noisy, timestep=timesteps, class_labels=labels).sample
        prediction = prediction[:, : noisy.shape[1]]  # some models also predict variances
        if scale == 1:
            return prediction
        with_label, without = prediction.chunk(2)
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

    @torch.no_grad()
    def decoded(self, latents: torch.Tensor, output_type: str = "pt", batch_size: int | None = None) -> Any:
        """Images of latents as the model sees them, scaled by the factor and the shift of the autoencoder."""
        vae = self._autoencoder(latents.device)
        factor, shift = (getattr(vae.config, name, None) for name in ("scaling_factor", "shift_factor"))
        latents = (latents / (1.0 if factor is None else factor) + (shift or 0.0)).to(vae.dtype)
        known = (getattr(vae.config, name, None) for name in ("block_out_channels", "encoder_block_out_channels"))
        levels = next((channels for channels in known if channels), (1,) * 4)
        pixels = latents.shape[-1] * latents.shape[-2] * 4 ** (len(levels) - 1)  # each level but the last halves the image
        num = batch_size or max(1, _PIXELS_AT_ONCE // pixels)
        parts = [vae.decode(part, return_dict=False)[0].float() for part in latents.split(num)]
        return VaeImageProcessor().postprocess(torch.cat(parts), output_type=output_type)

    def _autoencoder(self, device: torch.device) -> Any:
        """The autoencoder, loaded from its source if it was not given."""
        if self.vae is None:
            source = self.config.vae_source
            if not source:
                raise ValueError("The pipeline has no vae, which decodes latents: pass vae=..., or output_type='latent'.")
            self.register_modules(vae=_load_source(source).to(device))
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
                shutil.copyfile(inspect.getfile(inspect.unwrap(type(self).__call__)), folder / _CODE)
        # After the code, as this may upload the folder.
        super().save_pretrained(save_directory, *args, **kwargs)


def _load_source(source: dict[str, Any]) -> Any:
    """The autoencoder that a `vae_source` names, for inference; only classes of diffusers are loaded."""
    model_class: Any = getattr(diffusers, str(source.get("class_name")), None)
    is_model = inspect.isclass(model_class) and issubclass(model_class, ModelMixin)
    if not is_model:
        raise ValueError(f"vae_source names {source.get('class_name')!r}, which is not a model of diffusers.")
    options = {name: source[name] for name in ("subfolder", "revision") if source.get(name) is not None}
    return model_class.from_pretrained(source["name_or_path"], **options).eval().requires_grad_(False)
