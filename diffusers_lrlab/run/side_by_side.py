"""Commands of this package that run at the same time, in processes of this machine or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ..core.environment import asked_threads, available_cores
from ..core.errors import printable
from ..core.extras import require_extra


def run_side_by_side(commands: Sequence[Sequence[str]], workers: int, address: str | None = None) -> list[int]:
    """
    Runs commands, each in a separate process, and waits for all; returns their exit statuses.

    Args:
        commands (`list` of `list` of `str`): The arguments of `python -m diffusers_lrlab`.
        workers (`int`): Commands at the same time, which share cores and GPUs.
        address (`str`, *optional*): Of a running Ray cluster whose nodes share this folder; this machine by default.

    Raises:
        LabError: if Ray is missing or cannot be reached.
    """
    workers = min(workers, len(commands))
    return _here(commands, workers) if address is None else _on_ray(commands, workers, address)


def _here(commands: Sequence[Sequence[str]], workers: int) -> list[int]:
    from ..study.executors.pool import visible_gpus

    threads, devices = asked_threads() or max(1, available_cores() // workers), visible_gpus()

    def run(number: int) -> int:
        environment = _environment(threads)
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        return subprocess.run(_words(commands[number]), env=environment, check=False).returncode

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(len(commands))))


def _on_ray(commands: Sequence[Sequence[str]], workers: int, address: str) -> list[int]:
    require_extra("ray", "--address")
    import ray

    from ..study.executors.ray_cluster import connect
    from ..study.executors.worker import share_cores

    is_ours = connect(address)
    try:
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        _, threads = share_cores(workers, int(total.get("CPU", 1)), gpus)
        task = ray.remote(num_cpus=threads, num_gpus=min(1.0, gpus / workers), max_retries=0)(_on_node)
        statuses = []
        for running in [task.remote(list(command), os.getcwd(), threads) for command in commands]:
            try:
                status, output = ray.get(running)
            except ray.exceptions.RayError as lost:  # with its node, say
                status, output = 1, f"{type(lost).__name__}: {lost}"
            sys.stdout.write(printable(output))
            statuses.append(status)
        return statuses
    finally:
        if is_ours:
            ray.shutdown()


def _on_node(command: list[str], folder: str, threads: int) -> tuple[int, str]:
    """Runs a command on a node of the cluster: its exit status and what it printed. Ray has chosen its GPU."""
    done = subprocess.run(
        _words(command), env=_environment(threads), cwd=folder, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def _words(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "diffusers_lrlab", *command]


def _environment(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
