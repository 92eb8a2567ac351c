"""Workers as processes of this machine, one for each GPU or group of processor cores."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from accelerate.utils import patch_environment

from ...core import worker_process
from ...core.environment import available_cores
from .worker import Job, Outcome, Setup, do_job, share_cores


class PoolWorker:
    """A process that starts with its first job, and again after it died. It has its own executor, which breaks with it."""

    def __init__(self, setup: Setup, environment: dict[str, str], log: IO[str]):
        self._setup, self._environment, self._log = setup, environment, log
        self._process: Any = None

    def submit(self, job: Job) -> Future[Outcome]:
        try:
            if self._process is None:
                self._start()
            return self._executor.submit(_do_job, self._setup, job)
        except BrokenExecutor:  # the process died; `is_alive` is unreliable while its executor joins it
            self._start()
            return self._executor.submit(_do_job, self._setup, job)

    def _start(self) -> None:
        self.kill()
        context = multiprocessing.get_context("spawn")
        self._reports, connection = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(1, context, worker_process.begin, (connection, self._log.name))
        others = {*multiprocessing.active_children()}
        with patch_environment(**self._environment):  # read by imports
            self._executor.submit(int)  # the process starts with its first task
        (self._process,) = {*multiprocessing.active_children()} - others
        connection.close()

    def messages(self) -> Iterator[tuple[int | None, str, Any]]:
        """New reports, with the numbers of their jobs, and new lines of output."""
        try:
            while self._process is not None and self._reports.poll():
                yield self._reports.recv()
        except (EOFError, OSError):  # the process died
            pass
        for line in self._log:
            yield None, "log", line.rstrip()

    def stop(self) -> None:
        """Requests that the process saves its job and returns."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._executor.shutdown()
            self._reports.close()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._log.close()


class Pool:
    """Workers on this machine; GPUs are assigned to them in turn."""

    begin_at_once = True

    def __init__(self, setup: Setup, num_workers: int | None):
        gpus = visible_gpus()
        num_workers, self.num_threads = share_cores(num_workers, available_cores(), len(gpus))
        setup = replace(setup, num_threads=self.num_threads)
        self._logs = tempfile.TemporaryDirectory(prefix="lrlab-workers-")
        self.workers = []
        for number in range(num_workers):
            environment = {"OMP_NUM_THREADS": str(self.num_threads), "TQDM_DISABLE": "1"}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
            log = Path(self._logs.name, str(number))
            log.touch()
            self.workers.append(PoolWorker(setup, environment, log.open(encoding="utf-8", errors="replace")))

    def messages(self) -> Iterator[tuple[int | None, str, Any]]:
        for worker in self.workers:
            yield from worker.messages()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._logs.cleanup()


def visible_gpus() -> list[str]:
    """GPUs as named by CUDA_VISIBLE_DEVICES, which may also hide all of them (-1)."""
    numbers = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[: len(numbers)] if named else numbers


def _do_job(setup: Setup, job: Job) -> Outcome:
    return do_job(setup, job, lambda *message: worker_process.connection.send((job.number, *message)))
