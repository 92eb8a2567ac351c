"""Latents of images: a UNet of them, in a pipeline of this package whose autoencoder is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.errors import is_first_process, must_be
from ...core.options import defaults_of
from ...data.image_sets import IMAGE_DATASETS
from ...data.latents import (
    LatentsRecord,
    Source,
    latents_folder,
    load_autoencoder,
    read_latents_record,
    scaling_of,
    weights_sha256,
)
from ...models.networks import default_down_blocks
from ..config import ResolvedConfig, TrainingConfig
from .base import KINDS
from .images import Images, check_embeddings

if TYPE_CHECKING:
    from ...data.loading import TrainingData

# Options of images and of other sources, and those whose values are the ones of the encoded images.
_NO_EFFECT = (
    *("random_flip", "center_crop", "preserve_input_precision", "skip_corrupt_images", "image_column"),
    *("dataset_config_name", "dataset_split", "streaming", "in_memory_limit_mb"),
)
_OF_IMAGES = ("resolution", "image_channels", "label_column")


@KINDS.register(
    "latents", description="latents of images, by a UNet2DModel; made by `lrlab data encode`", source="diffusers"
)
class Latents(Images):
    """Latents of images, drawn from mean and variance; samples are decoded."""

    name = "latents"
    results = "diffusers_lrlab.training.results.images:LatentResults"
    pipeline = "diffusers_lrlab.pipelines.image:ImagePipeline"
    is_bounded = False

    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        usual, name = defaults_of(TrainingConfig), config.train_data_dir or config.dataset_name
        if latents_folder(config) is None:
            wanted = "left out for data that are not a folder of latents"
            raise must_be("--data_kind", "latents", wanted, "lrlab data encode makes one", got=f"{name}")
        record, hint = self.record(config), "these images were encoded without it; see lrlab data encode --help"
        allowed = {option: getattr(record, option) for option in _OF_IMAGES}
        for option in (*_NO_EFFECT, *_OF_IMAGES):
            given, value = getattr(config, option), allowed.get(option)
            if given not in (usual[option], value):
                wanted = f"{'left out' if value is None else repr(value)} for the latents in {name!r}"
                raise must_be(f"--{option}", given, wanted, hint)
        embedded = IMAGE_DATASETS[record.image_set] if record.image_set else None
        own = embedded.facts["defaults"] if embedded is not None else {}
        of_images = {"resolution": record.resolution, "image_channels": record.image_channels}
        return self.defaults_of_set(config, embedded) | own | of_images

    def record(self, config: TrainingConfig) -> LatentsRecord:
        return read_latents_record(config.train_data_dir or config.dataset_name or "")

    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData:
        from ...data.latent_data import load_latent_data

        data = load_latent_data(config, config.seed, config.layout(num_processes))
        if is_first_process():
            self._check_autoencoder(config)
        return data

    def _check_autoencoder(self, config: ResolvedConfig) -> None:
        """Raises a `LabError` if samples would be decoded by another autoencoder than encoded the latents."""
        record = self.record(config)
        source = Source(**record.autoencoder)
        model = load_autoencoder(source, config.cache_dir)
        factors = "scaling_factor {} and shift_factor {}"
        then, now = factors.format(record.scaling_factor, record.shift_factor), factors.format(*scaling_of(model))
        if weights_sha256(model) != record.weights_sha256 or then != now:
            hint = "encode the images again, or put the former one back"
            wanted = f"the one that encoded these latents, with {then}"
            raise must_be("the autoencoder", source.name_or_path, wanted, hint, got=f"other weights, or {now}")

    def check_model_config(self, config: ResolvedConfig, given: dict[str, Any] | None) -> dict[str, Any] | None:
        channels, size, _ = self.record(config).shape
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
        """The source of an autoencoder of the Hub is saved in place of its weights; others do not have a local folder."""
        source = Source(**self.record(config).autoencoder)
        vae = {"vae": load_autoencoder(source, config.cache_dir)}
        return vae if source.revision is None else {**vae, "vae_source": source._asdict()}
