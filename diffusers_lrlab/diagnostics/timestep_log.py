"""The log of losses by noise level: sums per bin of timesteps on the device, read at logging points, and their table.

`lrlab/timesteps.parquet` is written as a whole at checkpoints and at the end, and read back to resume.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.files import atomic_file
from ..timesteps.sampling import TimestepSampler

if TYPE_CHECKING:
    import pyarrow as pa

# A loss is a spike if its logarithm is this many robust standard deviations above the median of earlier rows.
_SPIKE_DEVIATIONS = 8.0
_SPIKE_WINDOW = 50
_SPIKE_MIN_ROWS = 20


@functools.cache
def table_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("update", pa.int64()),
            *((name, pa.int32()) for name in ("bin", "first_timestep", "last_timestep")),
            ("num_samples", pa.int64()),
            *((name, pa.float64()) for name in ("share", "asked_share", "loss_mean", "loss_variance")),
            ("loss_spike", pa.bool_()),
            *((name, pa.float64()) for name in ("validation_loss", "validation_loss_ema", "grad_norm", "grad_noise_scale")),
        ]
    )


def write_timesteps(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_timesteps(path: Path) -> pa.Table:
    """The table in a file; an empty one if there is no file."""
    import pyarrow.parquet as pq

    return pq.read_table(path, schema=table_schema()) if path.exists() else table_schema().empty_table()


def bin_starts(num_bins: int, num_train_timesteps: int) -> np.ndarray:
    """The first timestep of each bin, and T: int64 `(num_bins + 1,)`; sizes of bins differ by at most one."""
    return -(-np.arange(num_bins + 1) * num_train_timesteps // num_bins)


class SpikeDetector:
    """Flags losses far above the running median of their bin, by the running median deviation."""

    def __init__(self, num_bins: int):
        # The last logarithms of losses of each bin, from the left; NaN until there are any.
        self._logs = np.full((num_bins, _SPIKE_WINDOW), math.nan)
        self._counts = np.zeros(num_bins, np.int64)

    def flag(self, losses: np.ndarray) -> np.ndarray:
        """Whether mean losses `(num_bins,)`, NaN without images, are spikes; adds them to the running window."""
        found = ~np.isnan(losses)
        values = np.log(np.maximum(np.where(found, losses, 1.0), 1e-300))
        spikes = np.zeros(len(losses), bool)
        ready = found & (self._counts >= _SPIKE_MIN_ROWS)
        if ready.any():
            before = self._logs[ready]
            median = np.nanmedian if np.isnan(before).any() else np.median  # which is ten times as fast
            medians = median(before, axis=1)
            deviations = 1.4826 * median(np.abs(before - medians[:, None]), axis=1)
            spikes[ready] = values[ready] > medians + _SPIKE_DEVIATIONS * np.maximum(deviations, 0.01)
        bins = np.flatnonzero(found)
        self._logs[bins, self._counts[bins] % _SPIKE_WINDOW] = values[bins]
        self._counts[bins] += 1
        return spikes


class TimestepLog:
    """
    The losses of images by noise level, from [`add`] to a row for each bin.

    `gather` joins tensors of all processes along their first dimension. The rows are those of `lrlab/timesteps.parquet`,
    stored by column: a long run has a million of them.
    """

    def __init__(
        self,
        num_bins: int,
        num_train_timesteps: int,
        device: torch.device | str = "cpu",
        gather: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
    ):
        self.starts, self.gather = bin_starts(num_bins, num_train_timesteps), gather
        bins = torch.repeat_interleave(torch.arange(num_bins), torch.from_numpy(np.diff(self.starts)))
        # The bin of each timestep: float64 of shape (T, bins).
        self._one_hot = torch.nn.functional.one_hot(bins, num_bins).double().to(device)
        # Number, sum and sum of squares of this process's losses in each bin since the last row.
        self.sums = torch.zeros(3, num_bins, dtype=torch.float64, device=device)
        self.labels = [f"{first} to {next_one - 1}" for first, next_one in itertools.pairwise(self.starts)]
        self.last_means = dict.fromkeys(self.labels, math.nan)  # losses by label; NaN in bins without images
        self._table: pa.Table | None = None
        self._fresh: list[dict[str, Any]] = []
        self._spikes = SpikeDetector(num_bins)

    @property
    def num_bins(self) -> int:
        return len(self.starts) - 1

    @property
    def table(self) -> pa.Table:
        """All rows so far, with null for missing values."""
        import pyarrow as pa
        import pyarrow.json

        if self._fresh:
            # As JSON: for Python's objects pyarrow imports pandas, which takes longer than a short run.
            rows = io.BytesIO("\n".join(map(json.dumps, self._fresh)).encode())
            options = pyarrow.json.ParseOptions(explicit_schema=table_schema(), unexpected_field_behavior="error")
            fresh = pyarrow.json.read_json(rows, parse_options=options)
            self._table = pa.concat_tables([fresh] if self._table is None else [self._table, fresh]).combine_chunks()
            self._fresh = []
        return table_schema().empty_table() if self._table is None else self._table

    @property
    def num_spikes(self) -> int:
        import pyarrow.compute as pc

        return pc.sum(self.table["loss_spike"]).as_py() or 0

    def add(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds the unweighted losses of images, both of shape `(num_images,)` on the device, without waiting for it."""
        losses = losses.detach().double()
        # Not index_add_, whose order of summation is not fixed on a GPU.
        self.sums += torch.stack([torch.ones_like(losses), losses, losses.square()]) @ self._one_hot[timesteps]

    def _add(self, update: int, columns: dict[str, Any]) -> None:
        for index in range(self.num_bins):
            row = {"update": update, "bin": index, "first_timestep": int(self.starts[index])}
            row["last_timestep"] = int(self.starts[index + 1]) - 1
            self._fresh.append({**row, **{key: values[index] for key, values in columns.items()}})

    def add_row(self, update: int, expected: np.ndarray | None) -> list[int]:
        """
        Adds the losses of all processes since the last row and up to `update`, beside the expected probabilities `(T,)` of
        these updates, if known. All processes call it. Returns the bins whose loss is a spike.
        """
        counts, totals, squares = self.gather(self.sums[None]).sum(0).cpu().numpy()
        self.sums.zero_()
        with np.errstate(invalid="ignore", divide="ignore"):
            means = totals / counts
            variances = np.maximum(squares / counts - means**2, 0)
            shares = counts / counts.sum()
        spikes = self._spikes.flag(means).tolist()
        self.last_means = dict(zip(self.labels, means.tolist(), strict=True))
        asked = [None] * len(means) if expected is None else np.add.reduceat(expected, self.starts[:-1]).tolist()
        self._add(
            update,
            {
                "num_samples": counts.astype(int).tolist(),
                "share": _without_nan(shares),
                "asked_share": asked,
                "loss_mean": _without_nan(means),
                "loss_variance": _without_nan(variances),
                "loss_spike": spikes,
            },
        )
        return [index for index, spike in enumerate(spikes) if spike]

    def add_validation(self, update: int, timesteps: np.ndarray, losses: dict[str, np.ndarray]) -> None:
        """Adds the means over the bins of validation losses per image, by name of the column."""
        bins = np.searchsorted(self.starts, timesteps, side="right") - 1
        counts = np.bincount(bins, minlength=self.num_bins)
        columns = {}
        for name, values in losses.items():
            with np.errstate(invalid="ignore"):
                columns[name] = _without_nan(np.bincount(bins, values, minlength=self.num_bins) / counts)
        self._add(update, columns)

    def add_gradients(self, update: int, norms: Sequence[float], noise_scales: Sequence[float]) -> None:
        self._add(update, {"grad_norm": _without_nan(norms), "grad_noise_scale": _without_nan(noise_scales)})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The sums of every process that are not in the table yet."""
        return {"sums": self.gather(self.sums[None])}

    def load_state_dict(self, state: dict[str, torch.Tensor], rank: int, num_processes: int) -> None:
        sums = state["sums"]
        if len(sums) != num_processes:  # only the total counts
            sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(num_processes, *sums.shape[1:])])
        self.sums.copy_(sums[rank])

    def restore(self, table: pa.Table, update: int) -> None:
        """Restores the rows that existed after `update` updates."""
        import pyarrow.compute as pc

        # Rows of losses have the number of their last update; other rows, the number of updates done before.
        at_update = pc.and_(pc.equal(table["update"], update), pc.is_null(table["num_samples"]))
        self._table = table.filter(pc.or_(pc.less(table["update"], update), at_update))
        self._fresh = []
        self._spikes = SpikeDetector(self.num_bins)
        losses = self._table.filter(pc.is_valid(self._table["loss_mean"])).select(["bin", "loss_mean"])
        for row in losses.slice(max(0, len(losses) - self.num_bins * _SPIKE_WINDOW)).to_pylist():
            means = np.full(self.num_bins, math.nan)
            means[row["bin"]] = row["loss_mean"]
            self._spikes.flag(means)


def _without_nan(values: Iterable[float]) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


def expected_probabilities(sampler: TimestepSampler, first: int, last: int) -> np.ndarray:
    """Probabilities of timesteps, averaged over updates `first` to `last`; the current ones if they follow losses."""
    if sampler.follows_losses:
        return sampler.probabilities(last).cpu().numpy()
    if not sampler.moves:
        return sampler.probabilities(first).numpy()
    # Averaged over at most 1000 updates: a table of all of them would be large.
    updates = np.unique(np.linspace(first, last, min(last - first + 1, 1000)).astype(np.int64))
    return sampler.probabilities(updates).numpy().mean(axis=0)
