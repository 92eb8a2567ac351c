"""Images, and latents of images: a `UNet2DModel`, in diffusers' own `DDPMPipeline` or in a pipeline of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...core.errors import LabError, is_first_process, must_be
from ...core.options import defaults_of
from ...core.registry import Entry
from ...core.words import counted
from ...data.image_sets import check_resolution as check_size
from ...data.image_sets import image_set
from ...data.latents import (
    LatentsRecord,
    Source,
    identity_of,
    known_shape,
    latents_folder,
    load_autoencoder,
    read_latents_record,
)
from ...data.toy2d import TOY_DATASETS
from ...evaluation.registry import measures_samples
from ...models.networks import check_resolution, default_down_blocks, default_unet_config
from ..config import ResolvedConfig, TrainingConfig
from . import KINDS, DataKind

if TYPE_CHECKING:
    import torch

    from ...data.loading import TrainingData

_DEFAULTS: dict[str, Any] = {
    "num_epochs": 100,
    "resolution": 64,
    "image_channels": 3,
    "num_validation_images": 256,
    "train_batch_size": 16,
    "learning_rate": 1e-4,
    "distance_samples": 0,
    "eval_batch_size": 16,
}
# Samples for the Fréchet distance of digits after so many images; fewer for fewer images, none below the fewest.
_FULL_FRECHET, _FULL_EVALUATION, _FEWEST_FRECHET = 1000, 150_000, 100


@KINDS.register("images", description="images, by a UNet2DModel", source="diffusers")
class Images(DataKind):
    """Images of one size, and the UNet of diffusers' example for them."""

    name = form = "images"
    results = "diffusers_lrlab.training.results:ImageResults"
    model = "diffusers:UNet2DModel"
    pipeline = "diffusers:DDPMPipeline"
    labelled_pipeline = "diffusers_lrlab.pipelines.image:ImagePipeline"
    component = "unet"
    sampling_batch = 250
    is_bounded = True
    has_neighbours = True
    # Options by the argument of a UNet that they decide; empty if the data alone decide it.
    shape_options: ClassVar[dict[str, str]] = {
        "in_channels": "--image_channels",
        "out_channels": "--image_channels",
        "sample_size": "--resolution",
    }

    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        if config.dataset_name in TOY_DATASETS:
            raise must_be("--data_kind", "images", f"left out for the points of {config.dataset_name!r}", "leave it out")
        embedded = image_set(config.dataset_name)
        if embedded is not None and config.resolution is not None:
            check_size(embedded.name, config.resolution)
        if embedded is not None and (config.image_channels or 3) < embedded.facts["defaults"]["image_channels"]:
            hint = f"the images of {embedded.name!r} are in colour; leave it out"
            raise must_be("--image_channels", config.image_channels, "3", hint)
        return self.defaults_of_set(config, embedded)

    def defaults_of_set(self, config: TrainingConfig, embedded: Entry | None) -> dict[str, Any]:
        """Defaults for the images of an embedded set, or of another one, with the samples to measure."""
        defaults = _DEFAULTS | (embedded.facts["defaults"] if embedded is not None else {})
        if measures_samples(self.form):
            return defaults | {"distance_samples": None}
        asked, held_out = config.distance_samples, config.num_validation_images
        held_out = _DEFAULTS["num_validation_images"] if held_out is None else held_out
        if asked == 1 or (asked and held_out < 2):
            raise LabError(
                f"--distance_samples {asked} against {counted(held_out, 'held-out image')}: both sets need at least 2. "
                "Raise --num_validation_images, or leave --distance_samples out."
            )
        if asked and embedded is None:
            raise LabError(
                f"--distance_samples {asked} needs features that suit the data; only embedded sets have them. Leave it out "
                f"for {config.dataset_name or config.train_data_dir!r}, or register a metric of images by --import."
            )
        return defaults | ({"distance_samples": 0} if held_out < 2 else {})

    def measured_samples(self, images_seen: int, num_held_out: int, num_images: int | None) -> int:
        affordable = int(_FULL_FRECHET * min(1.0, images_seen / _FULL_EVALUATION)) // 50 * 50
        return affordable if affordable >= _FEWEST_FRECHET else 0

    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData:
        from ...data.loading import load_image_data

        return load_image_data(config, config.seed, config.layout(num_processes))

    def check_model_config(self, config: ResolvedConfig, given: dict[str, Any] | None) -> dict[str, Any] | None:
        _, size = known_shape(config) or config.image_shape
        blocks = default_down_blocks(size) if given is None else given["block_out_channels"]
        check_resolution(size, len(blocks), self.shape_options.get("sample_size", f"the size of the {self.name}"))
        if given is None:
            return None
        if (kind := given["class_embed_type"]) is not None:
            wanted, hint = "null", "class labels are whole numbers, each with an embedding of its own"
            raise must_be("class_embed_type", kind, wanted, hint, of=f"the model {config.given_model!r}")
        return {**given, "sample_size": size}

    def data_arguments(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        channels, size, _ = data.image_shape
        arguments = {"sample_size": size, "in_channels": channels, "out_channels": channels}
        return arguments | ({} if data.classes is None else {"num_class_embeds": data.classes.num_embeddings})

    def default_model_config(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        channels, size, _ = data.image_shape
        return default_unet_config(size, channels, data.num_images) | self.data_arguments(config, data)

    def sample(
        self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int, **conditions: torch.Tensor
    ) -> np.ndarray:
        number: dict[str, Any] = {**conditions} or {"batch_size": num}
        return pipeline(**number, generator=generator, num_inference_steps=num_inference_steps, output_type="np").images


# Options of other sources, and those whose values are the ones of the encoded images.
_NO_EFFECT = ("dataset_config_name", "dataset_split", "streaming", "in_memory_limit_mb")
_OF_IMAGES = ("resolution", "image_channels", "label_column")


@KINDS.register(
    "latents", description="latents of images, by a UNet2DModel; made by `lrlab data encode`", source="diffusers"
)
class Latents(Images):
    """Latents of images, drawn from mean and variance; samples are decoded."""

    name = "latents"
    results = "diffusers_lrlab.training.results:LatentResults"
    pipeline = "diffusers_lrlab.pipelines.image:ImagePipeline"
    is_bounded = False
    shape_options = {}

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
        of_images = {"resolution": record.resolution, "image_channels": record.image_channels}
        return self.defaults_of_set(config, image_set(record.dataset)) | of_images

    def record(self, config: TrainingConfig) -> LatentsRecord:
        return read_latents_record(config.train_data_dir or config.dataset_name or "")

    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData:
        from ...data.latent_data import load_latent_data

        data, record = load_latent_data(config, config.seed), self.record(config)
        found = identity_of(self._autoencoder(config)) if is_first_process() else {}
        if any(getattr(record, key) != value for key, value in found.items()):
            hint, got = "encode the images again, or put the former one back", "other weights or another scaling_factor"
            name = record.autoencoder["name_or_path"]
            raise must_be("the autoencoder", name, "the one that encoded these latents", hint, got=got)
        return data

    def pipeline_parts(self, config: ResolvedConfig) -> dict[str, Any]:
        """The source of an autoencoder of the Hub is saved in place of its weights; others do not have a local folder."""
        source = self.record(config).autoencoder
        return {"vae": self._autoencoder(config)} | ({"vae_source": source} if source["revision"] else {})

    def _autoencoder(self, config: ResolvedConfig) -> Any:
        return load_autoencoder(Source(**self.record(config).autoencoder), config.cache_dir)
