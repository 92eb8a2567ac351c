"""Distributes the jobs of a study to workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from ...core.errors import LabError
from ..runs.context import StudyContext
from ..runs.progress import MEASURED
from ..spec.spec import RunSpec
from ..stacked.stacks import run_stacked, split_into_stacks
from .local import run_local
from .worker import FAILED, REFUSED, STOPPED, Job, Outcome

_POLL_SECONDS = 1.0


class Workers(Protocol):
    """Processes that do jobs; `stop` requests that they save what they do and return."""

    num_workers: int
    num_threads: int  # of each

    def submit(self, job: Job) -> Future[Outcome]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


def make_jobs(shares: list[tuple[str, list[RunSpec]]], study: StudyContext, workers: Workers) -> Iterator[Job]:
    """Jobs for missing runs: at least as many stacks as workers if there are enough runs, and single runs."""
    for name, specs in shares:
        execute, stacks = run_local, [[spec] for spec in specs]
        if name == "stacked":
            size = min(study.stack_size, -(-len(specs) // workers.num_workers))
            execute, stacks = run_stacked, [*split_into_stacks(specs, study, size, workers.num_threads)]
        yield from (Job(execute, stack) for stack in stacks if study.folder.missing(stack))


def run_jobs(jobs: Iterable[Job], workers: Workers, study: StudyContext) -> None:
    """Runs all jobs. Raises the first error, once the workers have been told to save their jobs."""
    jobs = list(jobs)
    runs = study.folder.missing(spec for job in jobs for spec in job.specs)
    left = {workers.submit(job) for job in jobs}
    try:
        while left:
            done, left = wait(left, _POLL_SECONDS, FIRST_COMPLETED)
            for spec in [spec for spec in runs if study.folder.run_file(spec.id).exists()]:
                runs.remove(spec)
                study.progress.advance(spec.config.max_train_steps or 0)
                study.progress.advance(1, MEASURED)
                study.progress.finished(spec)
            for future in done:
                _check(future)
    except BaseException:
        workers.stop()
        raise


def _check(future: Future[Outcome]) -> None:
    """Raises the error of a job, if it has one."""
    try:
        ended, text = future.result()
    except Exception as lost:  # of the worker itself
        ended, text = STOPPED, f"A worker was lost ({type(lost).__name__}: {str(lost).partition(chr(10))[0]})"
    if ended == STOPPED:
        raise LabError(
            f"{text}. Finished runs are kept. Give the same command again, with fewer --workers or a smaller --stack_size "
            "if memory is short."
        )
    if ended == REFUSED:
        raise LabError(text)
    if ended == FAILED:
        raise RuntimeError(f"A worker failed:\n{text}")
