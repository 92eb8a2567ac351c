"""A pipeline that samples images by a UNet or a DiT, of pixels or of latents, with or without class labels.

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
_MOST = 10**9  # of images, and of a scale; more is a slip
_PIXELS_AT_ONCE = 2**20  # decoded in one pass, unless the caller says


def _check(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}).")


def _check_number(name: str, value: Any, least: float, most: float, whole: bool = True) -> None:
    kinds = (int, np.integer) if whole else (int, float)
    is_allowed = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
    _check(name, value, bool(is_allowed), f"a {'whole ' * whole}number from {least} to {most}")


def _names_of_labels(id2label: Any) -> dict[int, str]:
    """The names by label, in the order of labels: files have them in the order of texts."""
    is_mapping = id2label is None or isinstance(id2label, Mapping)
    given = {str(label): name for label, name in (id2label or {}).items()} if is_mapping else {}
    is_named = is_mapping and all(isinstance(given.get(str(label)), str) for label in range(len(given)))
    _check("id2label", id2label, is_named, "the names of labels 0, 1, 2, ... as a dict, or None")
    return {label: given[str(label)] for label in range(len(given))}


class ImagePipeline(DiffusionPipeline):
    r"""
    Pipeline for images by a model of pixels or of latents, with or without class labels.

    With a guidance scale \(s\) other than 1, the prediction at each step is
    \(\epsilon(x, \emptyset) + s\,(\epsilon(x, c) - \epsilon(x, \emptyset))\) (arXiv 2207.12598 has \(s = 1 + w\)), where
    \(\emptyset\) stands for "no label": for a UNet the label after the last class, if labels were dropped in training, and
    for a DiT the last label of its table.

    Args:
        scheduler ([`SchedulerMixin`]):
            A scheduler of diffusers for the noise process that the model was trained on, such as [`DDPMScheduler`],
            [`DDIMScheduler`] or [`FlowMatchEulerDiscreteScheduler`].
        unet ([`UNet2DModel`], or any `ModelMixin` that is called as it is, *optional*): Predicts from noisy images
            `(num, channels, height, width)` and timesteps, and from `class_labels` of shape `(num,)` if it has classes.
        transformer ([`DiTTransformer2DModel`], *optional*): Predicts in place of a `unet`.
        vae ([`AutoencoderKL`], *optional*): Decodes latents; loaded from `vae_source` when it is first needed if it is not
            given. With neither, the model is one of pixels.
        vae_source (`dict`, *optional*): The `class_name` of an autoencoder of diffusers, its `name_or_path`, and a
            `subfolder` and a `revision` or `None`.
        id2label (`dict` of `int` to `str`, *optional*): The names of the classes; for a UNet their numbers if not given.
        guidance_scale (`float`, *optional*, defaults to 1.0): Guidance of a call that gives none.
        has_null_label (`bool`, *optional*, defaults to `True`): Whether a DiT was trained to sample without a label.
    """

    __module__ = "diffusers_lrlab"
    model_cpu_offload_seq = "unet->transformer->vae"
    _optional_components = ["unet", "transformer", "vae"]  # as diffusers declares it

    def __init__(
        self,
        scheduler: SchedulerMixin,
        unet: Optional[ModelMixin] = None,  # noqa: UP045  # diffusers 0.35 reads annotations, and no others than these
        transformer: Optional[ModelMixin] = None,  # noqa: UP045
        vae: Optional[ModelMixin] = None,  # noqa: UP045
        vae_source: Optional[dict] = None,  # noqa: UP045
        # Files have the labels as texts.
        id2label: Union[dict[int, str], dict[str, str], None] = None,  # noqa: UP007
        guidance_scale: float = 1.0,
        has_null_label: bool = True,
    ):
        super().__init__()
        # No stricter: compiled and prepared models are allowed, and parts that are loaded later.
        is_scheduler = isinstance(scheduler, SchedulerMixin | None)
        _check("scheduler", scheduler, is_scheduler, "a scheduler of diffusers, such as DDPMScheduler()")
        for name, model in (("unet", unet), ("transformer", transformer), ("vae", vae)):
            _check(name, model, isinstance(model, torch.nn.Module | None), "a model of diffusers, or None")
        _check("transformer", transformer, unet is None or transformer is None, "left out beside a unet")
        known = isinstance(vae_source, dict) and {"class_name", "name_or_path"} <= vae_source.keys()
        _check("vae_source", vae_source, vae_source is None or known, "a dict with class_name and name_or_path, or None")
        named = _names_of_labels(id2label)
        _check_number("guidance_scale", guidance_scale, 0, _MOST, whole=False)
        _check("has_null_label", has_null_label, isinstance(has_null_label, bool), "True or False")
        self.register_modules(scheduler=scheduler, unet=unet, transformer=transformer, vae=vae)
        more = {"id2label": named or None, "guidance_scale": guidance_scale, "has_null_label": has_null_label}
        self.register_to_config(vae_source=vae_source, **more)

    @property
    def _model(self) -> Any:
        return self.unet if self.transformer is None else self.transformer

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, by label; empty for a model without labels."""
        named = self.config.id2label or {}
        if self.transformer is not None:
            return [*named.values()]
        num = getattr(self.unet.config, "num_class_embeds", None) or 0
        fits = num >= len(named)
        _check("num_class_embeds of the unet", num, fits, "the number of classes, or one more for dropped labels")
        return [*named.values()] or [str(label) for label in range(num)]

    @property
    def _null_label(self) -> int | None:
        """The label that stands for "no label"; `None` if the model knows none."""
        if self.transformer is not None:
            return getattr(self.transformer.config, "num_embeds_ada_norm", 1000) if self.config.has_null_label else None
        num_classes = len(self.class_names)
        return num_classes if (getattr(self.unet.config, "num_class_embeds", None) or 0) > num_classes else None

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
            class_labels (`int`, `str`, or a list or tensor of them, *optional*): Labels, or names of classes. They may be
                left out if the model has none, or if it was trained to sample without them, too.
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

        >>> pipeline = DiffusionPipeline.from_pretrained("ddpm-digits-8")
        >>> images = pipeline(class_labels=[3, 3, 7], num_inference_steps=50).images
        ```
        """
        total = self.scheduler.config.num_train_timesteps
        steps = min(100, total) if num_inference_steps is None else num_inference_steps
        _check_number("num_inference_steps", steps, 1, total)
        if decode_batch_size is not None:
            _check_number("decode_batch_size", decode_batch_size, 1, _MOST)
        _check("generator", generator, isinstance(generator, torch.Generator | None), "a torch.Generator or None")
        is_known = isinstance(output_type, str) and output_type in _OUTPUTS
        _check("output_type", output_type, is_known, f"one of {', '.join(_OUTPUTS)}")
        _check("return_dict", return_dict, isinstance(return_dict, bool), "True or False")
        labels, num, scale = self._labels(class_labels, batch_size, guidance_scale)
        samples = self._samples(labels, num, steps, scale, generator)
        if output_type == "latent":
            images: Any = samples
        elif self.vae is None and not self.config.vae_source:
            images = VaeImageProcessor().postprocess(samples.float(), output_type=output_type)
        else:
            images = self.decoded(samples, output_type, decode_batch_size)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels(self, class_labels: Any, batch_size: Any, scale: Any) -> tuple[torch.Tensor | None, int, float]:
        """The labels of all images, int64 `(num,)`, or `None` for a model without; their number; the scale of guidance."""
        null_label, is_labelled = self._null_label, bool(self.class_names)
        if class_labels is None:
            may_be_left_out = null_label is not None or not is_labelled
            _check("class_labels", class_labels, may_be_left_out, "given for a model that was trained with all labels")
            _check("guidance_scale", scale, scale is None, "left out without class_labels")
            num = 1 if batch_size is None else batch_size
            _check_number("batch_size", num, 1, _MOST)
            return None if null_label is None else torch.full((num,), null_label), num, 1.0
        _check("class_labels", class_labels, is_labelled, "left out for a model without labels")
        labels, scale = self.label_ids(class_labels), self.config.guidance_scale if scale is None else scale
        is_one_each = batch_size is None or (isinstance(batch_size, (int, np.integer)) and batch_size == len(labels))
        _check("batch_size", batch_size, is_one_each, "the number of class_labels, or left out")
        _check_number("guidance_scale", scale, 0, _MOST, whole=False)
        can_guide = scale == 1 or null_label is not None
        _check("guidance_scale", scale, can_guide, "1 for a model that was trained without dropped labels")
        return labels, len(labels), scale

    def _samples(
        self, labels: torch.Tensor | None, num: int, steps: int, scale: float, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Samples as the model sees them."""
        scheduler, config, device = self.scheduler, self._model.config, self._execution_device
        size = (config.sample_size,) * 2 if isinstance(config.sample_size, int) else tuple(config.sample_size)
        shape = (num, config.in_channels, *size)
        samples = randn_tensor(shape, generator=generator, device=device, dtype=self._model.dtype)
        scheduler.set_timesteps(steps, device=device)
        samples = samples * getattr(scheduler, "init_noise_sigma", 1.0)
        arguments = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
        # Schedulers of flow matching do not scale the input.
        scaled = getattr(scheduler, "scale_model_input", lambda samples, _: samples)
        labels = None if labels is None else labels.to(device)
        for timestep in self.progress_bar(scheduler.timesteps):
            prediction = self._predict(scaled(samples, timestep), timestep, labels, scale)
            samples = scheduler.step(prediction, timestep, samples, **arguments).prev_sample
        return samples

    def _predict(self, noisy: torch.Tensor, timestep: torch.Tensor, labels: torch.Tensor | None, scale: float) -> Any:
        if labels is not None and scale != 1:
            null_labels = torch.full_like(labels, self._null_label)  # type: ignore[arg-type]
            noisy, labels = torch.cat([noisy, noisy]), torch.cat([labels, null_labels])
        conditions = {} if labels is None else {"class_labels": labels}
        prediction = self._model(noisy, timestep.to(noisy.device).expand(len(noisy)), **conditions).sample
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
        labels = {name: label for label, name in enumerate(names)} | {label: label for label in range(len(names))}
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        for value in given:
            is_known = isinstance(value, (int, str, np.integer)) and not isinstance(value, bool) and value in labels
            _check("class_labels", value, is_known, f"labels from 0 to {len(names) - 1}, or names ({shown})")
        return torch.tensor([labels[value] for value in given])

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
        """The autoencoder, loaded from its source if it was not given; only classes of diffusers are loaded."""
        source = self.config.vae_source
        if self.vae is None and not source:
            raise ValueError("The pipeline has no vae, which decodes latents: pass vae=..., or output_type='latent'.")
        if self.vae is None:
            model_class: Any = getattr(diffusers, str(source.get("class_name")), None)
            is_model = inspect.isclass(model_class) and issubclass(model_class, ModelMixin)
            if not is_model:
                raise ValueError(f"vae_source names {source.get('class_name')!r}, which is not a model of diffusers.")
            where = {name: source[name] for name in ("subfolder", "revision") if source.get(name) is not None}
            vae = model_class.from_pretrained(source["name_or_path"], **where).eval().requires_grad_(False)
            self.register_modules(vae=vae.to(device))
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
