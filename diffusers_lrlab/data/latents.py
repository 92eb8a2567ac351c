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
from ..core.manifest import checksum_matches, find_damage_of_file, with_sum
from .image_sets import image_set
from .options import EMBEDDED_DATASETS, DataConfig

LATENTS_FILE = "latents.json"
ROWS_FILE = "latents.arrow"  # a `datasets.Dataset` with the column `latent`, and that of labels
_FORMAT = 3
_AGAIN = "Hint: remove the folder and encode again with lrlab data encode"


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
    is_deterministic: bool  # a row has no standard deviation
    flip: bool  # a row has the mean and the standard deviation of the mirrored image, too
    dataset: str
    resolution: int  # pixels of a side of the images
    image_channels: int
    image_set: str | None  # the embedded set that it is
    label_column: str | None
    num_images: int
    mean: float  # of the scaled latents that a model is trained on
    std: float
    rows: dict[str, Any]  # size and SHA-256 of the file

    @property
    def fingerprint(self) -> str:
        return with_sum(asdict(self))["sha256"]

    def write(self, folder: Path) -> None:
        write_text(folder / LATENTS_FILE, json.dumps(with_sum({"format": _FORMAT, **asdict(self)}), indent=1) + "\n")


def is_latents_folder(folder: str | Path) -> bool:
    return (expanded(folder) / LATENTS_FILE).is_file()


def latents_folder(config: DataConfig) -> Path | None:
    """The folder of latents that a configuration names, if it is one."""
    folder = config.train_data_dir or config.dataset_name
    if folder is None or (config.train_data_dir is None and folder in EMBEDDED_DATASETS):
        return None
    return expanded(folder) if is_latents_folder(folder) else None


def read_latents_record(folder: str | Path) -> LatentsRecord:
    """The record of a folder; a `LabError` if it is damaged, or of an earlier version."""
    file = expanded(folder) / LATENTS_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not checksum_matches(data):
            raise ValueError("its SHA-256 has changed")
        del data["sha256"]
        if (version := data.pop("format")) != _FORMAT:
            raise ValueError(f"it has the format {version!r}, this version reads {_FORMAT}")
        return LatentsRecord(**{**data, "shape": tuple(data["shape"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{str(file)!r} cannot be used: {error}. {_AGAIN}.") from None


def check_rows(folder: Path, record: LatentsRecord) -> None:
    """Raises a `LabError` if the rows are missing or damaged; reads all of them."""
    if damage := find_damage_of_file(folder / ROWS_FILE, record.rows):
        raise LabError(f"{damage}. {_AGAIN}.")


def image_set_of(config: DataConfig) -> str | None:
    """The embedded set that a configuration names, or whose latents it names."""
    if (folder := latents_folder(config)) is not None:
        return read_latents_record(folder).image_set
    return config.dataset_name if image_set(config.dataset_name) is not None else None


@functools.cache
def find_autoencoder(name: str, subfolder: str | None, revision: str | None, cache_dir: str | None) -> Source:
    """The class and the commit of an autoencoder, from its configuration alone; asked once in a process."""
    import diffusers

    path, remedy = expanded(name), "a Hub id, or a folder with a config.json and weights; --subfolder names a folder inside"
    if path.is_dir() and revision is not None:
        raise must_be("--revision", revision, "left out for a folder", "only repositories on the Hub have revisions")
    where = str(path.resolve()) if path.is_dir() else name
    try:
        config, commit = diffusers.AutoencoderKL.load_config(
            where, subfolder=subfolder, revision=revision, cache_dir=cache_dir, return_commit_hash=True
        )
    except (OSError, ValueError) as error:
        raise must_be("--vae", name, remedy, f"{error}") from None
    class_name = str(config.get("_class_name"))
    model_class = getattr(diffusers, class_name, None)
    if not (isinstance(model_class, type) and hasattr(model_class, "encode") and hasattr(model_class, "decode")):
        hint = "give the autoencoder itself; for a whole pipeline, add --subfolder vae"
        raise must_be("--vae", name, "an autoencoder of diffusers", hint, got=f"a {class_name}")
    if config.get("latents_mean") is not None:
        hint = "this one normalises each channel by latents_mean and latents_std; choose another"
        raise must_be("--vae", name, "an autoencoder with one scaling_factor", hint, got=f"a {class_name}")
    return Source(class_name, where, subfolder, None if path.is_dir() else commit)


@functools.lru_cache(maxsize=8)
def load_autoencoder(source: Source, cache_dir: str | None) -> Any:
    """The autoencoder in float32, for inference; loaded once in a process."""
    import diffusers

    where = {"subfolder": source.subfolder, "revision": source.revision, "cache_dir": cache_dir}
    given = {name: value for name, value in where.items() if value is not None}
    try:
        model = getattr(diffusers, source.class_name).from_pretrained(source.name_or_path, **given)
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        hint = f"{error}; if it was moved, put it back or encode the images again"
        raise must_be("the autoencoder", source.name_or_path, "one that can be loaded", hint) from None
    return model.float().eval().requires_grad_(False)


def weights_sha256(model: Any) -> str:
    """A hash of the weights, the same for each file format and location."""
    import torch

    found = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        found.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        found.update(values.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def scaling_of(model: Any) -> tuple[float, float]:
    """The factor and the shift by which a diffusion model sees latents: `(latent - shift) * factor`."""
    factor, shift = (getattr(model.config, name, None) for name in ("scaling_factor", "shift_factor"))
    return 1.0 if factor is None else float(factor), 0.0 if shift is None else float(shift)
