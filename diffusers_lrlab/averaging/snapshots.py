"""Snapshots of averages: a folder each, with the weights, what they are of, and a manifest.

update-00000500/averages.safetensors   "WIDTH/PARAMETER" for each width and averaged parameter
update-00000500/snapshot.json          update and widths
update-00000500/manifest.json          sizes and SHA-256
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LabError
from ..core.files import atomic_folder, write_text
from ..core.manifest import find_damage, write_manifest
from .posthoc import Profiles

if TYPE_CHECKING:
    import torch

_WEIGHTS, _FACTS = "averages.safetensors", "snapshot.json"
_DTYPES = {"float32": "float32", "bf16": "bfloat16"}  # torch's names


@dataclass(frozen=True)
class Snapshot:
    """One snapshot in a folder."""

    folder: Path
    update: int
    end: int  # updates in its averages, the end of their profiles
    sigma_rels: list[float]

    def read(self, coefficients: Sequence[float], into: dict[str, torch.Tensor]) -> None:
        """Adds the averages of all widths, times a coefficient each, to the float32 tensors `into`, by parameter."""
        from safetensors import safe_open

        with safe_open(self.folder / _WEIGHTS, "pt") as file:
            for width, coefficient in zip(self.sigma_rels, coefficients, strict=True):
                for name, total in into.items():
                    total.add_(file.get_tensor(f"{width:g}/{name}").float(), alpha=float(coefficient))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        from safetensors import safe_open

        prefix = f"{self.sigma_rels[0]:g}/"
        with safe_open(self.folder / _WEIGHTS, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # it is no mapping
            return {name.removeprefix(prefix): tuple(file.get_slice(name).get_shape()) for name in names}


def write_snapshot(
    folder: Path, update: int, end: int, averages: Mapping[float, Mapping[str, torch.Tensor]], dtype: str
) -> None:
    """Writes the averages after an update by width and parameter into `update-NUMBER`, whole or not at all."""
    import torch
    from safetensors.torch import save_file

    precision = getattr(torch, _DTYPES[dtype])
    tensors = {
        f"{width:g}/{name}": value.detach().to("cpu", precision).contiguous()
        for width, weights in averages.items()
        for name, value in weights.items()
    }
    with atomic_folder(folder / f"update-{update:08d}") as temporary:
        save_file(tensors, temporary / _WEIGHTS)
        write_text(temporary / _FACTS, json.dumps({"update": update, "end": end, "sigma_rels": list(averages)}))
        write_manifest(temporary)


def snapshots_in(folder: Path) -> list[Path]:
    """The folders of snapshots, oldest first; they may be damaged."""
    found = [path for path in folder.glob("update-*") if re.fullmatch("update-[0-9]{8,15}", path.name) and path.is_dir()]
    return sorted(found, key=update_of)


def update_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def read_snapshots(folder: Path) -> list[Snapshot]:
    """All snapshots in a folder, oldest first; a `LabError` for a damaged one."""
    found = []
    for path in snapshots_in(folder):
        if damage := find_damage(path):
            raise LabError(
                f"The snapshot {path.name} is damaged: {damage}. Hint: restore it from a copy, or remove its folder."
            )
        facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
        found.append(Snapshot(path, facts["update"], facts["end"], facts["sigma_rels"]))
    return found


def profiles_of(snapshots: list[Snapshot]) -> Profiles:
    """The profiles of all averages, snapshot by snapshot and by width in each."""
    ends = [snapshot.end for snapshot in snapshots for _ in snapshot.sigma_rels]
    return Profiles.of_widths(ends, [width for snapshot in snapshots for width in snapshot.sigma_rels])
