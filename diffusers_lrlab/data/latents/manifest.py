"""`latents.json`: what encoded a folder of latents, and the sum of its rows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import LabError, must_be
from ...core.files import expanded, write_text
from ...core.manifest import checksum_matches, find_damage_of_file, with_sum
from ..image_sets import image_set
from ..options import EMBEDDED_DATASETS, DataConfig

LATENTS_FILE = "latents.json"
ROWS_FILE = "latents.arrow"  # a `datasets.Dataset` with the column `latent`, and that of labels
_FORMAT = 2
_AGAIN = "Hint: remove the folder and encode again with lrlab data encode"


@dataclass(frozen=True, kw_only=True)
class LatentsManifest:
    """The facts of a folder of latents."""

    autoencoder: dict[str, Any]  # class_name, name_or_path, subfolder, revision
    weights_sha256: str
    scaling_factor: float
    shift_factor: float
    shape: tuple[int, int, int]  # of a latent: channels, height, width
    is_deterministic: bool  # no standard deviations
    flip: bool  # mirrored images are encoded, too
    dtype: str  # of the bytes of a row: mean and standard deviation, and both of the mirrored image
    dataset: str
    resolution: int  # pixels of a side of the images
    image_channels: int
    image_set: str | None  # the embedded set that it is
    label_column: str | None
    num_images: int
    mean: float  # of the scaled latents that a model is trained on
    std: float
    rows: dict[str, Any]  # size and SHA-256 of the file

    @cached_property
    def fingerprint(self) -> str:
        return with_sum(asdict(self))["sha256"]

    def check_label_column(self, argument: str, column: str | None) -> None:
        """Raises a `LabError` that names `argument` if it requests labels that were not encoded."""
        if column is None or column == self.label_column:
            return
        hint = f"encode these images into a new folder with lrlab data encode ... --label_column {column}"
        if self.label_column is None:
            raise must_be(argument, column, "left out for latents that were encoded without labels", hint)
        raise must_be(argument, column, f"{self.label_column!r}, the column that was encoded", f"give it, or {hint}")

    def write(self, folder: Path) -> None:
        write_text(folder / LATENTS_FILE, json.dumps(with_sum({"format": _FORMAT, **asdict(self)}), indent=1) + "\n")


def is_latents_folder(folder: str | Path) -> bool:
    return (expanded(folder) / LATENTS_FILE).is_file()


def read_latents_manifest(folder: str | Path) -> LatentsManifest:
    """The manifest of a folder; a `LabError` if it is damaged, or of an earlier version."""
    file = expanded(folder) / LATENTS_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not checksum_matches(data):
            raise ValueError("its SHA-256 has changed")
        if data["format"] != _FORMAT:
            raise LabError(f"{str(file)!r} has the format {data['format']!r}; this version reads {_FORMAT}. {_AGAIN}.")
        fields = {name: value for name, value in data.items() if name not in ("format", "sha256")}
        return LatentsManifest(**{**fields, "shape": tuple(fields["shape"])})
    except FileNotFoundError:
        raise LabError(f"{str(folder)!r} holds no latents ({LATENTS_FILE}). Hint: lrlab data encode makes them.") from None
    except LabError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{str(file)!r} is damaged ({error}). {_AGAIN}.") from None


def check_rows(folder: Path, manifest: LatentsManifest) -> None:
    """Raises a `LabError` if the rows are missing or damaged; reads all of them."""
    if damage := find_damage_of_file(folder / ROWS_FILE, manifest.rows):
        raise LabError(f"{damage}. {_AGAIN}.")


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
