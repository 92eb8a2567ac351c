"""Folders of latents: the record of what encoded them, and the autoencoders of diffusers. Needs no torch to be imported."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import LabError, must_be
from ..core.files import expanded, write_text
from ..core.manifest import write_manifest
from .image_sets import image_set
from .options import EMBEDDED_DATASETS, DataConfig, source_of

LATENTS_FILE = "latents.json"
ROWS_FILE = "latents.arrow"  # a `datasets.Dataset` with the column `latent`, and that of labels
ENCODE_AGAIN = "Hint: remove the folder and encode again with lrlab data encode"


class Source(NamedTuple):
    """Where an autoencoder is loaded from."""

    class_name: str  # in diffusers
    name_or_path: str
    subfolder: str | None
    revision: str | None  # the commit, of a repository on the Hub


@dataclass(frozen=True, kw_only=True)
class LatentsRecord:
    """The facts of a folder of latents, in its `latents.json`."""

    autoencoder: dict[str, Any]  # the fields of `Source`
    weights_sha256: str
    scaling_factor: float
    shift_factor: float
    shape: tuple[int, int, int]  # of a latent: channels, height, width
    flip: bool  # a row has the latent of the mirrored image, too
    dataset: str
    resolution: int  # pixels of a side of the images
    image_channels: int
    label_column: str | None
    num_images: int

    def write(self, folder: Path) -> None:
        """Writes the record and the manifest, after the rows."""
        write_text(folder / LATENTS_FILE, json.dumps(asdict(self), indent=1) + "\n")
        write_manifest(folder)


def latents_folder(config: DataConfig) -> Path | None:
    """The folder of latents that a configuration names, if it is one."""
    if config.train_data_dir is None and config.dataset_name in EMBEDDED_DATASETS:
        return None
    folder = expanded(source_of(config))
    return folder if source_of(config) and (folder / LATENTS_FILE).is_file() else None


def read_latents_record(folder: str | Path) -> LatentsRecord:
    """The record of a folder; a `LabError` if it cannot be read."""
    file = expanded(folder) / LATENTS_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return LatentsRecord(**{**data, "shape": tuple(data["shape"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise LabError(f"{str(file)!r} is damaged, or of another version. {ENCODE_AGAIN}.") from None


def image_set_of(config: DataConfig) -> str | None:
    """The embedded set that a configuration names, or whose latents it names."""
    folder = latents_folder(config)
    name = config.dataset_name if folder is None else read_latents_record(folder).dataset
    return name if image_set(name) is not None else None


def known_shape(config: DataConfig) -> tuple[int, int] | None:
    """Channels and side of images or latents, if they are known before these are read."""
    if (folder := latents_folder(config)) is not None:
        return read_latents_record(folder).shape[:2]
    return None if config.resolution is None else config.image_shape


def find_autoencoder(name: str, subfolder: str | None, revision: str | None, cache_dir: str | None) -> Source:
    """The class and the commit of an autoencoder, from its configuration alone."""
    import diffusers

    is_folder = expanded(name).is_dir()
    if is_folder and revision is not None:
        raise must_be("--revision", revision, "left out for a folder", "only repositories on the Hub have revisions")
    where = str(expanded(name).resolve()) if is_folder else name
    try:
        config, commit = diffusers.AutoencoderKL.load_config(
            where, subfolder=subfolder, revision=revision, cache_dir=cache_dir, return_commit_hash=True
        )
    except (OSError, ValueError) as error:
        wanted = "a Hub id, or a folder with a config.json and weights; --subfolder names a folder inside"
        raise must_be("--vae", name, wanted, f"{error}") from None
    class_name, channels, means = (config.get(key) for key in ("_class_name", "in_channels", "latents_mean"))
    model_class = getattr(diffusers, str(class_name), None)
    is_autoencoder = isinstance(model_class, type) and hasattr(model_class, "encode") and hasattr(model_class, "decode")
    if not is_autoencoder or channels not in (None, 1, 3) or means is not None:
        wanted = "an autoencoder of diffusers for grey or RGB images, without latents_mean"
        got = f"{class_name} with in_channels={channels}{'' if means is None else ' and latents_mean'}"
        raise must_be("--vae", name, wanted, "choose another; for the one of a pipeline, add --subfolder vae", got=got)
    return Source(str(class_name), where, subfolder, None if is_folder else commit)


@functools.lru_cache(maxsize=8)
def load_autoencoder(source: Source, cache_dir: str | None) -> Any:
    """The autoencoder in float32, for inference; loaded once in a process."""
    import diffusers

    where = {"subfolder": source.subfolder, "revision": source.revision, "cache_dir": cache_dir}
    try:
        model = getattr(diffusers, source.class_name).from_pretrained(source.name_or_path, **where)
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        hint = f"{error}; if it was moved, put it back or encode the images again"
        raise must_be("the autoencoder", source.name_or_path, "one that can be loaded", hint) from None
    return model.float().eval().requires_grad_(False)


def identity_of(model: Any) -> dict[str, Any]:
    """
    What an autoencoder must have in common with the one that encoded: weights, by a hash that is the same for each file
    format and location, and the scaling to what a diffusion model sees, `(latent - shift_factor) * scaling_factor`.
    """
    import torch

    found = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        found.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        found.update(values.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    factor, shift = (getattr(model.config, name, None) for name in ("scaling_factor", "shift_factor"))
    return {
        "weights_sha256": found.hexdigest(),
        "scaling_factor": 1.0 if factor is None else float(factor),
        "shift_factor": 0.0 if shift is None else float(shift),
    }
