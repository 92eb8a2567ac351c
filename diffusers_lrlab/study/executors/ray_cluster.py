"""Workers as tasks of Ray, on a running cluster or on this machine."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from ...core.errors import LabError
from .workers import Job, Outcome, Setup, do_job, share_cores

_RETRIES = 2  # by Ray, of a task whose worker or node is lost
_STOP_SECONDS = 60.0  # to save a job


def connect(address: str | None) -> bool:
    """
    Connects to the cluster at `address`, or starts one on this machine; returns whether the connection is new.

    Raises a `LabError` if Ray cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return False
    try:
        ray.init(address, log_to_driver=False, logging_level="error", include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "on this machine" if address is None else f"at --address {address}"
        raise LabError(f"Ray cannot be reached {where}: {str(error).partition(chr(10))[0]}") from error
    return True


class RayWorkers:
    """Tasks on all nodes of the cluster at `address`, of the one this process is connected to, or of this machine."""

    def __init__(self, setup: Setup, num_workers: int | None, address: str | None):
        import ray

        self._is_ours = connect(address)
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        self.num_workers, self.num_threads = share_cores(num_workers, int(total.get("CPU", 1)), gpus)
        self._setup = replace(setup, num_threads=self.num_threads)
        # A process serves many jobs, so it loads its data once.
        resources = {"num_cpus": self.num_threads, "num_gpus": min(1.0, gpus / self.num_workers)}
        self._task = ray.remote(**resources, max_retries=_RETRIES, max_calls=0)(do_job)
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
        wait(left, _STOP_SECONDS)

    def close(self) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()
