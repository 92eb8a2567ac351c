"""Stacks in parallel, one per processor core, so that no product is split between cores that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from .member import Member
from .stack import Stack


class ParallelStacks:
    """Members in one stack per worker thread; without threads, one stack in the thread of the caller."""

    def __init__(self, members: list[Member], device: torch.device, threads: WorkerThreads | None = None):
        self._threads = threads or WorkerThreads(None, 1)
        num_stacks = min(self._threads.num_threads, len(members))
        edges = [len(members) * stack // num_stacks for stack in range(num_stacks + 1)]
        self._shares = [members[start:end] for start, end in zip(edges, edges[1:], strict=False)]
        self.stacks = [Stack(share, device) for share in self._shares]

    @property
    def update(self) -> int:
        """The number of updates done by the members that are still training."""
        return max(stack.update for stack in self.stacks)

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        for stack in self.stacks:
            stack.load(states)

    def sums_of(self, member: Member) -> torch.Tensor:
        """The sums of [`Stack.sums_of`]."""
        (stack,) = (stack for stack, share in zip(self.stacks, self._shares, strict=True) if member in share)
        return stack.sums_of(member)

    def updates(self) -> Iterator[int]:
        """Trains until every member is done; yields the number of advanced members after each update."""
        loops = [stack.updates() for stack in self.stacks]
        while any(stack.members for stack in self.stacks):
            yield sum(self._threads.map(lambda loop: next(loop, 0), loops))


class WorkerThreads:
    """Runs a call per thread at a time, each on one core; one after the other without a pool."""

    def __init__(self, pool: ThreadPoolExecutor | None, num_threads: int):
        self._pool, self.num_threads = pool, num_threads

    def map(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        """The results in order; raises the first error."""
        return list(map(function, values) if self._pool is None else self._pool.map(function, values))


@contextmanager
def worker_threads(device: torch.device, num_members: int) -> Iterator[WorkerThreads]:
    """A worker for each thread of this process; a single member or a GPU has one worker."""
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1 or num_members == 1:
        yield WorkerThreads(None, 1)
        return
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(num_threads, "worker", torch.set_num_threads, (1,))
    try:
        yield WorkerThreads(pool, num_threads)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, do not start the rest
        torch.set_num_threads(num_threads)
