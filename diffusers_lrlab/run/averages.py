"""Averages of a finished run, of any width, from its snapshots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..averaging.posthoc import Combination, Profiles, check_target, combine
from ..averaging.snapshots import Snapshot, combined, profiles_of, read_snapshots
from ..core.errors import LabError, must_be, warn
from ..hub.recorded_options import recorded_options
from ..hub.records import open_run
from ..training.run_files import LAB, SNAPSHOTS
from ..training.saved_pipeline import SavedPipeline
from ..training.snapshots import identity_of


class RunSnapshots:
    """The snapshots of a finished run, checked against it."""

    def __init__(self, folder: Path):
        _check_is_no_study(folder)
        self.folder, record = folder, open_run(folder, _is_of_pipeline)
        self.snapshots = read_snapshots(folder / SNAPSHOTS)
        if not self.snapshots:
            raise no_snapshots(folder, record)
        self.pipeline = SavedPipeline.of(folder)
        for snapshot in self.snapshots:
            _check_same_run(snapshot, record, folder)
            self.pipeline.check(snapshot.shapes(), f"the snapshot {snapshot.folder.name} in")
        self.profiles = profiles_of(self.snapshots)

    @property
    def widths(self) -> list[float]:
        return sorted({width for snapshot in self.snapshots for width in snapshot.sigma_rels})

    @property
    def update(self) -> int:
        """The update of the last snapshot."""
        return self.snapshots[-1].update

    @property
    def end(self) -> int:
        """Updates in the last snapshot."""
        return self.snapshots[-1].end

    def combination(self, width: float) -> Combination:
        """The coefficients for a width; a `LabError` if the snapshots cannot give it, a warning if they fit it poorly."""
        if warning := check_target(width, self.widths):
            warn(warning)
        return combine(self.profiles, Profiles.of_widths([self.end], [width]))

    def write(self, into: Path, width: float) -> Combination:
        """Writes the pipeline with the average of a width into an empty folder."""
        found = self.combination(width)
        self.pipeline.write(into, combined(self.snapshots, found.coefficients.tolist()), self.about(width, found))
        return found

    def about(self, width: float, found: Combination) -> dict[str, Any]:
        return {
            "kind": "power_function",
            "sigma_rel": width,
            "update": self.update,
            "residual": found.residual,
            "largest_coefficient": found.largest,
            "snapshots": [
                {"update": snapshot.update, "sigma_rels": snapshot.sigma_rels, "coefficients": own}
                for snapshot, own in zip(self.snapshots, self._by_snapshot(found), strict=True)
            ],
        }

    def _by_snapshot(self, found: Combination) -> list[list[float]]:
        left = iter(found.coefficients.tolist())
        return [[next(left) for _ in snapshot.sigma_rels] for snapshot in self.snapshots]


def _is_of_pipeline(name: str) -> bool:
    return not name.startswith(f"{LAB}/")


def no_snapshots(folder: Path, record: Mapping[str, Any]) -> LabError:
    """The error for a run without snapshots, which says what can still be done."""
    why = "it was not trained with `--ema posthoc`"
    still = "train again with `lrlab train ... --ema posthoc`"
    if "posthoc" in str(record.get("config", {}).get("ema")):
        why = "the run took some, which are not here; uploads do not include them"
        still = f"use the folder in which it was trained, or {still}"
    return LabError(f"{str(folder)!r} has no snapshots of averages ({SNAPSHOTS}/): {why}. Hint: {still}.")


def _check_is_no_study(folder: Path) -> None:
    """Raises a `LabError` for the folder of a study, which keeps no snapshots."""
    if (folder / "spec.yaml").exists() and (folder / "runs").is_dir():
        hint = "train one of its runs with `lrlab train --ema posthoc`"
        raise must_be("RUN", str(folder), "the folder of a run", hint, got="that of a study")


def _check_same_run(snapshot: Snapshot, record: Mapping[str, Any], folder: Path) -> None:
    """Raises a `LabError` for a snapshot of a run with other settings."""
    own = identity_of(recorded_options(record, str(folder)))
    differing = [name for name, value in own.items() if name in snapshot.of and snapshot.of[name] != value]
    if differing:
        name = differing[0]
        got = f"one of a run with {name}={snapshot.of[name]!r}, not {own[name]!r}"
        hint = f"restore the run's own, or remove {snapshot.folder.name} to do without it"
        raise must_be("the snapshot", str(snapshot.folder), f"of the run in {str(folder)!r}", hint, got=got)
