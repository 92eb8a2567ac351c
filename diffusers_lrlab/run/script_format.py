"""The average that a third-party script saved under the launcher, in which other averages take the place of the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, safe_open, save_file

from ..core.errors import LabError, must_be
from ..core.files import write_text
from ..diffusers_plugin.host.script_averages import PLACES
from ..diffusers_plugin.host.script_averages import SNAPSHOTS as OF_SCRIPT
from ..training.run_files import LAB, RECORD
from ..training.saved_pipeline import Weights


@dataclass(frozen=True)
class ScriptFormat:
    """`lrlab/ema` in the output folder of a script, and where its files have each trained parameter."""

    folder: Path
    places: dict[str, tuple[str, str]]  # file and name there, by parameter

    @classmethod
    def of(cls, output: Path) -> ScriptFormat | None:
        """
        The format of a script's output folder; `None` for any other folder. A `LabError` for a script that did not end.
        """
        snapshots, saved = output / LAB / OF_SCRIPT, output / LAB / "ema"
        if (output / RECORD).is_file() or not snapshots.is_dir():
            return None
        try:
            found = json.loads((snapshots / PLACES).read_text(encoding="utf-8"))["parameters"]
            places = {str(name): (str(file), str(there)) for name, (file, there) in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LabError(
                f"{str(snapshots / PLACES)!r} cannot be read ({error}), so the script's format is unknown: this file is "
                "written when the script ends. Hint: resume the script, and let it end."
            ) from None
        inside = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
        if missing := sorted({file for file, _ in places.values()} - inside):
            raise LabError(f"{str(saved)!r} lacks {missing[0]!r}, in which the script saved its average. Restore it.")
        return cls(saved, places)

    def saved_name(self, parameter: str) -> str:
        return parameter

    def check(self, shapes: Mapping[str, tuple[int, ...]], of: str) -> None:
        """Raises a `LabError` unless weights, by parameter, are those of this model."""
        found: dict[str, tuple[int, ...]] = {}
        for file, own in self._by_file().items():
            tensors = _read(self.folder / file)[0]
            found |= {name: tuple(tensors[there].shape) for name, there in own.items() if there in tensors}
        if wrong := [name for name, shape in shapes.items() if found.get(name) != shape] or [*found.keys() - shapes.keys()]:
            got = f"{wrong[0]} of shape {shapes.get(wrong[0])}, which is {found.get(wrong[0])} there"
            raise must_be(
                of, str(self.folder.parent), f"of the model in {str(self.folder)!r}", "give their own run", got=got
            )

    def write(self, into: Path, weights: Weights, about: dict[str, Any]) -> None:
        """Writes a copy with these weights, by parameter, and `average.json` with what they are, into an empty folder."""
        shutil.copytree(self.folder, into, dirs_exist_ok=True)
        for file, own in self._by_file().items():
            tensors, metadata = _read(into / file)
            tensors |= {there: weights[name].to(tensors[there].dtype) for name, there in own.items()}
            if file.endswith(".safetensors"):
                save_file(tensors, into / file, metadata=metadata)
            else:
                torch.save(tensors, into / file)
        write_text(into / "average.json", json.dumps(about, indent=2) + "\n")

    def _by_file(self) -> dict[str, dict[str, str]]:
        """The names of parameters in each file, by parameter."""
        found: dict[str, dict[str, str]] = {}
        for name, (file, there) in self.places.items():
            found.setdefault(file, {})[name] = there
        return found


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The tensors in a file of weights, and its metadata."""
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True), None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return load_file(path), metadata
