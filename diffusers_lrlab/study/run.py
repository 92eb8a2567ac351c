"""A study from its specification to its report."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ..errors import LabError
from ..training.run import keep_freed_memory
from .bench import Bench
from .executors import EXECUTORS, share_out
from .results import RunResult, StudyFolder
from .spec import RunSpec, StudySpec, expand, expand_tuning
from .summary import summarise, write_summary

PRECISIONS = ("fp32", "bf16_products", "tf32_products")


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
    folder.check_is_study()
    check_executor(executor)
    tuning, first = expand_tuning(spec), expand(spec)
    use_all_cores()
    bench = Bench(folder, stack_size, quiet)
    for run in {(run.arm, run.dataset): run for run in [*tuning, *first]}.values():
        bench.plan(run)
    with folder.locked():
        folder.write_spec(spec, command)
        if strangers := folder.strangers([*tuning, *first]) if spec.tune is None else []:
            bench.say(f"{len(strangers)} results in {folder.path / 'runs'} are of other studies, and are left alone.")
        do_missing(tuning, bench, executor, "tune")
        runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
        do_missing(runs, bench, executor, "study")
        results = folder.results(runs)
        summary = summarise(spec, results, folder.results(tuning), folder, command)
        write_summary(folder, summary)

        from .report import write_report

        return write_report(folder.path, results, summary)


def do_missing(specs: list[RunSpec], bench: Bench, executor: str | None, description: str) -> None:
    """Runs that have no result yet."""
    missing = {spec.id for spec in bench.folder.missing(specs)}
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


def chosen_rates(spec: StudySpec, results: list[RunResult]) -> dict[tuple[str, str], float] | None:
    """The learning rate of each arm on each data set, by the mean of the metric; rates at which a run diverged are out."""
    if spec.tune is None:
        return None
    chosen = {}
    for arm in spec.arms:
        for dataset in spec.datasets:
            scores = tuning_scores(spec, results, arm, dataset)
            finite = {rate: score for rate, score in scores.items() if np.isfinite(score)}
            if not finite:
                raise LabError(
                    f"All runs of {arm!r} on {dataset!r} diverged at every learning rate of tune. Give lower ones."
                )
            chosen[arm, dataset] = min(finite, key=finite.__getitem__)
    return chosen


def tuning_scores(spec: StudySpec, results: list[RunResult], arm: str, dataset: str) -> dict[float, float]:
    """From learning rates to the mean of the metric over the seeds for tuning; infinite if one of them diverged."""
    assert spec.tune is not None
    scores = {}
    for rate in spec.tune.learning_rates:
        values = [
            result.results.get(spec.tune.metric)
            for result in results
            if (result.arm, result.dataset, result.learning_rate) == (arm, dataset, rate)
        ]
        scores[rate] = float("inf") if None in values or not values else float(np.mean(np.array(values, float)))
    return scores


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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(cores)
        keep_freed_memory()
