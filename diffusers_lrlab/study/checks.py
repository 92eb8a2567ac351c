"""What is checked and set up before the runs of a study."""

import os
from collections.abc import Sequence

import torch

from ..core.environment import allowed_threads
from ..core.errors import LabError
from ..training.plan_text import beginning_warning
from ..training.prepare import keep_freed_memory
from .analysis.statistics import FEW_SEEDS
from .runs.context import StudyContext
from .spec.spec import RunSpec, StudySpec


def warnings_before(spec: StudySpec, runs: Sequence[RunSpec], study: StudyContext) -> list[str]:
    """Warnings about runs that will show little; raises a `LabError` for options that cannot work."""
    return [] if not runs else [*_without_tests(spec), *check_plans(runs, study)]


def _without_tests(spec: StudySpec) -> list[str]:
    """A warning if the study compares arms on one seed, which shows no differences however long it runs."""
    if len(spec.seeds) > 1 or len(spec.arms) < 2:
        return []
    return [f"One seed gives no intervals and no tests. To compare arms, give {FEW_SEEDS} seeds or more."]


def check_plans(runs: Sequence[RunSpec], study: StudyContext) -> list[str]:
    """
    Plans each arm on each data set, which raises the errors of their options. Returns warnings about densities of the
    timesteps that are not likely to begin in such short runs.
    """
    found = []
    for run in {(run.arm, run.dataset): run for run in runs}.values():
        plan, _ = study.plan(run)
        if warning := beginning_warning(plan):
            found.append(f"In the arm {run.arm!r} on {run.dataset!r}: {warning}")
    return found


def check_one_process() -> None:
    """Raises a `LabError` in one of several processes."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise LabError(
            "A study runs in one process, with its runs side by side on one device. Start it without --num_processes; "
            "--executor pool uses several GPUs."
        )


def use_all_cores() -> None:
    """Uses all cores, or `OMP_NUM_THREADS`; `accelerate launch` would leave a CPU process one thread."""
    if not torch.accelerator.is_available():
        torch.set_num_threads(allowed_threads())
        keep_freed_memory()
