"""Latents of images: a UNet of them, in a pipeline of this package whose autoencoder is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ...core.errors import is_first_process, must_be
from ...core.options import defaults_of
from ...data.image_sets import image_set
from ...data.latents import LatentsRecord, Source, identity_of, latents_folder, load_autoencoder, read_latents_record
from ..config import ResolvedConfig, TrainingConfig
from .base import KINDS
from .images import Images

if TYPE_CHECKING:
    from ...data.loading import TrainingData

# Options of other sources, and those whose values are the ones of the encoded images.
_NO_EFFECT = ("dataset_config_name", "dataset_split", "streaming", "in_memory_limit_mb")
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
    shape_options: ClassVar[dict[str, str]] = {}

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

        data = load_latent_data(config, config.seed, config.layout(num_processes))
        if is_first_process():
            self._check_autoencoder(config)
        return data

    def _check_autoencoder(self, config: ResolvedConfig) -> None:
        """Raises a `LabError` if samples would be decoded by another autoencoder than encoded the latents."""
        record = self.record(config)
        name, found = record.autoencoder["name_or_path"], identity_of(self._autoencoder(config))
        if any(getattr(record, key) != value for key, value in found.items()):
            hint, got = "encode the images again, or put the former one back", "other weights or another scaling_factor"
            raise must_be("the autoencoder", name, "the one that encoded these latents", hint, got=got)

    def pipeline_parts(self, config: ResolvedConfig) -> dict[str, Any]:
        """The source of an autoencoder of the Hub is saved in place of its weights; others do not have a local folder."""
        source = self.record(config).autoencoder
        return {"vae": self._autoencoder(config)} | ({"vae_source": source} if source["revision"] else {})

    def _autoencoder(self, config: ResolvedConfig) -> Any:
        return load_autoencoder(Source(**self.record(config).autoencoder), config.cache_dir)
