"""Averages of a finished run, of any width, from its snapshots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..averaging.posthoc import Combination, Profiles, check_target, combine
from ..averaging.snapshots import Snapshot, profiles_of, read_snapshots
from ..core.errors import LabError, must_be, warn
from ..hub.records import open_run, recorded_options
from ..training.run_files import LAB, SNAPSHOTS
from ..training.saved_pipeline import SavedPipeline
from ..training.snapshots import identity_of


def write_average(run: Path, width: float, into: Path) -> Combination:
    """
    Writes the pipeline of a run with the average of a width into an empty folder. Raises a `LabError` if the snapshots of
    the run cannot give it, and warns if they fit it poorly.
    """
    snapshots, pipeline = run_snapshots(run), SavedPipeline.of(run)
    for snapshot in snapshots:
        pipeline.check(snapshot.shapes(), f"the snapshot {snapshot.folder.name} in")
    if warning := check_target(width, [width for snapshot in snapshots for width in snapshot.sigma_rels]):
        warn(warning)
    last = snapshots[-1]
    found = combine(profiles_of(snapshots), Profiles.of_widths([last.end], [width]))
    weights = {name: torch.zeros(shape) for name, shape in last.shapes().items()}
    left, parts = iter(found.coefficients.tolist()), []
    for snapshot in snapshots:
        own = [next(left) for _ in snapshot.sigma_rels]
        snapshot.read(own, weights)
        parts.append({"update": snapshot.update, "sigma_rels": snapshot.sigma_rels, "coefficients": own})
    about = {"kind": "power_function", "sigma_rel": width, "update": last.update, "residual": found.residual}
    pipeline.write(into, weights, {**about, "largest_coefficient": found.largest, "snapshots": parts})
    return found


def run_snapshots(run: Path) -> list[Snapshot]:
    """The snapshots of a finished run, oldest first; a `LabError` if there are none, or one is damaged or of another run."""
    if (run / "spec.yaml").exists() and (run / "runs").is_dir():
        hint = "train one of its runs with `lrlab train --ema posthoc`"
        raise must_be("RUN", str(run), "the folder of a run", hint, got="that of a study")
    record = open_run(run, lambda name: not name.startswith(f"{LAB}/"))
    snapshots = read_snapshots(run / SNAPSHOTS)
    if not snapshots:
        raise no_snapshots(run, record)
    for snapshot in snapshots:
        _check_same_run(snapshot, record, run)
    return snapshots


def no_snapshots(folder: Path, record: Mapping[str, Any]) -> LabError:
    """The error for a run without snapshots, which says what can still be done."""
    why = "it was not trained with `--ema posthoc`"
    still = "train again with `lrlab train ... --ema posthoc`"
    if "posthoc" in str(record.get("config", {}).get("ema")):
        why = "the run took some, which are not here; uploads do not include them"
        still = f"use the folder in which it was trained, or {still}"
    return LabError(f"{str(folder)!r} has no snapshots of averages ({SNAPSHOTS}/): {why}. Hint: {still}.")


def _check_same_run(snapshot: Snapshot, record: Mapping[str, Any], folder: Path) -> None:
    """Raises a `LabError` for a snapshot of a run with other settings."""
    own = identity_of(recorded_options(record, str(folder)))
    differing = [name for name, value in own.items() if name in snapshot.of and snapshot.of[name] != value]
    if differing:
        name = differing[0]
        got = f"one of a run with {name}={snapshot.of[name]!r}, not {own[name]!r}"
        hint = f"restore the run's own, or remove {snapshot.folder.name} to do without it"
        raise must_be("the snapshot", str(snapshot.folder), f"of the run in {str(folder)!r}", hint, got=got)
