"""`lrlab floor`: the loss of a perfect model by noise level, beside the losses of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.random_states import random_states_kept
from ..diagnostics.timestep_log import bin_starts, read_timesteps
from ..evaluation.floor_of_data import Floor, floor_of_data
from ..training.config import TrainingConfig
from ..training.prepare import prepare_resolved, resolve_and_check
from ..training.run_folder import RunFolder

_NUM_BINS = 10


def loss_floor(config: TrainingConfig, max_images: int, run: Path | None = None) -> Floor:
    """The lowest possible loss for the data and the objective of a configuration, and the losses of a run in a folder."""
    with random_states_kept():
        resolved = resolve_and_check(config)
        plan, data, _ = prepare_resolved(resolved)
        process = plan.process
    table = read_timesteps(RunFolder(run).timesteps_file) if run is not None else None
    if table is not None and not len(table):
        raise LabError(
            f"{str(run)!r} has no lrlab/timesteps.parquet, so it has no losses by noise level. Hint: train with "
            "--log_timestep_bins, or leave out --run and give the options of its data."
        )
    num_bins = min(_NUM_BINS, process.num_train_timesteps) if table is None else int(table["bin"].to_numpy().max()) + 1
    floor = floor_of_data(data, process, bin_starts(num_bins, process.num_train_timesteps), max_images)
    if table is None:
        return floor
    training, validation = _losses(table, num_bins)
    return dataclasses.replace(floor, training=training, validation=validation)


def _losses(table: Any, num_bins: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The last losses of a run in each bin: training over the last tenth of its updates, validation at its end or `None`."""
    frame = table.to_pandas()
    late = frame[frame["update"] >= 0.9 * frame["update"].max()].dropna(subset="loss_mean")
    sums, counts = (
        (late["loss_mean"] * late["num_samples"]).groupby(late["bin"]).sum(),
        late.groupby("bin")["num_samples"].sum(),
    )
    training = (sums / counts).reindex(range(num_bins)).to_numpy()
    for key in ("validation_loss_ema", "validation_loss"):
        rows = frame.dropna(subset=key)
        if len(rows):
            last = rows[rows["update"] == rows["update"].max()].set_index("bin")[key]
            return training, last.reindex(range(num_bins)).to_numpy()
    return training, None
