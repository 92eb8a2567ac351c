"""Workers: processes that each compute one stack or one run at a time, and the distribution of a study's jobs to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate.utils import patch_environment

from ..core.environment import asked_threads, available_cores
from ..core.errors import Interrupted, LabError, is_out_of_memory
from ..core.plugins import load_plugins, registered_code_located
from ..core.program import begin_worker
from ..training.prepare import keep_freed_memory
from .runs.context import StudyContext, stops_explained
from .runs.results import StudyFolder
from .spec.spec import RunSpec

_POLL_SECONDS = 1.0
_RAY_RETRIES = 2  # by Ray, of a task whose worker or node is lost
_RAY_STOP_SECONDS = 60.0  # to save a job
Outcome = Exception | None  # of a job: a `LabError`, a `RuntimeError` with a traceback, or none


@dataclass(frozen=True)
class Setup:
    """Settings of a worker, common to all of its jobs."""

    folder: Path
    plugins: str  # as --import takes them
    num_threads: int = 1


class Job(NamedTuple):
    """A run or a stack for one worker, with a function of `EXECUTORS`."""

    execute: Callable[[list[RunSpec], StudyContext], None]
    specs: list[RunSpec]


def share_cores(num_workers: int | None, cores: int, gpus: int) -> tuple[int, int]:
    """The number of workers (by default one for each GPU, or else for each core), and the threads of each."""
    asked = asked_threads()
    num_workers = num_workers or gpus or max(1, cores // (asked or 1))
    return num_workers, asked or max(1, cores // num_workers)


class Workers(Protocol):
    """Processes that do jobs; `stop` requests that they save what they do and return."""

    num_workers: int
    num_threads: int  # of each

    def submit(self, job: Job) -> Future[Outcome]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


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
                study.progress.finished(spec)
            for error in filter(None, map(_outcome, done)):
                raise error
    except BaseException:
        workers.stop()
        raise


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except Exception as lost:  # of the worker itself
        return _stopped(f"A worker was lost ({type(lost).__name__}: {str(lost).partition(chr(10))[0]})")


def _stopped(what: str) -> LabError:
    return LabError(
        f"{what}. Finished runs are kept. Give the same command again, with fewer --workers or a smaller --stack_size if "
        "memory is short."
    )


class Pool:
    """A `ProcessPoolExecutor`; GPUs are assigned to its processes in turn."""

    def __init__(self, setup: Setup, num_workers: int | None):
        self._gpus = visible_gpus()
        self.num_workers, self.num_threads = share_cores(num_workers, available_cores(), len(self._gpus))
        self._setup = replace(setup, num_threads=self.num_threads)
        self._others = {*multiprocessing.active_children()}
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(self.num_workers, context, _begin_process)
        self._futures: list[Future[Outcome]] = []

    def _processes(self) -> set[Any]:
        return {*multiprocessing.active_children()} - self._others

    def submit(self, job: Job) -> Future[Outcome]:
        environment = {"OMP_NUM_THREADS": str(self.num_threads), "TQDM_DISABLE": "1"}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[len(self._processes()) % len(self._gpus)]
        with patch_environment(**environment):  # of the process that this may start, whose imports read it
            self._futures.append(future := self._executor.submit(do_job, self._setup, job))
        return future

    def stop(self) -> None:
        """Requests that the processes save what they do and return."""
        for future in self._futures:
            future.cancel()  # not `shutdown`, after which [`close`] would no longer wait for the processes
        for process in self._processes():
            process.terminate()

    def close(self) -> None:
        self._executor.shutdown()


def visible_gpus() -> list[str]:
    """GPUs as named by CUDA_VISIBLE_DEVICES, which may also hide all of them (-1)."""
    numbers = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[: len(numbers)] if named else numbers


def _begin_process() -> None:
    begin_worker()
    signal.signal(signal.SIGTERM, stop)  # between jobs, which handle it themselves


class RayWorkers:
    """Tasks on all nodes of the cluster at `RAY_ADDRESS`, of the one this process is connected to, or of this machine."""

    def __init__(self, setup: Setup, num_workers: int | None):
        import ray

        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = f"at RAY_ADDRESS={address}" if (address := os.environ.get("RAY_ADDRESS")) else "on this machine"
                raise LabError(f"Ray cannot be reached {where}: {str(error).partition(chr(10))[0]}") from error
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        self.num_workers, self.num_threads = share_cores(num_workers, int(total.get("CPU", 1)), gpus)
        self._setup = replace(setup, num_threads=self.num_threads)
        # A process serves many jobs, so it loads its data once.
        resources = {"num_cpus": self.num_threads, "num_gpus": min(1.0, gpus / self.num_workers)}
        self._task = ray.remote(**resources, max_retries=_RAY_RETRIES, max_calls=0)(do_job)
        self._tasks: dict[Future[Outcome], Any] = {}

    def submit(self, job: Job) -> Future[Outcome]:
        task = self._task.remote(self._setup, job)
        future: Future[Outcome] = task.future()
        self._tasks[future] = task
        return future

    def stop(self) -> None:
        """Requests that the tasks save what they do and return, and waits for them."""
        import ray

        left = [future for future in self._tasks if not future.done()]
        for future in left:
            ray.cancel(self._tasks[future])  # raises KeyboardInterrupt in the task
        wait(left, _RAY_STOP_SECONDS)

    def close(self) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()


# --- in a worker ---

_studies: dict[Setup, StudyContext] = {}  # data are loaded once for all jobs of this process
_is_stopped = False


def stop(*_: object) -> None:
    """Makes this process return its later jobs undone; a handler of signals."""
    global _is_stopped
    _is_stopped = True


def do_job(setup: Setup, job: Job) -> Outcome:
    """Executes a job in the main thread of this process. Errors are returned, as not all of them can be pickled."""
    if _is_stopped:
        return _stopped("A worker was stopped")
    try:
        with stops_explained(setup.folder), registered_code_located():
            if not (setup.folder / "spec.yaml").is_file():
                raise LabError(f"--out {str(setup.folder)!r}: every node needs this folder. Give one on a shared disk.")
            study = _studies.get(setup) or _begin_study(setup)
            study.stack_size = len(job.specs)
            job.execute(job.specs, study)
    except Interrupted as interruption:
        stop()
        return _stopped(f"A worker got signal {interruption.signal_number}")
    except LabError as error:
        return LabError(str(error))
    except Exception as error:
        if is_out_of_memory(error):
            return _stopped(f"A worker ran out of memory ({str(error).partition(chr(10))[0]})")
        return RuntimeError(f"A worker failed:\n{traceback.format_exc()}")
    return None


def _begin_study(setup: Setup) -> StudyContext:
    os.environ["OMP_NUM_THREADS"] = str(setup.num_threads)  # which single runs read
    load_plugins(setup.plugins)
    study = StudyContext(StudyFolder(setup.folder))  # it logs; the main process has the bars
    if study.device.type == "cpu":
        torch.set_num_threads(setup.num_threads)
        keep_freed_memory()
    _studies[setup] = study
    return study
