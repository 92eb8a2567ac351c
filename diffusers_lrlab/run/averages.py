"""Averages of a finished run, of any width, from its snapshots: copies of its pipeline in which the weights are replaced.

This needs neither the data nor the class of the model, so it works for all kinds of data.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..averaging.posthoc import Combination, Profiles, Snapshot, check_target, combine, profiles_of, read_snapshots
from ..core.errors import LabError, warn
from ..core.files import write_text
from ..core.manifest import damage_named
from ..hub.records import open_run
from ..training.kinds import components
from ..training.run_folder import LAB, SNAPSHOTS, parts_of_pipeline


def write_average(run: Path, width: float, into: Path) -> Combination:
    """
    Writes the pipeline of a run with the average of a width into an empty folder. Raises a `LabError` if the snapshots of
    the run cannot give it, and warns if they fit it poorly.
    """
    snapshots = run_snapshots(run)
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
    with damage_named(run):
        _copy_pipeline(run, into, weights)
    about |= {"largest_coefficient": found.largest, "snapshots": parts}
    write_text(into / "average.json", json.dumps(about, indent=2) + "\n")
    return found


def _copy_pipeline(run: Path, into: Path, weights: dict[str, torch.Tensor]) -> None:
    """Copies the pipeline of a run, with these weights in the files of its model."""
    component = next((name for name in components() if (run / name).is_dir()), None)
    if not (run / "model_index.json").is_file() or component is None:
        raise LabError(
            f"{str(run)!r} holds no pipeline of a run, whose weights could be replaced. Hint: let the run finish "
            "(`lrlab train ... --resume_from_checkpoint latest`), or give the folder of another one."
        )
    for name in dict.fromkeys(("model_index.json", "pipeline.py", component, *parts_of_pipeline(run))):
        if (source := run / name).exists():
            shutil.copytree(source, into / name) if source.is_dir() else shutil.copyfile(source, into / name)
    for path in sorted((into / component).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        own = {name: weights.pop(name).to(value.dtype) for name, value in tensors.items() if name in weights}
        save_file({**tensors, **own}, path, metadata=metadata)
    if weights:
        raise ValueError(f"the model has no {next(iter(weights))}, which its snapshots have")


def run_snapshots(run: Path) -> list[Snapshot]:
    """The snapshots of a finished run, oldest first; a `LabError` if there are none, or one is damaged."""
    record = open_run(run, lambda name: not name.startswith(f"{LAB}/"))
    if snapshots := read_snapshots(run / SNAPSHOTS):
        return snapshots
    why, still = "it was not trained with `--ema posthoc`", "train again with `lrlab train ... --ema posthoc`"
    if "posthoc" in str(record["config"].get("ema")):
        why = "the run took some, which are not here; uploads do not include them"
        still = f"use the folder in which it was trained, or {still}"
    raise LabError(f"{str(run)!r} has no snapshots of averages ({SNAPSHOTS}/): {why}. Hint: {still}.")
