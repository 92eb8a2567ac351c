"""`latents.json`: what encoded a folder of latents, and the sums of its shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import LabError, must_be
from ...core.files import expanded, write_text
from ...core.manifest import checksum_matches, find_damage_of_file, with_sum
from ...core.words import counted
from ..image_sets import image_set
from ..options import EMBEDDED_DATASETS, DataConfig

LATENTS_FILE = "latents.json"
_FORMAT = 1
_AGAIN = "Hint: repeat the lrlab data encode command that made it; it encodes what is missing"


@dataclass(frozen=True, kw_only=True)
class LatentsManifest:
    """The facts of a folder of latents. All but `shards` are known before the first image is encoded."""

    autoencoder: dict[str, Any]  # class_name, name_or_path, subfolder, revision
    weights_sha256: str
    scaling_factor: float
    shift_factor: float
    shape: tuple[int, int, int]  # of a latent: channels, height, width
    is_deterministic: bool  # no standard deviations
    resolution: int  # pixels of a side of the images
    image_channels: int
    dtype: str
    flip: bool  # mirrored images are encoded, too
    dataset: dict[str, Any]  # name, config, split, column, fingerprint
    image_set: str | None  # the embedded set that it is
    label_column: str | None
    class_names: list[str] | None
    num_images: int
    batch_size: int
    shard_size: int
    shards: list[dict[str, Any]] = field(default_factory=list)  # file, num_images, size, sha256, and sums of values

    @property
    def num_encoded(self) -> int:
        return sum(shard["num_images"] for shard in self.shards)

    @property
    def is_whole(self) -> bool:
        return self.num_encoded == self.num_images

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors of a latent, in each shard."""
        names = ("mean",) if self.is_deterministic else ("mean", "std")
        return (*names, *(f"{name}_flipped" for name in names)) if self.flip else names

    @property
    def settings(self) -> dict[str, Any]:
        """All fields except the shards, as in JSON."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name != "shards"}))

    @cached_property
    def fingerprint(self) -> str:
        return with_sum(asdict(self))["sha256"]

    @property
    def statistics(self) -> tuple[float, float]:
        """Mean and standard deviation of the scaled latents that a model is trained on."""
        total = self.num_encoded * self.shape[0] * self.shape[1] * self.shape[2]
        mean, square = (sum(shard[name] for shard in self.shards) / total for name in ("sum", "sum_of_squares"))
        return mean, max(0.0, square - mean**2) ** 0.5

    def check_label_column(self, argument: str, column: str | None, of: str = "") -> None:
        """Raises a `LabError` that names `argument` if it requests labels that were not encoded."""
        if column is None or column == self.label_column:
            return
        hint = f"encode these images into a new folder with lrlab data encode ... --label_column {column}"
        if self.label_column is None:
            raise must_be(argument, column, "left out for latents that were encoded without labels", hint, of=of)
        raise must_be(argument, column, f"{self.label_column!r}, the column that was encoded", f"give it, or {hint}", of=of)

    def write(self, folder: Path) -> None:
        write_text(folder / LATENTS_FILE, json.dumps(with_sum({"format": _FORMAT, **asdict(self)}), indent=1) + "\n")


def is_latents_folder(folder: str | Path) -> bool:
    return (expanded(folder) / LATENTS_FILE).is_file()


def read_latents_manifest(folder: str | Path) -> LatentsManifest:
    """The manifest of a folder, even of an incomplete one; a `LabError` if it is damaged."""
    file = expanded(folder) / LATENTS_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not checksum_matches(data):
            raise ValueError("its SHA-256 has changed")
        if data["format"] != _FORMAT:
            raise LabError(f"{str(file)!r} has the format {data['format']!r}; this version reads {_FORMAT}. Encode again.")
        fields = {name: value for name, value in data.items() if name not in ("format", "sha256")}
        return LatentsManifest(**{**fields, "shape": tuple(fields["shape"])})
    except FileNotFoundError:
        raise LabError(f"{str(folder)!r} holds no latents ({LATENTS_FILE}). Hint: lrlab data encode makes them.") from None
    except LabError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{str(file)!r} is damaged ({error}). Hint: remove the folder and encode again.") from None


def check_whole(folder: Path, manifest: LatentsManifest) -> None:
    """Raises a `LabError` if images are missing, which is seen without reading the shards."""
    if not manifest.is_whole:
        raise LabError(
            f"{str(folder)!r} holds the latents of {manifest.num_encoded} of {counted(manifest.num_images, 'image')}. "
            f"{_AGAIN}."
        )
    for shard in manifest.shards:
        path = folder / shard["file"]
        if not path.is_file() or path.stat().st_size != shard["size"]:
            raise LabError(f"{find_damage_of_file(path, _sums(shard))}. {_AGAIN}.")


def check_shards(folder: Path, manifest: LatentsManifest) -> None:
    """Raises a `LabError` for the first missing or damaged shard; reads all of them."""
    from tqdm.auto import tqdm

    shards = tqdm(manifest.shards, desc="verify latents", unit="shard", disable=None, leave=False, delay=2)
    for damage in each_damaged_shard(folder, shards):
        raise LabError(f"{damage}. {_AGAIN}.")


def each_damaged_shard(folder: Path, shards: Any) -> Iterator[str]:
    """Missing and damaged shards, in words."""
    yield from filter(None, (find_damage_of_file(folder / shard["file"], _sums(shard)) for shard in shards))


def _sums(shard: dict[str, Any]) -> dict[str, Any]:
    return {"size": shard["size"], "sha256": shard["sha256"]}


def latents_folder(config: DataConfig) -> Path | None:
    """The folder of latents that a configuration names, if it is one."""
    folder = config.train_data_dir or config.dataset_name
    if folder is None or (config.train_data_dir is None and folder in EMBEDDED_DATASETS):
        return None
    return expanded(folder) if is_latents_folder(folder) else None


def image_set_of(config: DataConfig) -> str | None:
    """The embedded set that a configuration names, or whose latents it names."""
    if (folder := latents_folder(config)) is not None:
        return read_latents_manifest(folder).image_set
    return config.dataset_name if image_set(config.dataset_name) is not None else None
