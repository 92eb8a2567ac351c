"""The folder of a pipeline: whether all of it is there."""

from pathlib import Path
from typing import Any

from ..core.errors import LabError
from .records import read_json


def check_pipeline(folder: Path) -> None:
    """Raises a `LabError` unless all parts of a pipeline are there, with configurations and weights that can be read."""
    index = read_json(folder / "model_index.json")
    if not isinstance(index, dict):
        raise LabError(f"{str(folder / 'model_index.json')!r} is not the index of a pipeline.")
    for name, value in index.items():
        if isinstance(value, list) and any(value):
            _check_part(folder / name)


def _check_part(part: Path) -> None:
    files = sorted(part.glob("*.json"))
    if not files:
        raise LabError(f"{str(part)!r} is missing, or has no configuration.")
    shards: set[Any] = set()
    for file in files:
        data = read_json(file)
        if file.name.endswith(".index.json"):
            shards |= set(data["weight_map"].values())
    weights = {file.name for file in part.glob("*.safetensors")}
    if missing := sorted(map(str, shards - weights)):
        raise LabError(f"{str(part / missing[0])!r} is missing: weights that its index names.")
    # A model has weights, a scheduler has none: diffusers names their configurations differently.
    if (part / "config.json").is_file() and not weights:
        raise LabError(f"{str(part)!r} has no weights (*.safetensors).")
    for name in weights:
        read_weights(part / name)


def read_weights(path: Path) -> None:
    """The header of a file of weights, which knows the size of the rest."""
    from safetensors import safe_open

    with safe_open(path, "np"):
        pass
