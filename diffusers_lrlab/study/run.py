"""A study from its specification to its report."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ..core.environment import available_cores
from ..core.errors import LabError
from ..training.prepare import keep_freed_memory
from .analysis.summary import chosen_rates, summarise, write_summary
from .executors.executors import EXECUTORS, check_stackable, share_out, stops_explained
from .runs.precision import products_in
from .runs.results import StudyFolder
from .runs.study_data import Bench
from .spec.expansion import expand, expand_tuning
from .spec.reading import spec_from_dict
from .spec.spec import RunSpec, StudySpec


def run_study(
    spec: StudySpec,
    out: Path,
    executor: str | None = None,
    stack_size: int | None = None,
    command: str = "",
    quiet: bool = False,
) -> Path:
    """
    Does what is left to do of a study, and writes its summary and report.

    Args:
        spec ([`StudySpec`]): The study.
        out (`Path`): Its folder. Results that are there are kept.
        executor (`str`, *optional*): "stacked" or "local" for all runs; stacks of what can be stacked if not given.
        stack_size (`int`, *optional*): Runs side by side at most.
        command (`str`, *optional*): For the report.
        quiet (`bool`, *optional*): No progress.

    Returns:
        `Path`: of the report.

    Raises:
        LabError: if something cannot be done as asked; before anything runs where that can be known.
        Interrupted: after SIGINT or SIGTERM, with everything saved.
    """
    folder = StudyFolder(out)
    folder.check_is_study(spec.name)
    check_executor(executor)
    tuning, first = expand_tuning(spec), expand(spec)
    use_all_cores()
    bench = Bench(folder, stack_size, quiet, spec.precision)
    for run in {(run.arm, run.dataset): run for run in [*tuning, *first]}.values():
        bench.plan(run)
    if executor == "stacked":
        check_stackable([*tuning, *first], bench)
    with folder.locked(), stops_explained(folder.path), products_in(spec.precision, bench.device):
        folder.write_spec(spec, command)
        do_missing(tuning, bench, executor, "tune")
        runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
        if strangers := folder.strangers([*tuning, *runs]):
            bench.say(f"{len(strangers)} results in {folder.path / 'runs'} are of other studies, and are left alone.")
        do_missing(runs, bench, executor, "study")
        # Every run has its result: what is left here is of runs that were changed in between.
        shutil.rmtree(bench.stacks, ignore_errors=True)
        shutil.rmtree(folder.path / "local", ignore_errors=True)
        return tell(spec, runs, tuning, bench, command)


def tell(spec: StudySpec, runs: list[RunSpec], tuning: list[RunSpec], bench: Bench, command: str) -> Path:
    """Writes summary and report of the results that are there."""
    from .report.report import write_report

    folder = bench.folder
    results, of_tuning = folder.results(runs), folder.results(tuning)
    summary = summarise(spec, runs, results, of_tuning, bench, command)
    write_summary(folder, summary)
    return write_report(folder.path, [*results, *of_tuning], summary)


def report_study(out: Path) -> Path:
    """
    Writes summary and report of a study anew, from the results in its folder.

    Raises:
        LabError: if there is no study, or no result yet.
    """
    folder = StudyFolder(out)
    kept, command = folder.read_spec()
    spec = spec_from_dict(kept, folder.path)
    bench = Bench(folder)  # whatever the runs were computed in
    tuning = expand_tuning(spec)
    if spec.tune is not None and folder.missing(tuning):
        raise LabError(f"The learning rates of {str(out)!r} are not chosen yet. Go on with it by `lrlab study run`.")
    runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
    if not folder.results(runs):
        raise LabError(f"There is no result in {str(out)!r} yet. Go on with the study by `lrlab study run`.")
    with folder.locked():
        return tell(spec, runs, tuning, bench, command)


def do_missing(specs: list[RunSpec], bench: Bench, executor: str | None, description: str) -> None:
    """Runs that have no result yet."""
    bench.drop_outdated(specs)
    missing = {spec.id for spec in bench.folder.missing(specs)}
    if bench.folder.damaged & missing:
        bench.say(f"These results were damaged and are done again: {', '.join(sorted(bench.folder.damaged & missing))}.")
    if not missing:
        return
    if len(missing) < len(specs):
        bench.say(f"{len(specs) - len(missing)} of {len(specs)} runs are done already.")
    for name, some in share_out(specs, bench, executor):
        left = [spec for spec in some if spec.id in missing]
        if left:
            bench.start(left, description)
            try:
                # Stacks are cut from all runs, so that they are the same whatever is done already.
                EXECUTORS[name](some if name == "stacked" else left, bench)
            finally:
                bench.stop()


def check_executor(executor: str | None) -> None:
    """Raises a `LabError` for an executor that there is not, and in one of several processes."""
    if executor is not None and executor not in EXECUTORS:
        raise LabError(f"There is no executor {executor!r}. Known: {', '.join(EXECUTORS)}.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise LabError(
            "A study runs in one process, and puts its runs side by side on one device. Start it without --num_processes."
        )


def use_all_cores() -> None:
    """`accelerate launch` leaves a CPU process one thread."""
    if not torch.accelerator.is_available():
        torch.set_num_threads(available_cores())
        keep_freed_memory()
