"""Pipelines with other weights than those of a run: copies of its files in which the trained weights are replaced.

It needs neither the data nor the class of the model, so that it works for all kinds of data, and for a LoRA.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..core.errors import LabError, must_be
from ..core.files import atomic_folder, write_text
from ..models.start_weights import LORA_FILE
from .kinds.select import components
from .lora import saved_name

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SavedPipeline:
    """The pipeline in the folder of a run."""

    folder: Path
    component: str  # the model
    is_lora: bool

    @classmethod
    def of(cls, folder: Path) -> "SavedPipeline":
        index = folder / "model_index.json"
        component = next((name for name in components() if (folder / name).is_dir()), None)
        if not index.is_file() or component is None:
            raise LabError(
                f"{str(folder)!r} holds no pipeline of a run, whose weights could be replaced. Hint: let the run finish "
                "(`lrlab train ... --resume_from_checkpoint latest`), or give the folder of another one."
            )
        return cls(folder, component, (folder / LORA_FILE).is_file())

    def weight_files(self, folder: Path | None = None) -> list[Path]:
        """The files with the trained weights, in this folder or another one of the same kind."""
        folder = self.folder if folder is None else folder
        return [folder / LORA_FILE] if self.is_lora else sorted((folder / self.component).glob("*.safetensors"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights in these files, by their names there."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self.weight_files():
            with safe_open(path, "pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # it is no mapping
        return found

    def saved_name(self, parameter: str) -> str:
        """The name of a parameter of the model in these files."""
        return f"{self.component}.{saved_name(parameter)}" if self.is_lora else parameter

    def check(self, shapes: Mapping[str, tuple[int, ...]], of: str) -> None:
        """Raises a `LabError` unless weights, by parameter, are those of this model."""
        own = self.shapes()
        for name, shape in shapes.items():
            if (known := own.get(self.saved_name(name))) != shape:
                got = f"{name} of shape {shape}, which it has {'not' if known is None else f'of shape {known}'}"
                raise must_be(of, str(self.folder), f"of the model in {str(self.folder)!r}", "give their own run", got=got)

    def save(self, weights: Weights, out: Path, about: dict[str, Any], draw: Callable[[Path], None] | None = None) -> None:
        """
        Writes a pipeline with these weights, by their names in its files, and `average.json` with what they are. `draw` adds
        a plot to the folder.
        """
        left = dict(weights)
        with atomic_folder(out) as temporary:
            self._copy(temporary)
            for path in self.weight_files(temporary):
                with safe_open(path, "pt") as file:
                    metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
                own = {name: left.pop(name).to(value.dtype) for name, value in tensors.items() if name in left}
                save_file({**tensors, **own}, path, metadata=metadata)
            assert not left, "checked before"
            if draw is not None:
                draw(temporary)
            write_text(temporary / "average.json", json.dumps(about, indent=2) + "\n")

    def _copy(self, into: Path) -> None:
        index = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        parts = [name for name, value in index.items() if isinstance(value, list)]
        for name in dict.fromkeys(("model_index.json", "pipeline.py", LORA_FILE, self.component, *parts)):
            source = self.folder / name
            if Path(name).name == name and source.exists():
                shutil.copytree(source, into / name) if source.is_dir() else shutil.copyfile(source, into / name)
