"""Workers as tasks of Ray, on a running cluster or on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...core.errors import LabError
from .worker import Job, Outcome, Setup, do_job, share_cores


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


class RayWorker:
    """A share of the cluster's resources, in which Ray runs one task at a time."""

    def __init__(self, task: Any, setup: Setup, inbox: Any):
        self._task, self._setup, self._inbox = task, setup, inbox
        self._running: Any = None

    def submit(self, job: Job) -> Future[Outcome]:
        self._running = self._task.remote(self._setup, job, self._inbox)
        return self._running.future()

    def stop(self) -> None:
        import ray

        ray.cancel(self._running)  # raises KeyboardInterrupt in the task

    def kill(self) -> None:
        import ray

        ray.cancel(self._running, force=True)


class RayWorkers:
    """Tasks on all nodes of the cluster at `address`, of the one this process is connected to, or of this machine."""

    begin_at_once = False

    def __init__(self, setup: Setup, num_workers: int | None, address: str | None):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._is_ours = connect(address)
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        num_workers, self.num_threads = share_cores(num_workers, int(total.get("CPU", 1)), gpus)
        # On this node, so that the loss of another one does not end it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self._inbox = ray.remote(num_cpus=0, scheduling_strategy=here, max_restarts=-1)(_Inbox).remote()
        # `run_jobs` counts the tries. A process serves many jobs, so it loads its data once.
        task = ray.remote(num_cpus=self.num_threads, num_gpus=min(1.0, gpus / num_workers), max_retries=0, max_calls=0)(
            _do_job
        )
        setup = replace(setup, num_threads=self.num_threads)
        self.workers = [RayWorker(task, setup, self._inbox) for _ in range(num_workers)]

    def messages(self) -> Iterator[tuple[int | None, str, Any]]:
        import ray

        with suppress(ray.exceptions.RayError):  # messages only show progress
            yield from ray.get(self._inbox.take.remote(), timeout=10)

    def close(self) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()
        else:
            ray.kill(self._inbox)


class _Inbox:
    """Unread messages of workers."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, str, Any]] = []

    def put(self, *message: Any) -> None:
        self.messages.append(message)

    def take(self) -> list[tuple[int, str, Any]]:
        taken, self.messages = self.messages, []
        return taken


def _do_job(setup: Setup, job: Job, inbox: Any) -> Outcome:
    return do_job(setup, job, lambda *message: inbox.put.remote(job.number, *message))
