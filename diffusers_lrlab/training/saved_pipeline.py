"""Pipelines with other weights than those of a run: copies of its files in which the trained weights are replaced.

It needs neither the data nor the class of the model, so that it works for all kinds of data.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..core.errors import LabError, must_be
from ..core.files import write_text
from .kinds.select import components
from .run_files import parts_of_pipeline

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SavedPipeline:
    """The pipeline in the folder of a run."""

    folder: Path
    component: str  # the model

    @classmethod
    def of(cls, folder: Path) -> "SavedPipeline":
        index = folder / "model_index.json"
        component = next((name for name in components() if (folder / name).is_dir()), None)
        if not index.is_file() or component is None:
            raise LabError(
                f"{str(folder)!r} holds no pipeline of a run, whose weights could be replaced. Hint: let the run finish "
                "(`lrlab train ... --resume_from_checkpoint latest`), or give the folder of another one."
            )
        return cls(folder, component)

    def _weight_files(self, folder: Path) -> list[Path]:
        """The files with the trained weights, in this folder or a copy of it."""
        return sorted((folder / self.component).glob("*.safetensors"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights in these files, by their names there."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self._weight_files(self.folder):
            with safe_open(path, "pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # it is no mapping
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]], of: str) -> None:
        """Raises a `LabError` unless weights, by parameter, are those of this model."""
        own = self.shapes()
        for name, shape in shapes.items():
            if (known := own.get(name)) != shape:
                got = f"{name} of shape {shape}, which it has {'not' if known is None else f'of shape {known}'}"
                raise must_be(of, str(self.folder), f"of the model in {str(self.folder)!r}", "give their own run", got=got)

    def write(self, into: Path, weights: Weights, about: dict[str, Any]) -> None:
        """
        Writes a pipeline with these weights, by their names in its files, and `average.json` with what they are, into an
        empty folder.
        """
        left = dict(weights)
        self._copy(into)
        for path in self._weight_files(into):
            with safe_open(path, "pt") as file:
                metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
            own = {name: left.pop(name).to(value.dtype) for name, value in tensors.items() if name in left}
            save_file({**tensors, **own}, path, metadata=metadata)
        assert not left, "checked before"
        write_text(into / "average.json", json.dumps(about, indent=2) + "\n")

    def _copy(self, into: Path) -> None:
        parts = parts_of_pipeline(self.folder)
        for name in dict.fromkeys(("model_index.json", "pipeline.py", self.component, *parts)):
            source = self.folder / name
            if source.exists():
                shutil.copytree(source, into / name) if source.is_dir() else shutil.copyfile(source, into / name)
