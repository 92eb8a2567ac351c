"""Averages of any length after training, from snapshots of a few: EDM2, arXiv 2312.02696, section 3 and appendix C.

A power-function average weighs the weights after update t of T by (gamma + 1) t^gamma / T^(gamma + 1), its profile. The
profile of another width or a later update is close to a linear combination of stored ones, so the same combination of the
stored averages is close to the average that was never run. A snapshot is a folder:

update-00000500/averages.safetensors   "WIDTH/PARAMETER" for each width and averaged parameter
update-00000500/snapshot.json          update and widths
update-00000500/manifest.json          sizes and SHA-256
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError, must_be
from ..core.files import atomic_folder, number_in, write_text
from ..core.manifest import find_damage, write_manifest
from ..core.words import counted
from .forms import gamma_of_width

if TYPE_CHECKING:
    import torch

# Beyond it, stored profiles of widths around 0.1 fit badly: EDM2, and the table in docs/reference/averages.md.
WIDEST_RELIABLE = 0.25
_WEIGHTS, _FACTS = "averages.safetensors", "snapshot.json"


@dataclass(frozen=True)
class Profiles:
    """Power-function profiles: their ends in updates, and their powers, as float64 `(num,)` each."""

    ends: np.ndarray
    gammas: np.ndarray

    @classmethod
    def of_widths(cls, ends: list[int], widths: list[float]) -> Profiles:
        """Profiles of relative widths, `sigma_rel`."""
        return cls(np.asarray(ends, np.float64), np.array([gamma_of_width(width) for width in widths]))


def inner_products(first: Profiles, second: Profiles) -> np.ndarray:
    """The integrals of the products of profiles: float64 `(len(first), len(second))`, eq. 151."""
    t_a, g_a = first.ends[:, None], first.gammas[:, None]
    t_b, g_b = second.ends[None], second.gammas[None]
    ratio = (t_a / t_b) ** np.where(t_a < t_b, g_b, -g_a)
    return (g_a + 1) * (g_b + 1) * ratio / ((g_a + g_b + 1) * np.maximum(t_a, t_b))


@dataclass(frozen=True)
class Combination:
    """Coefficients of stored averages, float64 `(num,)`, and how good their combination is."""

    coefficients: np.ndarray  # they sum to 1
    residual: float  # of the profile: norm of the difference from the target, as a share of the target's norm
    raw_sum: float  # of the coefficients before they were made to sum to 1

    @property
    def largest(self) -> float:
        """The largest coefficient by size: rounding errors of snapshots grow with it."""
        return float(np.abs(self.coefficients).max())


def combine(stored: Profiles, target: Profiles) -> Combination:
    """
    The least-squares combination of `stored` profiles for one `target`; profiles that end later get 0.

    The coefficients are normalised to sum to 1, so that equal weights stay as they are.
    """
    is_used = stored.ends <= target.ends[0]
    used = Profiles(stored.ends[is_used], stored.gammas[is_used])
    gram, projections = inner_products(used, used), inner_products(used, target)[:, 0]
    raw = np.linalg.solve(gram, projections)
    found = raw / raw.sum()
    norm = float(inner_products(target, target)[0, 0])
    squared = norm - 2 * found @ projections + found @ gram @ found
    coefficients = np.zeros(len(stored.ends))
    coefficients[is_used] = found
    return Combination(coefficients, float(np.sqrt(max(squared, 0.0) / norm)), float(raw.sum()))


def check_target(width: float, stored: list[float], name: str = "--sigma_rel") -> str | None:
    """
    Raises a `LabError` for a width that snapshots of `stored` widths cannot give, and returns a warning for one that they
    fit poorly.
    """
    if not 0 < width <= 0.2886:
        raise must_be(name, width, "a width in (0, 0.2886]", "EDM2 finds the best ones between 0.05 and 0.15")
    smallest = min(stored)
    if width < smallest * (1 - 1e-9):
        hint = f"a narrower profile is not a combination of wider ones; train with posthoc:sigma_rels=[{width:g}|...] for it"
        raise must_be(name, width, f"at least {smallest:g}, the smallest width of the snapshots", hint)
    if width <= WIDEST_RELIABLE:
        return None
    return (
        f"{name} {width:g} is above {WIDEST_RELIABLE:g}, beyond which the stored profiles fit less well and their "
        "coefficients become large. The residual says how well they fit."
    )


def snapshot_updates(num_updates: int, snapshots: int, start_update: int = 0, update_every: int = 1, **_: Any) -> list[int]:
    """
    Equally spaced updates of the `snapshots` of a run, by the parameters of `posthoc`. The last one is at its end, and each
    is just after an update of the average; a `LabError` if the run is too short.
    """
    averaged = num_updates - start_update
    found = [start_update + averaged * index // snapshots for index in range(1, snapshots + 1)]
    found = [update - update % update_every for update in found]
    if averaged < 1 or len({*found}) < snapshots or found[0] <= start_update:
        hint = "lower snapshots of --ema posthoc, its start_update or update_every, or train for longer"
        raise LabError(
            f"--ema posthoc takes {snapshots} snapshots, at different updates after update {start_update}, and the run has "
            f"{counted(num_updates, 'update')}. Hint: {hint}."
        )
    return found


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

    precision = torch.bfloat16 if dtype == "bf16" else torch.float32
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
    numbered = [(number_in(path.name, "update-"), path) for path in folder.glob("update-*") if path.is_dir()]
    return [path for _, path in sorted((number, path) for number, path in numbered if number is not None)]


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
