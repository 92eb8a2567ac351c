"""Checks that the folder of a pipeline is complete."""

from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.files import is_plain_name
from ..training.record_schema import read_json


def check_pipeline(folder: Path) -> None:
    """Raises a `LabError` unless all parts of a pipeline have readable configurations and weights."""
    index = read_json(folder / "model_index.json")
    if not isinstance(index, dict):
        raise LabError(f"{str(folder / 'model_index.json')!r} is not the index of a pipeline.")
    for name, value in index.items():
        if isinstance(value, list) and any(value):
            if not is_plain_name(name):
                raise LabError(f"{str(folder / 'model_index.json')!r} names {name!r}, which is not a folder beside it.")
            _check_part(folder / name)


def _check_part(part: Path) -> None:
    files = sorted(part.glob("*.json"))
    if not files:
        raise LabError(f"{str(part)!r} is missing, or has no configuration.")
    shards: set[str] = set()
    for file in files:
        data = read_json(file)
        if file.name.endswith(".index.json"):
            shards |= _shards(file, data)
    weights = {file.name for file in part.glob("*.safetensors")}
    if missing := sorted(shards - weights):
        raise LabError(f"{str(part / missing[0])!r} is missing: weights that its index names.")
    # A model has weights, a scheduler has none: diffusers names their configurations differently.
    if (part / "config.json").is_file() and not weights:
        raise LabError(f"{str(part)!r} has no weights (*.safetensors).")
    for name in weights:
        read_weights(part / name)


def _shards(file: Path, index: Any) -> set[str]:
    """The files of weights in an index."""
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise LabError(f"{str(file)!r} is not an index of weights.")
    return set(names.values())


def read_weights(path: Path) -> None:
    """Reads the header of a file of weights, which has the size of the rest; raises a `LabError` if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        raise LabError(f"{str(path)!r} is damaged ({error}).") from None
