"""Stacks side by side, one to a processor core: cores that share every product wait for each other at every product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from .member import Member
from .stack import Stack


class Lanes:
    """
    Members in as many stacks as there are cores.

    Args:
        members (`list` of [`Member`]): See [`Stack`].
        device (`torch.device`): Where.
        ways (`dict`, *optional*): See [`StackedMLP`].
        side_by_side (`SideBySide`, *optional*): Who computes them; one stack in this thread if not given.
    """

    def __init__(
        self,
        members: list[Member],
        device: torch.device,
        ways: dict[str, str] | None = None,
        side_by_side: SideBySide | None = None,
    ):
        self._side_by_side = side_by_side or SideBySide(None, 1)
        num_lanes = min(self._side_by_side.num_lanes, len(members))
        edges = [len(members) * lane // num_lanes for lane in range(num_lanes + 1)]
        shares = [members[start:end] for start, end in zip(edges, edges[1:], strict=False)]
        self._shares = shares
        self.stacks = [Stack(share, device, ways) for share in shares]

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        """Puts members back into states that were saved."""
        for stack, share in zip(self.stacks, self._shares, strict=True):
            stack.load({member: states[member] for member in share if member in states})

    def sums_of(self, member: Member) -> torch.Tensor:
        """What was summed since the last logging point; zeros for members that are done."""
        (stack,) = (stack for stack, share in zip(self.stacks, self._shares, strict=True) if member in share)
        return stack.sums_of(member)

    def updates(self) -> Iterator[int]:
        """Trains until every member is done, and yields the number of members that were advanced after each update."""
        loops = [stack.updates() for stack in self.stacks]
        while any(stack.members for stack in self.stacks):
            yield sum(self._side_by_side.map(lambda loop: next(loop, 0), loops))


class SideBySide:
    """
    Calls that are computed at the same time, each on one core.

    Args:
        pool (`ThreadPoolExecutor` or `None`): Whose threads they are in; without one, calls follow each other in this
            thread.
        num_lanes (`int`): How many at a time.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, num_lanes: int):
        self._pool, self.num_lanes = pool, num_lanes

    def map(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        """The results in order, when all are there; the first error, when one fails."""
        return list(map(function, values) if self._pool is None else self._pool.map(function, values))


@contextmanager
def side_by_side(device: torch.device, num_members: int) -> Iterator[SideBySide]:
    """
    As many lanes as this process has threads for computing, which each have one inside this block.

    A single member has all threads for itself, and a GPU is one lane.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1 or num_members == 1:
        yield SideBySide(None, 1)
        return
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(num_threads, "lane", torch.set_num_threads, (1,))
    try:
        yield SideBySide(pool, num_threads)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun need not
        torch.set_num_threads(num_threads)
