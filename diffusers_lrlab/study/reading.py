"""The runs of a study as one table, `runs.parquet`: written, and read from a study or its card."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet

from ..core.errors import LabError
from ..core.files import atomic_file
from ..core.manifest import damage_named, refuse_damaged
from ..core.values import checked
from .analysis.tuning import chosen_rates, tuning_rounds
from .results import RunResult, StudyFolder, finite
from .spec.expansion import expand
from .spec.reading import spec_from_dict
from .spec.spec import RunSpec, StudySpec

if TYPE_CHECKING:
    import pandas


RUNS_TABLE = "runs.parquet"
_KEY = b"diffusers_lrlab"  # in the metadata of the file
_OF_RUN = {
    **dict.fromkeys(("id", "arm", "dataset"), pa.string()),
    "seed": pa.int64(),
    **dict.fromkeys(("stage", "status"), pa.string()),
    "learning_rate": pa.float64(),
}
_OF_TRAINING = {
    **dict.fromkeys(("num_updates", "updates_done", "global_batch", "num_parameters"), pa.int64()),
    **dict.fromkeys(("training_seconds", "sampling_seconds", "evaluation_seconds"), pa.float64()),
}
_OTHERS = {"error": pa.string(), "executor": pa.string(), "curves": pa.string()}  # the last two as JSON
_FIXED = {**_OF_RUN, **_OF_TRAINING, **_OTHERS}


@checked
def read_study(folder: str | Path) -> pandas.DataFrame:
    """
    The runs of a study: a row for each run, a column for each metric.

    ```python
    runs = read_study("first-study")
    compared = runs[(runs.stage == "compare") & (runs.status == "finished")]
    compared.groupby(["dataset", "arm"]).kl.agg(["mean", "std"])
    ```

    Args:
        folder (`str` or `Path`): Folder of a study, which may still be running, or of a card, which may be downloaded.

    Returns:
        A `pandas.DataFrame` with the columns of `runs.parquet`, which docs/reference/studies.md describes: `arm`, `dataset`,
        `seed`, `stage`, `status`, `learning_rate`, ..., and one for each metric, NaN where a run diverged.

    Raises:
        LabError: if the folder holds no study, or no result yet, or if its files are damaged.
    """
    study = StudyFolder(Path(folder).expanduser())
    table = study.path / RUNS_TABLE
    if table.exists():
        written = table.stat().st_mtime_ns
        if not any(file.stat().st_mtime_ns > written for file in (study.path / "runs").glob("[!.]*.json")):
            refuse_damaged(study.path, only=lambda name: name in ("summary.json", RUNS_TABLE))
            return read_table(study.path).to_pandas()
    saved, _ = study.read_spec()
    tuning, compared = runs_of(spec_from_dict(saved, study.path), study)
    results = study.results([*compared, *tuning])
    study.check_results([*compared, *tuning])
    if not results:
        raise no_result(study)
    return runs_as_table(results, {}).to_pandas()


def runs_of(spec: StudySpec, folder: StudyFolder) -> tuple[list[RunSpec], list[RunSpec]]:
    """Runs for tuning, as far as they follow from results, and runs of the comparison, once rates are chosen."""
    tuning = sum(tuning_rounds(spec, folder), [])
    if folder.missing(tuning):
        return tuning, []
    return tuning, expand(spec, chosen_rates(spec, folder.results(tuning)))


def no_result(folder: StudyFolder) -> LabError:
    """The error for a study without any result."""
    return LabError(f"There is no result in {str(folder.path)!r} yet. Resume the study with `lrlab study run`.")


# --- the table ---------------------------------------------------------------------------------------------------------


def write_runs(results: Iterable[RunResult], notes: dict[str, Any], folder: Path) -> None:
    """Writes [`runs_as_table`] as `runs.parquet`."""
    with atomic_file(folder / RUNS_TABLE) as path:
        parquet.write_table(runs_as_table(results, notes), path)


def runs_as_table(results: Iterable[RunResult], notes: dict[str, Any]) -> pa.Table:
    """
    A row for each run, tuning and diverged runs included, and a column for each metric and for each text that metrics add.

    `notes` are stored in the metadata, as JSON. docs/reference/studies.md describes the columns.
    """
    results = list(results)
    measured = dict.fromkeys(name for result in results for name in result.results)
    metrics = {name: f"metric_{name}" if name in _FIXED else name for name in measured}
    texts = {name for result in results for name, value in result.results.items() if isinstance(value, str)}
    types = {column: pa.string() if name in texts else pa.float64() for name, column in metrics.items()}
    rows = []
    for result in results:
        run, train = result.record["run"], result.record["train"]
        row = {name: getattr(result, name) for name in _OF_RUN} | {name: train.get(name) for name in _OF_TRAINING}
        row |= {column: result.results.get(name) for name, column in metrics.items()}
        executor, curves = json.dumps(run["executor"]), json.dumps(finite(result.curves))
        rows.append(row | {"error": run["error"], "executor": executor, "curves": curves})
    columns = {**_OF_RUN, **_OF_TRAINING, **types, **_OTHERS}
    about = json.dumps(finite({"metrics": metrics, "notes": notes}), allow_nan=False)
    return pa.Table.from_pylist(rows, pa.schema(columns, metadata={_KEY: about.encode()}))


def read_runs(folder: Path) -> tuple[list[RunResult], dict[str, Any]]:
    """Runs and notes of the table that `write_runs` wrote; raises a `LabError` for any other file."""
    with damage_named(folder):
        table = read_table(folder)
        about = json.loads(table.schema.metadata[_KEY])
        return [_result(row, about["metrics"]) for row in table.to_pylist()], about["notes"]


def read_table(folder: Path) -> pa.Table:
    """The table that `write_runs` wrote; raises a `LabError` for any other file."""
    with damage_named(folder):
        table = parquet.read_table(folder / RUNS_TABLE)
        if _KEY not in table.schema.metadata:
            raise KeyError(f"{RUNS_TABLE} is not the table of a study's runs")
        return table


def _result(row: dict[str, Any], metrics: dict[str, str]) -> RunResult:
    run = {name: row[name] for name in (*_OF_RUN, "error")} | {"executor": json.loads(row["executor"])}
    train = {name: row[name] for name in _OF_TRAINING}
    train["results"] = {name: row[column] for name, column in metrics.items() if row[column] is not None}
    return RunResult({"run": run, "train": train, "curves": json.loads(row["curves"]), "config": {}})
