"""Replacements for parts of a dataloader in an epoch that starts in its middle: indices, collation, worker states."""

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler, get_worker_info

from ...core.worker_process import end_with_parent
from .generators import find_generators, get_states, set_states, variables_of_data


class BatchIndices(Sampler[list[int]]):
    """A sampler's batches of indices from the n-th on. Earlier ones are drawn, but their data are not read."""

    def __init__(self, batch_sampler: Any, num_skipped: int):
        self.batch_sampler, self.num_skipped = batch_sampler, num_skipped
        self._rest: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._rest = itertools.islice(iter(self.batch_sampler), self.num_skipped, None)
        return self

    def __next__(self) -> Any:
        return next(self._rest)

    def begin(self) -> None:
        """Makes the sampler draw its order now."""
        self._rest = itertools.chain([*itertools.islice(self._rest, 1)], self._rest)


class CollateWithStates:
    """Collates in a worker, and adds the states of its generators after that."""

    def __init__(self, collate: Callable[[Any], Any]):
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Any, bytes]:
        batch = self.collate(samples)
        return batch, pickle.dumps(get_states(_generators_of_worker(), with_devices=False))


class WorkerStart:
    """Starts each worker with the random states of the saved worker of the same number."""

    def __init__(self, own: Callable[[int], None] | None, states: list[dict[str, Any]]):
        self.own, self.states = own, states

    def __call__(self, worker: int) -> None:
        end_with_parent()
        if self.own is not None:
            self.own(worker)
        if self.states:
            set_states(self.states[worker], _generators_of_worker())


def _generators_of_worker() -> dict[str, Any]:
    worker: Any = get_worker_info()
    return find_generators({"data": variables_of_data(worker.dataset)})
