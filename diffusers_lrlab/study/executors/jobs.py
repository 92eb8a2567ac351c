"""Jobs shared out to workers, wherever these are: what is lost is tried again, and each result is written once, here."""

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
_SILENT_SECONDS = 600.0  # without any computing: it hangs
_START_SECONDS = 120.0  # more than that, to start a process
_STOP_SECONDS = 60.0  # to save what was begun
_POLL_SECONDS = 0.2


class Worker(Protocol):
    """Does one job at a time. `stop` asks it to save the job and return, `kill` does not ask."""

    def submit(self, job: Job) -> Future[Outcome]: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


class Workers(Protocol):
    """All of them, and what they report: the number of a job, and what a `Report` takes."""

    workers: list[Any]  # each a `Worker`
    begin_at_once: bool  # and do not wait for resources
    num_threads: int  # of each

    def messages(self) -> Iterator[tuple[int | None, str, Any]]: ...
    def close(self) -> None: ...


@dataclass
class _RunningJob:
    job: Job
    future: Future[Outcome]
    last_sign: float | None  # none before it has begun, where nobody knows when that will be
    shown: dict[str, float] = field(default_factory=lambda: dict.fromkeys((UPDATES, MEASURED), 0.0))
    hung: bool = False


def make_jobs(shares: list[tuple[str, list[RunSpec]]], study: StudyContext, pool: Workers) -> Iterator[Job]:
    """Stacks, as many as workers if there are runs enough, and runs by themselves; what is done already is left out."""
    for name, specs in shares:
        execute, stacks = run_local, [[spec] for spec in specs]
        if name == "stacked":
            size = min(study.stack_size, -(-len(specs) // len(pool.workers)))
            execute, stacks = run_stacked, [*split_into_stacks(specs, study, size, pool.num_threads)]
        yield from (Job(execute, stack) for stack in stacks if study.folder.missing(stack))


def run_jobs(jobs: Iterator[Job], pool: Workers, study: StudyContext) -> None:
    """Has all jobs done. Raises what a worker cannot mend, after the others have saved what they do."""
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
            wait([turn.future for turn in busy.values()], _POLL_SECONDS, FIRST_COMPLETED)
            _listen(pool, busy, logged, study)
            for worker, turn in [*busy.items()]:
                if turn.future.done():
                    del busy[worker]
                    waiting.extendleft(reversed(_after(turn, study)))
                elif turn.last_sign is not None and time.monotonic() - turn.last_sign > _SILENT_SECONDS:
                    turn.hung = True
                    worker.kill()
    except BaseException:
        for worker in busy:
            worker.stop()
        wait([turn.future for turn in busy.values()], _STOP_SECONDS)
        for turn in busy.values():
            if turn.future.done() and turn.future.exception() is None:
                _keep(turn, turn.future.result(), study)
        raise


def _listen(pool: Workers, busy: dict[Worker, _RunningJob], logged: set[str], study: StudyContext) -> None:
    turns: dict[int | None, _RunningJob] = {turn.job.number: turn for turn in busy.values()}
    for number, about, value in pool.messages():
        if about == "log" and value not in logged:  # workers warn of the same things
            logged.add(value)
            study.progress.log(value)
        if turn := turns.get(number):
            turn.last_sign = time.monotonic()
            if about in turn.shown:
                study.progress.advance(value - turn.shown[about], about)
                turn.shown[about] = value


def _keep(turn: _RunningJob, outcome: Outcome, study: StudyContext) -> None:
    for result in outcome.results:
        study.keep(*result)
    study.discard(*outcome.discarded)


def _after(turn: _RunningJob, study: StudyContext) -> list[Job]:
    """Keeps what came out of a job; returns what is to be done again, in halves if the memory was too small for a stack."""
    job = turn.job
    try:
        outcome = turn.future.result()
    except Exception as lost:  # workers return their own errors
        ended = NO_MEMORY if is_out_of_memory(lost) or "OutOfMemory" in type(lost).__name__ else LOST
        outcome = Outcome([], ended, f"{type(lost).__name__}: {str(lost).partition(chr(10))[0]}")
    _keep(turn, outcome, study)
    left = study.folder.missing(job.specs)
    # What is lost is done again, from what was saved.
    for counter, shown in turn.shown.items():
        study.progress.advance((0 if left else outcome.counts.get(counter, 0.0)) - shown, counter)
    if not left:
        return []
    names = ", ".join(spec.id for spec in job.specs)
    if outcome.ended == REFUSED:
        raise LabError(outcome.text)
    if outcome.ended == FAILED:
        raise RuntimeError(f"A worker failed at {names}:\n{outcome.text}")
    job.tries += 1
    why = "hung" if turn.hung else "ran out of memory" if outcome.ended == NO_MEMORY else "lost its worker"
    run = f"The run {names}"
    what = f"A stack of {counted(len(job.specs), 'run')}" if len(job.specs) > 1 else run
    # The kernel kills what takes too much memory: that, too, is a lost worker.
    if len(left) > 1 and not turn.hung and (outcome.ended == NO_MEMORY or job.tries > 1):
        half = -(-len(left) // 2)
        study.progress.log(f"{what} {why} ({outcome.text}), and goes on as two halves.")
        return [Job(job.execute, some, tries=1) for some in (left[:half], left[half:])]
    if job.tries >= _MOST_TRIES:
        raise LabError(
            f"{run} {why} {times(job.tries)} ({outcome.text}). Everything else that was done is kept. Give the same "
            "command again, with fewer --workers if memory is short."
        )
    study.progress.log(f"{what} {why} ({outcome.text}), and is tried again.")
    return [job]
