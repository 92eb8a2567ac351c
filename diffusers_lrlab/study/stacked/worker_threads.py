"""Stacks side by side, one to a processor core: cores that share every product wait for each other at every product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from .member import Member
from .stack import Stack


class ParallelStacks:
    """Members in as many stacks as there are worker threads; in one stack in the caller's thread without any."""

    def __init__(self, members: list[Member], device: torch.device, threads: WorkerThreads | None = None):
        self._threads = threads or WorkerThreads(None, 1)
        num_stacks = min(self._threads.num_threads, len(members))
        edges = [len(members) * stack // num_stacks for stack in range(num_stacks + 1)]
        self._shares = [members[start:end] for start, end in zip(edges, edges[1:], strict=False)]
        self.stacks = [Stack(share, device) for share in self._shares]

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        for stack in self.stacks:
            stack.load(states)

    def sums_of(self, member: Member) -> torch.Tensor:
        """What was summed since the last logging point; zeros for members that are done."""
        (stack,) = (stack for stack, share in zip(self.stacks, self._shares, strict=True) if member in share)
        return stack.sums_of(member)

    def updates(self) -> Iterator[int]:
        """Trains until every member is done, and yields the number of members that were advanced after each update."""
        loops = [stack.updates() for stack in self.stacks]
        while any(stack.members for stack in self.stacks):
            yield sum(self._threads.map(lambda loop: next(loop, 0), loops))


class WorkerThreads:
    """As many calls at a time as there are threads, each on one core; one after the other if there is no pool."""

    def __init__(self, pool: ThreadPoolExecutor | None, num_threads: int):
        self._pool, self.num_threads = pool, num_threads

    def map(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        """The results in order, when all are there; the first error, when one fails."""
        return list(map(function, values) if self._pool is None else self._pool.map(function, values))


@contextmanager
def worker_threads(device: torch.device, num_members: int) -> Iterator[WorkerThreads]:
    """A worker for each thread that this process computes with; a single member has them all, and a GPU has one worker."""
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1 or num_members == 1:
        yield WorkerThreads(None, 1)
        return
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(num_threads, "worker", torch.set_num_threads, (1,))
    try:
        yield WorkerThreads(pool, num_threads)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun need not
        torch.set_num_threads(num_threads)
