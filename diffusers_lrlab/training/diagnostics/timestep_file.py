"""`lrlab/timesteps.parquet`: written whole at checkpoints and at the end, read back to go on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ...core.files import atomic_file

SCHEMA = pa.schema(
    [
        ("update", pa.int64()),
        ("bin", pa.int32()),
        ("first_timestep", pa.int32()),
        ("last_timestep", pa.int32()),
        ("num_samples", pa.int64()),
        ("share", pa.float64()),
        ("asked_share", pa.float64()),
        ("loss_mean", pa.float64()),
        ("loss_variance", pa.float64()),
        ("loss_spike", pa.bool_()),
        ("validation_loss", pa.float64()),
        ("validation_loss_ema", pa.float64()),
        ("grad_norm", pa.float64()),
        ("grad_noise_scale", pa.float64()),
    ]
)


def write_timesteps(table: pa.Table, path: Path) -> None:
    """Writes the table atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_timesteps(path: Path) -> pa.Table:
    """The table that was written; an empty one if there is no file."""
    return pq.read_table(path, schema=SCHEMA) if path.exists() else SCHEMA.empty_table()
