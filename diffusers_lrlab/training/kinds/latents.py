"""Latents of images: a UNet of them, in a pipeline of this package whose autoencoder is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.errors import LabError, is_first_process, must_be
from ...core.options import defaults_of
from ...data.image_sets import IMAGE_DATASETS
from ...data.latents.autoencoder import Source, scaling_of, weights_sha256
from ...data.latents.manifest import LatentsManifest, latents_folder, read_latents_manifest
from ...models.unet import default_down_blocks
from ...pipelines.reference import Reference
from ..config import ResolvedConfig, TrainingConfig
from .base import KINDS
from .images import Images, check_embeddings

if TYPE_CHECKING:
    from ...data.loading import TrainingData

_ENCODED = "latents are of the images as they were encoded"
# Options of images and of other sources that latents do not have, and why.
_NO_EFFECT = {
    "random_flip": "a latent cannot be mirrored; encode both by lrlab data encode ... --flip, and half of them are flipped",
    **dict.fromkeys(("center_crop", "preserve_input_precision", "skip_corrupt_images"), _ENCODED),
    **dict.fromkeys(("image_column", "dataset_config_name", "dataset_split"), "lrlab data encode takes it"),
    **dict.fromkeys(("streaming", "in_memory_limit_mb"), "latents are read from a memory-mapped file"),
}


@KINDS.register(
    "latents", description="latents of images, by a UNet2DModel; made by `lrlab data encode`", source="diffusers"
)
class Latents(Images):
    """Latents of images, drawn from mean and variance; samples are decoded."""

    name = "latents"
    results = "diffusers_lrlab.training.results.images:LatentResults"
    pipeline = "diffusers_lrlab.pipelines.latent_image:LatentImagePipeline"
    is_bounded = False

    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        usual, name = defaults_of(TrainingConfig), config.train_data_dir or config.dataset_name
        if latents_folder(config) is None:
            hint = "lrlab data encode makes one"
            raise must_be(
                "--data_kind", "latents", "left out for data that are not a folder of latents", hint, got=f"{name}"
            )
        for option, reason in _NO_EFFECT.items():
            if getattr(config, option) != usual[option]:
                value = getattr(config, option)
                raise must_be(f"--{option}", value, f"left out for the latents in {name!r}", reason)
        manifest = self.manifest(config)
        of_images = {"resolution": manifest.resolution, "image_channels": manifest.image_channels}
        for option, value in of_images.items():
            if getattr(config, option) not in (None, value):
                hint = f"{_ENCODED}; encode them again for others"
                raise must_be(f"--{option}", getattr(config, option), f"{value} for the latents in {name!r}", hint)
        manifest.check_label_column("--label_column", config.label_column)
        embedded = IMAGE_DATASETS[manifest.image_set] if manifest.image_set else None
        own = embedded.facts["defaults"] if embedded is not None else {}
        return self.defaults_of_set(config, embedded) | own | of_images

    def manifest(self, config: TrainingConfig) -> LatentsManifest:
        return read_latents_manifest(config.train_data_dir or config.dataset_name or "")

    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData:
        from ...data.latents.loading import load_latent_data

        data = load_latent_data(config, config.seed, config.layout(num_processes))
        if is_first_process():
            self._check_autoencoder(config)
        return data

    def _check_autoencoder(self, config: ResolvedConfig) -> None:
        """Raises a `LabError` if samples would be decoded by another autoencoder than encoded the latents."""
        manifest = self.manifest(config)
        source = Source(**manifest.autoencoder)
        try:
            model = _reference(source).load(config.cache_dir)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise LabError(
                f"The autoencoder {source.name_or_path!r} of these latents cannot be loaded: {str(error)} Hint: if it was "
                "moved, put it back or encode the images again."
            ) from None
        found = weights_sha256(model), *scaling_of(model)
        if found != (manifest.weights_sha256, manifest.scaling_factor, manifest.shift_factor):
            hint = "encode the images again, or put the former one back"
            raise must_be("the autoencoder", source.name_or_path, "the one that encoded these latents", hint, got="another")

    def check_model_config(self, config: ResolvedConfig, given: dict[str, Any] | None) -> dict[str, Any] | None:
        channels, size, _ = self.manifest(config).shape
        blocks = default_down_blocks(size) if given is None else given["block_out_channels"]
        factor = 2 ** (len(blocks) - 1)
        if size % factor:
            hint = f"encode images whose latents are, or give a UNet of fewer levels than {len(blocks)}"
            raise must_be("the latents' size", size, f"divisible by {factor}", hint)
        if given is None:
            return None
        of, hint = f"the model {config.given_model!r}", "change its config.json, or give another model"
        check_embeddings(config, given)
        fitting = {"in_channels": (channels,), "out_channels": (channels,), "sample_size": (None, size, [size] * 2)}
        for key, allowed in fitting.items():
            if given[key] not in allowed:
                raise must_be(key, given[key], f"{allowed[0] or size}, as the latents have", hint, of=of)
        return {**given, "sample_size": size}

    def pipeline_parts(self, config: ResolvedConfig) -> dict[str, Any]:
        """An autoencoder of the Hub is saved as its source, one of a folder, which others do not have, as a copy."""
        source = Source(**self.manifest(config).autoencoder)
        reference = _reference(source)
        if source.revision is None:
            return {"vae": reference.load(config.cache_dir)}
        return {"vae": reference, "vae_source": source._asdict()}


def _reference(source: Source) -> Reference:
    return Reference(f"diffusers:{source.class_name}", source.name_or_path, source.subfolder, source.revision)
