"""Reads the runs of a study from its folder, as a table or as specifications."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LabError
from ..core.manifest import refuse_damaged
from ..core.signatures import checked
from .analysis.runs_table import RUNS_TABLE, read_table, runs_as_table
from .analysis.tuning import chosen_rates, tuning_rounds
from .runs.results import StudyFolder
from .spec.expansion import expand
from .spec.reading import spec_from_dict
from .spec.spec import RunSpec, StudySpec

if TYPE_CHECKING:
    import pandas


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
