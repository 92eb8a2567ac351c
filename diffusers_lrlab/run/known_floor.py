"""The floor of the loss that laws are fitted above: logged by a run, or computed once and kept beside it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError
from ..core.files import write_text
from ..core.options import DATA, OBJECTIVE, SOURCE, options_of
from ..diagnostics.timestep_log import read_timesteps
from ..evaluation.floor_of_data import MOST_IMAGES
from ..hub.recorded_options import recorded_options
from ..training.config import TrainingConfig
from .floor import loss_floor

if TYPE_CHECKING:
    from .loss_curves import MeasuredRun

FILE = "loss_floor.json"


def floor_of_run(run: MeasuredRun) -> np.ndarray:
    """
    The lowest possible loss on the data of a run: float64 `(bins,)`, in the bins of timesteps that its losses are known in.

    It is that of `lrlab/timesteps.parquet` (`--log_loss_floor`), that of `loss_floor.json` beside the run or the study, or
    computed now and written there, if the folder can be written.
    """
    if (logged := _logged(run.timesteps_file)) is not None:
        return logged
    file, key = run.cache_folder / FILE, _key(run)
    kept = _read(file)
    for one in kept:
        if one["of"] == key:
            return np.array(one["floor"], float)
    options = recorded_options(run.record, run.name, repeated=True) | {"preflight": False, "log_loss_floor": False}
    config = TrainingConfig(**options, output_dir="none")  # no folder is written
    floor = loss_floor(config, MOST_IMAGES, None if run.by_bin is None else Path(run.name)).best_known()
    with suppress(OSError, LabError):  # the folder may be read-only
        write_text(file, json.dumps([*kept, {"of": key, "floor": floor.tolist()}], indent=1) + "\n")
    return floor


def _logged(file: Path | None) -> np.ndarray | None:
    if file is None or not file.exists():
        return None
    frame = read_timesteps(file).to_pandas().dropna(subset="loss_floor")
    return frame.sort_values("bin")["loss_floor"].to_numpy() if len(frame) else None


def _key(run: MeasuredRun) -> dict[str, Any]:
    """What decides a floor."""
    from .. import __version__

    names = [name for name, known in options_of(TrainingConfig).items() if known.role in (SOURCE, DATA, OBJECTIVE)]
    bins = None if run.by_bin is None else run.by_bin.shape[1]
    of = {"version": __version__, "bins": bins, "max_images": MOST_IMAGES, **{name: run.options[name] for name in names}}
    return json.loads(json.dumps(of))


def _read(file: Path) -> list[dict[str, Any]]:
    """The floors in a file; none if it is missing or holds anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        good = all(np.isfinite(np.array(one["floor"], float)).all() and isinstance(one["of"], dict) for one in found)
        return found if good and isinstance(found, list) else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
