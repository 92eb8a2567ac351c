"""Runs a study from its specification to its report."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, warn
from ..core.manifest import damage_named, open_manifest, refuse_damaged
from ..core.plugins import loaded_plugins, names_code, plugin_packages
from ..core.registered import registered_code_located
from ..core.signatures import checked
from ..core.words import agreeing, counted
from ..data.options import EMBEDDED_DATASETS
from .analysis.runs_table import RUNS_TABLE, read_runs, write_runs
from .analysis.summary import notes_on, summarise, write_summary
from .analysis.tuning import chosen_rates, tuning_rounds
from .checks import check_one_process, use_all_cores, warnings_before
from .executors import EXECUTORS, assign_executors, check_executor, open_workers
from .executors.jobs import Workers, make_jobs, run_jobs
from .reading import no_result, runs_of
from .runs.context import StudyContext
from .runs.precision import products_in
from .runs.progress import StudyProgress
from .runs.results import RunResult, StudyFolder
from .runs.stops import stops_explained
from .same_command import names_in, shown_command, shown_names, source_sum
from .spec.expansion import expand, expand_tuning
from .spec.other_data import with_datasets
from .spec.reading import load_spec, spec_from_dict
from .spec.spec import RunSpec, StudySpec
from .stacked.stacks import check_stackable

if TYPE_CHECKING:
    from .report.plots import Figures


@checked
@registered_code_located()
def run_study(
    spec: str | Path | dict[str, Any] | StudySpec,
    out: str | Path,
    executor: str | None = None,
    stack_size: int | None = None,
    workers: int | None = None,
    address: str | None = None,
    precision: str | None = None,
    quiet: bool = False,
    command: str | None = None,
    dataset_name: str | Sequence[str] | None = None,
) -> Path:
    """
    Computes the missing runs of a study, and writes its summary and report. Results in `out` are kept.

    ```python
    run_study({"base": {"max_train_steps": 300}, "arms": {"constant": {}, "rex": {"lr_scheduler": "rex"}},
               "datasets": ["dino"]}, "my-study")
    read_study("my-study")
    ```

    Args:
        spec (`str`, `Path`, `dict` or `StudySpec`): The name of a preset, a YAML file, or the keys of one; paths in a `dict`
            start from the current folder.
        out (`str` or `Path`): The folder of the study.
        executor (`str`, *optional*): stacked, local, pool or ray, for all runs; by default, runs are stacked if possible.
        stack_size (`int`, *optional*): Most runs that are computed side by side.
        workers (`int`, *optional*): Number of workers of pool and ray.
        address (`str`, *optional*): Address of the Ray cluster.
        precision (`str`, *optional*): As `--precision`; that of the study by default.
        quiet (`bool`): Shows no progress.
        command (`str`, *optional*): Command shown in the report; `lrlab study run` with these arguments by default.
        dataset_name (`str` or list of `str`, *optional*): Data sets in place of those of `spec`: embedded ones, local
            folders or Hub ids.

    Returns:
        The path of the report's page.

    Raises:
        LabError: for an impossible request, before anything runs if it can be detected.
        Interrupted: after SIGINT or SIGTERM, with everything saved.
    """
    names = names_in(dataset_name)
    if command is None:
        what = spec if isinstance(spec, (str, Path)) else "spec.yaml"  # which `out` will have
        given = {"dataset_name": shown_names(names), "executor": executor, "stack_size": stack_size, "workers": workers}
        command = shown_command("lrlab study run", what, out, given | {"precision": precision})
    source = source_sum(spec) if isinstance(spec, (str, Path)) else None
    out = Path(out).expanduser()
    folder, own = StudyFolder(out), out / "spec.yaml"
    if isinstance(spec, (str, Path)) and own.exists() and Path(spec).expanduser().resolve() == own.resolve():
        command = folder.read_spec()[1]  # what says where the study came from, and on which data sets it is
    spec = with_datasets(load_spec(spec), names)
    folder.check_same_datasets(spec, names)
    if precision is not None:
        spec = dataclasses.replace(spec, precision=precision)
    return _run(spec, folder, executor, stack_size, workers, address, quiet, command, source)


def _run(
    spec: StudySpec,
    folder: StudyFolder,
    executor: str | None,
    stack_size: int | None,
    num_workers: int | None,
    address: str | None,
    quiet: bool,
    command: str,
    source: str | None,
) -> Path:
    folder.check_is_study(spec.name, (run for part in (expand_tuning, expand) for run in part(spec)))  # lazily
    check_executor(executor, stack_size, num_workers, address)
    check_one_process()
    tuning, first = expand_tuning(spec), expand(spec)
    use_all_cores()
    study = StudyContext(folder, stack_size, quiet, spec.precision)
    for warning in warnings_before(spec, folder.missing([*tuning, *first]), study):
        warn(warning)
    if executor == "stacked":
        check_stackable([*tuning, *first], study)
    with folder.locked(), stops_explained(folder.path), products_in(spec.precision, study.device):
        folder.check_is_study(spec.name, [*tuning, *first])  # again: another command may have used the folder meanwhile
        folder.reopen()
        folder.write_spec(spec, command, source if _depend_on_text_alone([*tuning, *first]) else None)
        with open_workers(executor, num_workers, address, study) as workers:
            tuning = _tune(spec, study, executor, workers)
            runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
            if unknown := folder.unknown_files([*tuning, *runs]):
                where = folder.path / "runs"
                study.progress.log(f"{len(unknown)} results in {where} belong to other studies and are ignored.")
            _do_missing(runs, study, executor, workers, "study")
        # All runs are finished: leftovers here belong to runs of earlier specifications.
        shutil.rmtree(folder.stacks, ignore_errors=True)
        shutil.rmtree(folder.path / "local", ignore_errors=True)
        return _write_all(spec, runs, tuning, study, command)


def _depend_on_text_alone(runs: list[RunSpec]) -> bool:
    """Whether the results depend on the text of the specification only, not on other files, data or plug-ins."""
    fields = (run.config.dataset_name in EMBEDDED_DATASETS and run.config.plugins is None for run in runs)
    return (
        not (loaded_plugins() or plugin_packages()) and all(fields) and all({*run.given} <= {"dataset_name"} for run in runs)
    )


def report_study(out: Path, figures: "Figures | None" = None) -> Path:
    """
    Rewrites summary and report of a study from the results in its folder; raises a `LabError` if there are none.

    The folder may be a card, which has `runs.parquet` in place of the results. `figures` also saves the plots for a paper.
    """
    if figures is not None:
        from .report.plots import check_figures

        check_figures(figures)
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
        parts = ("runs/", "weights/") if (out / "weights").is_dir() else ("runs/",)
        refuse_damaged(out, again, only=lambda name: name.startswith(parts))
    if is_card and (out / RUNS_TABLE).exists():
        with folder.locked(), damage_named(out):
            results, notes = read_runs(out)
            return _write_results(spec, results, notes, folder, StudyProgress(), command, figures)
    if is_card and (out / "summary.json").exists():
        raise LabError(
            f"{str(out)!r} is a card without {RUNS_TABLE}, so its tables cannot be rewritten. Give the folder of the "
            "study, or write the card again: lrlab study card STUDY --out CARD"
        )
    study = StudyContext(folder)  # in any precision
    with names_code(code):
        tuning, runs = runs_of(spec, folder)
    folder.check_results([*tuning, *runs])
    if not runs:
        raise LabError(f"The learning rates of {str(out)!r} are not chosen yet. Resume the study with `lrlab study run`.")
    if not folder.results(runs):
        raise no_result(folder)
    with folder.locked():
        return _write_all(spec, runs, tuning, study, command, figures)


def _write_all(
    spec: StudySpec,
    runs: list[RunSpec],
    tuning: list[RunSpec],
    study: StudyContext,
    command: str,
    figures: "Figures | None" = None,
) -> Path:
    """Writes the table of runs, summary and report."""
    study.folder.reopen()
    results = study.folder.results([*runs, *tuning])
    notes = notes_on(runs)
    write_runs(results, notes, study.folder.path)
    return _write_results(spec, results, notes, study.folder, study.progress, command, figures)


def _write_results(
    spec: StudySpec,
    results: list[RunResult],
    notes: dict[str, Any],
    folder: StudyFolder,
    progress: StudyProgress,
    command: str,
    figures: "Figures | None",
) -> Path:
    """Writes summary and report from the results of all runs."""
    from .report.limitations import limitations
    from .report.report import write_report

    compared, tuning = ([result for result in results if result.stage == stage] for stage in ("compare", "tune"))
    summary = summarise(spec, compared, tuning, notes, progress, command)
    summary["limitations"] = limitations(results, summary)  # some need more than the table of runs
    open_manifest(folder.path)  # the summary refers to it
    write_summary(folder, summary)
    page = write_report(folder.path, results, summary, progress, figures)
    folder.write_manifest(results)
    return page


def _tune(spec: StudySpec, study: StudyContext, executor: str | None, workers: Workers | None) -> list[RunSpec]:
    """Computes the missing runs for tuning, round by round; returns all of them."""
    while True:
        for runs in tuning_rounds(spec, study.folder):
            study.drop_outdated(runs)  # which may change later rounds
        rounds = tuning_rounds(spec, study.folder)
        tuning = sum(rounds, [])
        if not study.folder.missing(tuning):
            return tuning
        if len(rounds) > 1:
            at_edge = {f"{run.arm} on {run.dataset}": None for run in rounds[-1]}
            study.progress.log(
                f"The best learning rate is at the edge of those tried ({', '.join(at_edge)}): "
                f"{counted(len(rounds[-1]), 'run')} beyond it."
            )
        _do_missing(rounds[-1], study, executor, workers, "tune")
        if left := study.folder.missing(rounds[-1]):
            raise LabError(f"The run {left[0].id} was computed but left no result in {str(study.folder.path)!r}.")


def _do_missing(
    specs: list[RunSpec], study: StudyContext, executor: str | None, workers: Workers | None, description: str
) -> None:
    """Computes the missing runs."""
    study.drop_outdated(specs)
    missing = {spec.id for spec in study.folder.missing(specs)}
    if damaged := sorted(study.folder.damaged & missing):
        study.progress.log(f"These results are damaged and are computed again: {', '.join(damaged)}.")
    if not missing:
        return
    if len(missing) < len(specs):
        done = len(specs) - len(missing)
        study.progress.log(f"{done} of {counted(len(specs), 'run')} {agreeing(done, 'is', 'are')} already finished.")
    shares = assign_executors(specs, study, executor)
    if workers is not None:
        with study.progress.bar(study.folder.missing(specs), description):
            run_jobs(make_jobs(shares, study, workers), workers, study)
        return
    for name, some in shares:
        if left := [spec for spec in some if spec.id in missing]:
            with study.progress.bar(left, description):
                EXECUTORS[name](some, study)
