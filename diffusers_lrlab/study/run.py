"""Runs a study from its specification to its report."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.environment import allowed_threads
from ..core.errors import LabError, warn
from ..core.plugins import loaded_plugins, plugin_packages, registered_code_located
from ..core.values import checked
from ..core.words import agreeing, counted
from ..training.prepare import keep_freed_memory
from .analysis.statistics import FEW_SEEDS
from .analysis.tuning import chosen_rates, tuning_rounds
from .context import StudyContext, stops_explained
from .executors import EXECUTORS, assign_executors, check_executor, make_jobs, open_workers
from .results import StudyFolder
from .shown_command import names_in, preset_sum, shown_command, shown_names
from .spec.expansion import expand, expand_tuning
from .spec.reading import load_spec, with_datasets
from .spec.spec import RunSpec, StudySpec
from .stacked.stacks import check_stackable
from .workers import Workers, run_jobs


@checked
@registered_code_located()
def run_study(
    spec: str | Path | dict[str, Any] | StudySpec,
    out: str | Path,
    executor: str | None = None,
    stack_size: int | None = None,
    workers: int | None = None,
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
    names, out = names_in(dataset_name), Path(out).expanduser()
    # Neither other data nor plug-ins change the results of a preset.
    preset = None if names or loaded_plugins() or plugin_packages() else preset_sum(spec)
    if command is None:
        what = spec if isinstance(spec, (str, Path)) else "spec.yaml"  # which `out` will have
        given = {"dataset_name": shown_names(names), "executor": executor, "stack_size": stack_size, "workers": workers}
        command = shown_command("lrlab study run", what, out, given)
    folder, own = StudyFolder(out), out / "spec.yaml"
    if isinstance(spec, (str, Path)) and own.exists() and Path(spec).expanduser().resolve() == own.resolve():
        command = folder.read_spec()[1]  # what says where the study came from, and on which data sets it is
    spec = with_datasets(load_spec(spec), names)
    folder.check_is_study(spec, names)
    check_executor(executor, stack_size, workers)
    use_all_cores()
    return _run(spec, StudyContext(folder, stack_size, executor, quiet), workers, command, preset)


def _run(spec: StudySpec, study: StudyContext, num_workers: int | None, command: str, preset: str | None) -> Path:
    folder, known = study.folder, [*expand_tuning(spec), *expand(spec)]
    for warning in warnings_before(spec, folder.missing(known), study):
        warn(warning)
    if study.executor == "stacked":
        check_stackable(known, study)
    with folder.locked(), stops_explained(folder.path):
        folder.check_is_study(spec)  # again: another command may have used the folder meanwhile
        folder.reopen()
        folder.write_spec(spec, command, preset)
        with open_workers(num_workers, study) as workers:
            tuning = _tune(spec, study, workers)
            runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
            if unknown := folder.unknown_files([*tuning, *runs]):
                where = folder.path / "runs"
                study.progress.log(f"{len(unknown)} results in {where} belong to other studies and are ignored.")
            _do_missing(runs, study, workers, "study")
        # All runs are finished: leftovers here belong to runs of earlier specifications.
        shutil.rmtree(folder.stacks, ignore_errors=True)
        shutil.rmtree(folder.path / "local", ignore_errors=True)
        from .report.report import write_all  # which imports matplotlib

        return write_all(spec, runs, tuning, folder, study.progress, command)


def use_all_cores() -> None:
    """
    Uses all cores, or `OMP_NUM_THREADS`; `accelerate launch` would leave a CPU process one thread.

    Raises a `LabError` in one of several processes.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise LabError(
            "A study runs in one process, with its runs side by side on one device. Start it without --num_processes; "
            "--executor pool uses several GPUs."
        )
    if not torch.accelerator.is_available():
        torch.set_num_threads(allowed_threads())
        keep_freed_memory()


def warnings_before(spec: StudySpec, runs: list[RunSpec], study: StudyContext) -> list[str]:
    """
    Warnings about runs that will show little. Plans each arm on each data set, which raises the errors of their options.
    """
    found = []
    if runs and len(spec.seeds) == 1 and len(spec.arms) > 1:
        found.append(f"One seed gives no intervals and no tests. To compare arms, give {FEW_SEEDS} seeds or more.")
    for run in {(run.arm, run.dataset): run for run in runs}.values():
        plan, _ = study.plan(run)
        found += [f"In the arm {run.arm!r} on {run.dataset!r}: {warning}" for warning in plan.warnings]
    return found


def _tune(spec: StudySpec, study: StudyContext, workers: Workers | None) -> list[RunSpec]:
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
        _do_missing(rounds[-1], study, workers, "tune")
        if left := study.folder.missing(rounds[-1]):
            raise LabError(f"The run {left[0].id} was computed but left no result in {str(study.folder.path)!r}.")


def _do_missing(specs: list[RunSpec], study: StudyContext, workers: Workers | None, description: str) -> None:
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
    shares = assign_executors(specs, study)
    if workers is not None:
        with study.progress.bar(study.folder.missing(specs), description):
            run_jobs(make_jobs(shares, study, workers), workers, study)
        return
    for name, some in shares:
        if left := [spec for spec in some if spec.id in missing]:
            with study.progress.bar(left, description):
                EXECUTORS[name](some, study)
