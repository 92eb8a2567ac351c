"""Checks of files before a report names them: present, readable, and not empty."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

# Other files of accelerate's checkpoints.
_OTHER_STATES = ("optimizer", "scheduler", "sampler", "scaler", "random_states", "dl_state")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
Tensors = Iterator[tuple[Path, str, torch.Size, Callable[[], torch.Tensor]]]


def problem_with(path: Path) -> str | None:
    """Why a file or a folder cannot be used, in words; `None` if it can."""
    if not path.exists():
        return f"{path} is missing"
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    if not files:
        return f"{path} is empty"
    for file in files:
        try:
            is_filled = file.suffix not in _CHECKS or _CHECKS[file.suffix](file)  # others may be empty markers
        except Exception as error:
            return f"{file} cannot be read ({type(error).__name__}: {error})"
        if not is_filled:
            return f"{file} is empty"
    return None


def first_problem(*paths: Path) -> str | None:
    return next(filter(None, map(problem_with, paths)), None)


def stored_tensors(folder: Path) -> Tensors:
    """File, name, shape and a reader of each tensor in the weight files of a folder, without those of `lrlab/`."""
    for path in sorted(folder.rglob("*")):
        if "lrlab" in path.relative_to(folder).parts or path.name.startswith(_OTHER_STATES):
            continue
        if path.suffix == ".safetensors":
            file = safe_open(path, "pt")  # open as long as its tensors may be read
            for name in file.keys():
                yield path, name, torch.Size(file.get_slice(name).get_shape()), functools.partial(file.get_tensor, name)
        elif path.suffix in _PICKLES:
            for name, value in _pickled(path).items():
                if isinstance(value, torch.Tensor):
                    yield path, name, value.shape, value.clone


def _pickled(path: Path) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # not weights
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _has_rows(path: Path) -> bool:
    import pyarrow.parquet as pq

    return pq.read_table(path).num_rows > 0


def _has_pixels(path: Path) -> bool:
    from PIL import Image

    with Image.open(path) as image:
        image.verify()
        return min(image.size) > 0


def _has_lines(path: Path) -> bool:
    return bool([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def _has_tensors(path: Path) -> bool:
    with safe_open(path, "pt") as file:
        return len([file.get_slice(name).get_shape() for name in file.keys()]) > 0


_CHECKS: dict[str, Callable[[Path], bool]] = {
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")) is not None,  # a configuration may be {}
    ".jsonl": _has_lines,
    ".parquet": _has_rows,
    ".png": _has_pixels,
    ".safetensors": _has_tensors,
    **dict.fromkeys(_PICKLES, lambda path: path.stat().st_size > 0),
}
