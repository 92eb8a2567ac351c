"""A study from its specification to its report."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..core.environment import allowed_threads
from ..core.errors import LabError
from ..core.held import refuse_damaged
from ..core.manifest import open_manifest
from ..core.registered import registered_code_located
from ..core.words import agreeing, counted
from ..training.prepare import keep_freed_memory
from .analysis.runs_table import RUNS_TABLE, read_runs, write_runs
from .analysis.summary import notes_on, summarise, write_summary
from .analysis.tuning import chosen_rates, tuning_rounds
from .executors import EXECUTORS, check_executor, open_workers, share_out
from .executors.jobs import Workers, make_jobs, run_jobs
from .runs.context import StudyContext
from .runs.precision import products_in
from .runs.progress import StudyProgress
from .runs.results import RunResult, StudyFolder
from .runs.stops import stops_explained
from .spec.expansion import expand, expand_tuning
from .spec.reading import spec_from_dict
from .spec.spec import RunSpec, StudySpec
from .stacked.stacks import check_stackable


@registered_code_located()
def run_study(
    spec: StudySpec,
    out: Path,
    executor: str | None = None,
    stack_size: int | None = None,
    command: str = "",
    quiet: bool = False,
    num_workers: int | None = None,
    address: str | None = None,
) -> Path:
    """
    Runs what a study still lacks, and writes its summary and report, whose path it returns. Results in `out` are kept.

    `executor` is a name in `EXECUTORS` or `WORKERS`, for all runs; by default, what can be stacked is stacked. `stack_size`
    is how many runs are side by side at most. `command` is shown in the report. `num_workers` is for `pool` and `ray`,
    whose cluster is at `address`, or on this machine alone. Raises a `LabError` if something cannot be done as
    asked, before anything runs where that can be known, and `Interrupted` after SIGINT or SIGTERM, with everything saved.
    """
    folder = StudyFolder(out)
    folder.check_is_study(spec.name, (run for part in (expand_tuning, expand) for run in part(spec)))  # made if need be
    check_executor(executor, num_workers, address)
    check_one_process()
    tuning, first = expand_tuning(spec), expand(spec)
    use_all_cores()
    study = StudyContext(folder, stack_size, quiet, spec.precision)
    for run in {(run.arm, run.dataset): run for run in [*tuning, *first]}.values():
        study.plan(run)
    if executor == "stacked":
        check_stackable([*tuning, *first], study)
    with folder.locked(), stops_explained(folder.path), products_in(spec.precision, study.device):
        folder.reopen()
        folder.write_spec(spec, command)
        with open_workers(executor, num_workers, address, study) as workers:
            tuning = _tune(spec, study, executor, workers)
            runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
            if unknown := folder.unknown_files([*tuning, *runs]):
                where = folder.path / "runs"
                study.progress.log(f"{len(unknown)} results in {where} are of other studies, and are left alone.")
            _do_missing(runs, study, executor, workers, "study")
        # Every run has its result: what is left here belongs to runs that were changed in between.
        shutil.rmtree(folder.stacks, ignore_errors=True)
        shutil.rmtree(folder.path / "local", ignore_errors=True)
        return _write_all(spec, runs, tuning, study, command)


def report_study(out: Path) -> Path:
    """
    Writes summary and report of a study anew, from the results in its folder; raises a `LabError` if there are none.

    The folder may be a card, which has `runs.parquet` in place of the results.
    """
    folder = StudyFolder(out)
    saved, command = folder.read_spec()
    spec, is_card = spec_from_dict(saved, folder.path), not (out / "runs").exists()
    if is_card:
        refuse_damaged(out, "study", "download the card again.")
    else:
        again = "give the command of the study again, which repeats what is damaged."
        refuse_damaged(out, "study", again, only=lambda name: name.startswith("runs/"))
    if is_card and (out / RUNS_TABLE).exists():
        results, notes = read_runs(out)
        with folder.locked():
            return _write_results(spec, results, notes, folder, StudyProgress(), command)
    study = StudyContext(folder)  # whatever the runs were computed in
    tuning = sum(tuning_rounds(spec, folder), [])
    folder.check_results(tuning)
    if folder.missing(tuning):
        raise LabError(f"The learning rates of {str(out)!r} are not chosen yet. Go on with it by `lrlab study run`.")
    runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
    folder.check_results(runs)
    if not folder.results(runs):
        raise LabError(f"There is no result in {str(out)!r} yet. Go on with the study by `lrlab study run`.")
    with folder.locked():
        return _write_all(spec, runs, tuning, study, command)


def _write_all(spec: StudySpec, runs: list[RunSpec], tuning: list[RunSpec], study: StudyContext, command: str) -> Path:
    """Table of runs, summary and report."""
    results = study.folder.results([*runs, *tuning])
    notes = notes_on(runs, [result for result in results if result.stage == "compare"], study)
    write_runs(results, notes, study.folder.path)
    return _write_results(spec, results, notes, study.folder, study.progress, command)


def _write_results(
    spec: StudySpec,
    results: list[RunResult],
    notes: dict[str, Any],
    folder: StudyFolder,
    progress: StudyProgress,
    command: str,
) -> Path:
    """Summary and report, from the results of all runs."""
    from .report.report import write_report

    compared, tuning = ([result for result in results if result.stage == stage] for stage in ("compare", "tune"))
    summary = summarise(spec, compared, tuning, notes, progress, command)
    open_manifest(folder.path)  # a summary says that there is one
    write_summary(folder, summary)
    page = write_report(folder.path, results, summary, progress)
    folder.write_manifest(results)
    return page


def _tune(spec: StudySpec, study: StudyContext, executor: str | None, workers: Workers | None) -> list[RunSpec]:
    """Computes the runs for tuning that have no result yet, round by round; returns all of them."""
    while True:
        for runs in tuning_rounds(spec, study.folder):
            study.drop_outdated(runs)  # which may change what follows from them
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


def _do_missing(
    specs: list[RunSpec], study: StudyContext, executor: str | None, workers: Workers | None, description: str
) -> None:
    """Computes the runs that have no result yet."""
    study.drop_outdated(specs)
    missing = {spec.id for spec in study.folder.missing(specs)}
    if damaged := sorted(study.folder.damaged & missing):
        study.progress.log(f"These results were damaged and are done again: {', '.join(damaged)}.")
    if not missing:
        return
    if len(missing) < len(specs):
        done = len(specs) - len(missing)
        study.progress.log(f"{done} of {counted(len(specs), 'run')} {agreeing(done, 'is', 'are')} done already.")
    shares = share_out(specs, study, executor)
    if workers is not None:
        with study.progress.bar(study.folder.missing(specs), description):
            run_jobs(make_jobs(shares, study, workers), workers, study)
        return
    for name, some in shares:
        if left := [spec for spec in some if spec.id in missing]:
            with study.progress.bar(left, description):
                EXECUTORS[name](some, study)


def check_one_process() -> None:
    """Raises a `LabError` in one of several processes."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise LabError(
            "A study runs in one process, and puts its runs side by side on one device. Start it without --num_processes; "
            "--executor pool takes several GPUs."
        )


def use_all_cores() -> None:
    """All cores, though `accelerate launch` leaves a CPU process one thread, or as many threads as `OMP_NUM_THREADS`."""
    if not torch.accelerator.is_available():
        torch.set_num_threads(allowed_threads())
        keep_freed_memory()
