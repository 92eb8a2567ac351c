"""Workers as processes of this machine, one for each GPU or group of processor cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import patch_environment

from ...core import processes
from ...core.environment import available_cores
from . import worker
from .worker import Job, Outcome, Setup, do_job, share_cores


class Pool:
    """A `ProcessPoolExecutor`; GPUs are assigned to its processes in turn."""

    def __init__(self, setup: Setup, num_workers: int | None):
        self._gpus = visible_gpus()
        self.num_workers, self.num_threads = share_cores(num_workers, available_cores(), len(self._gpus))
        self._setup = replace(setup, num_threads=self.num_threads)
        self._others = {*multiprocessing.active_children()}
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(self.num_workers, context, _begin)

    def _processes(self) -> set[Any]:
        return {*multiprocessing.active_children()} - self._others

    def submit(self, job: Job) -> Future[Outcome]:
        environment = {"OMP_NUM_THREADS": str(self.num_threads), "TQDM_DISABLE": "1"}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[len(self._processes()) % len(self._gpus)]
        with patch_environment(**environment):  # of the process that this may start, whose imports read it
            return self._executor.submit(do_job, self._setup, job)

    def stop(self) -> None:
        """Requests that the processes save what they do and return."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in self._processes():
            process.terminate()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


def visible_gpus() -> list[str]:
    """GPUs as named by CUDA_VISIBLE_DEVICES, which may also hide all of them (-1)."""
    numbers = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[: len(numbers)] if named else numbers


def _begin() -> None:
    processes.begin()
    signal.signal(signal.SIGTERM, worker.stop)  # between jobs, which handle it themselves
