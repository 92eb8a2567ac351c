"""Reads the runs of a study from its folder, as a table, and writes its summary and report from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError
from ..core.manifest import damage_named, open_manifest, refuse_damaged
from ..core.plugins import names_code
from ..core.values import checked
from .analysis.runs_table import RUNS_TABLE, read_runs, read_table, runs_as_table, write_runs
from .analysis.summary import notes_on, summarise, write_summary
from .analysis.tuning import chosen_rates, tuning_rounds
from .runs.progress import StudyProgress
from .runs.results import RunResult, StudyFolder
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


def report_study(out: Path) -> Path:
    """
    Rewrites summary and report of a study from the results in its folder; raises a `LabError` if there are none.

    The folder may be a card, which has `runs.parquet` in place of the results.
    """
    folder = StudyFolder(out)
    saved, command = folder.read_spec()
    is_card = not (out / "runs").exists()
    base = saved.get("base") if isinstance(saved, dict) else None
    code = base.get("plugins") if isinstance(base, dict) else None
    with names_code(code):
        spec = spec_from_dict(saved, folder.path)
    if is_card:
        # Its summary and report are rewritten.
        refuse_damaged(out, "download the card again", only=lambda name: not name.startswith(("summary.", "report/")))
    else:
        again = "give the command of the study again, which repeats damaged runs"
        refuse_damaged(out, again, only=lambda name: name == "spec.yaml" or name.startswith("runs/"))
    if is_card and (out / RUNS_TABLE).exists():
        with folder.locked(), damage_named(out):
            results, notes = read_runs(out)
            return _write_results(spec, results, notes, folder, StudyProgress(), command)
    with names_code(code):
        tuning, runs = runs_of(spec, folder)
    folder.check_results([*tuning, *runs])
    if not runs:
        raise LabError(f"The learning rates of {str(out)!r} are not chosen yet. Resume the study with `lrlab study run`.")
    if not folder.results(runs):
        raise no_result(folder)
    with folder.locked():
        return write_all(spec, runs, tuning, folder, StudyProgress(), command)


def write_all(
    spec: StudySpec,
    runs: list[RunSpec],
    tuning: list[RunSpec],
    folder: StudyFolder,
    progress: StudyProgress,
    command: str,
) -> Path:
    """Writes the table of runs, summary and report."""
    folder.reopen()
    results = folder.results([*runs, *tuning])
    notes = notes_on(runs)
    write_runs(results, notes, folder.path)
    return _write_results(spec, results, notes, folder, progress, command)


def _write_results(
    spec: StudySpec,
    results: list[RunResult],
    notes: dict[str, Any],
    folder: StudyFolder,
    progress: StudyProgress,
    command: str,
) -> Path:
    """Writes summary and report from the results of all runs."""
    from .report.report import write_report
    from .report.sentences import limitations

    compared, tuning = ([result for result in results if result.stage == stage] for stage in ("compare", "tune"))
    summary = summarise(spec, compared, tuning, notes, progress, command)
    summary["limitations"] = limitations(results, summary)  # some need more than the table of runs
    open_manifest(folder.path)  # the summary refers to it
    write_summary(folder, summary)
    page = write_report(folder.path, results, summary, progress)
    folder.write_manifest(results)
    return page


def runs_of(spec: StudySpec, folder: StudyFolder) -> tuple[list[RunSpec], list[RunSpec]]:
    """Runs for tuning, as far as they follow from results, and runs of the comparison, once rates are chosen."""
    tuning = sum(tuning_rounds(spec, folder), [])
    if folder.missing(tuning):
        return tuning, []
    return tuning, expand(spec, chosen_rates(spec, folder.results(tuning)))


def no_result(folder: StudyFolder) -> LabError:
    """The error for a study without any result."""
    return LabError(f"There is no result in {str(folder.path)!r} yet. Resume the study with `lrlab study run`.")
