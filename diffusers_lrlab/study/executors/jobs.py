"""Distributes jobs to workers; lost jobs are retried, and results are written by this process only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core.errors import LabError, is_out_of_memory
from ...core.words import counted, times
from ..runs.context import StudyContext
from ..runs.progress import MEASURED, UPDATES
from ..spec.spec import RunSpec
from ..stacked.stacks import run_stacked, split_into_stacks
from .local import run_local
from .worker import FAILED, LOST, NO_MEMORY, REFUSED, Job, Outcome

_MOST_TRIES = 3
_STALL_SECONDS = 600.0  # without CPU time: the worker hangs
_START_SECONDS = 120.0  # extra, to start a process
_STOP_SECONDS = 60.0  # to save a job
_POLL_SECONDS = 0.2


class Worker(Protocol):
    """Does one job at a time. `stop` requests that it saves the job and returns; `kill` ends it at once."""

    def submit(self, job: Job) -> Future[Outcome]: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


class Workers(Protocol):
    """All workers and their messages: the number of a job, and the arguments of a `Report`."""

    workers: list[Any]  # each a `Worker`
    begin_at_once: bool  # without waiting for resources
    num_threads: int  # of each

    def messages(self) -> Iterator[tuple[int | None, str, Any]]: ...
    def close(self) -> None: ...


@dataclass
class _RunningJob:
    job: Job
    future: Future[Outcome]
    last_sign: float | None  # `None` before the start, if that may wait for resources
    shown: dict[str, float] = field(default_factory=lambda: dict.fromkeys((UPDATES, MEASURED), 0.0))
    hung: bool = False


def make_jobs(shares: list[tuple[str, list[RunSpec]]], study: StudyContext, pool: Workers) -> Iterator[Job]:
    """Jobs for missing runs: at least as many stacks as workers if there are enough runs, and single runs."""
    for name, specs in shares:
        execute, stacks = run_local, [[spec] for spec in specs]
        if name == "stacked":
            size = min(study.stack_size, -(-len(specs) // len(pool.workers)))
            execute, stacks = run_stacked, [*split_into_stacks(specs, study, size, pool.num_threads)]
        yield from (Job(execute, stack) for stack in stacks if study.folder.missing(stack))


def run_jobs(jobs: Iterator[Job], pool: Workers, study: StudyContext) -> None:
    """Runs all jobs. Re-raises unrecoverable errors once the other workers have saved their jobs."""
    waiting, busy = deque(jobs), dict[Worker, _RunningJob]()
    logged: set[str] = set()
    try:
        while waiting or busy:
            for worker in pool.workers:
                if waiting and worker not in busy:
                    job = waiting.popleft()
                    job.done = {spec.id for spec in job.specs} - {spec.id for spec in study.folder.missing(job.specs)}
                    starts = time.monotonic() + _START_SECONDS if pool.begin_at_once else None
                    busy[worker] = _RunningJob(job, worker.submit(job), starts)
            wait([running_job.future for running_job in busy.values()], _POLL_SECONDS, FIRST_COMPLETED)
            _listen(pool, busy, logged, study)
            for worker, running_job in [*busy.items()]:
                if running_job.future.done():
                    del busy[worker]
                    waiting.extendleft(reversed(_after(running_job, study)))
                elif running_job.last_sign is not None and time.monotonic() - running_job.last_sign > _STALL_SECONDS:
                    running_job.hung = True
                    worker.kill()
    except BaseException:
        for worker in busy:
            worker.stop()
        wait([running_job.future for running_job in busy.values()], _STOP_SECONDS)
        for running_job in busy.values():
            if running_job.future.done() and running_job.future.exception() is None:
                _keep(running_job, running_job.future.result(), study)
        raise


def _listen(pool: Workers, busy: dict[Worker, _RunningJob], logged: set[str], study: StudyContext) -> None:
    running: dict[int | None, _RunningJob] = {running_job.job.number: running_job for running_job in busy.values()}
    for number, about, value in pool.messages():
        if about == "log" and value not in logged:  # all workers print the same warnings
            logged.add(value)
            study.progress.log(value)
        if running_job := running.get(number):
            running_job.last_sign = time.monotonic()
            if about in running_job.shown:
                study.progress.advance(value - running_job.shown[about], about)
                running_job.shown[about] = value


def _keep(running_job: _RunningJob, outcome: Outcome, study: StudyContext) -> None:
    for result in outcome.results:
        study.keep(*result)
    study.discard(*outcome.discarded)


def _after(running_job: _RunningJob, study: StudyContext) -> list[Job]:
    """Keeps the results of a job; returns jobs for the missing ones, in halves if a stack needed too much memory."""
    job = running_job.job
    try:
        outcome = running_job.future.result()
    except Exception as lost:  # of the worker itself; errors of a job are in its outcome
        ended = NO_MEMORY if is_out_of_memory(lost) or "OutOfMemory" in type(lost).__name__ else LOST
        outcome = Outcome([], ended, f"{type(lost).__name__}: {str(lost).partition(chr(10))[0]}")
    _keep(running_job, outcome, study)
    left = study.folder.missing(job.specs)
    # Progress since the last checkpoint is lost.
    for counter, shown in running_job.shown.items():
        study.progress.advance((0 if left else outcome.counts.get(counter, 0.0)) - shown, counter)
    if not left:
        return []
    names = ", ".join(spec.id for spec in job.specs)
    if outcome.ended == REFUSED:
        raise LabError(outcome.text)
    if outcome.ended == FAILED:
        raise RuntimeError(f"A worker failed at {names}:\n{outcome.text}")
    job.tries += 1
    why = "hung" if running_job.hung else "ran out of memory" if outcome.ended == NO_MEMORY else "lost its worker"
    run = f"The run {names}"
    what = f"A stack of {counted(len(job.specs), 'run')}" if len(job.specs) > 1 else run
    # A lost worker may have been killed by the kernel for its memory.
    if len(left) > 1 and not running_job.hung and (outcome.ended == NO_MEMORY or job.tries > 1):
        half = -(-len(left) // 2)
        study.progress.log(f"{what} {why} ({outcome.text}) and is split in two.")
        return [Job(job.execute, some, tries=1) for some in (left[:half], left[half:])]
    if job.tries >= _MOST_TRIES:
        raise LabError(
            f"{run} {why} {times(job.tries)} ({outcome.text}). Finished runs are kept. Give the same command again, with "
            "fewer --workers if memory is short."
        )
    study.progress.log(f"{what} {why} ({outcome.text}) and is retried.")
    return [job]
