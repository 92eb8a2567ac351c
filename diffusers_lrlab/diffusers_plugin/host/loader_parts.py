"""What stands in the place of a loader's own parts for an epoch that begins in its middle: indices, collating, workers."""

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler, get_worker_info

from ...core.worker_process import end_with_parent
from .generators import find_generators, get_states, set_states, variables_of_data


class BatchIndices(Sampler[list[int]]):
    """The batches of indices of a sampler from the n-th on; earlier ones are drawn, and nothing is read for them."""

    def __init__(self, batch_sampler: Any, num_skipped: int):
        self.batch_sampler, self.num_skipped = batch_sampler, num_skipped
        self._first: list[Any] = []
        self._rest: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._rest = itertools.islice(iter(self.batch_sampler), self.num_skipped, None)
        return self

    def __next__(self) -> Any:
        assert self._rest is not None
        return self._first.pop() if self._first else next(self._rest)

    def begin(self) -> None:
        """Makes the sampler draw its order now."""
        assert self._rest is not None
        self._first = list(itertools.islice(self._rest, 1))


class CollateWithStates:
    """Collates in a worker, and adds the states of its generators after that."""

    def __init__(self, collate: Callable[[Any], Any]):
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Any, bytes]:
        batch = self.collate(samples)
        return batch, pickle.dumps(get_states(_generators_of_worker(), with_devices=False))


class WorkerStart:
    """Begins a worker where the one of the same number was."""

    def __init__(self, own: Callable[[int], None] | None, of_workers: list[dict[str, Any]]):
        self.own, self.of_workers = own, of_workers

    def __call__(self, worker: int) -> None:
        end_with_parent()
        if self.own is not None:
            self.own(worker)
        if self.of_workers:
            set_states(self.of_workers[worker], _generators_of_worker())


def _generators_of_worker() -> dict[str, Any]:
    worker: Any = get_worker_info()
    return find_generators({"data": variables_of_data(worker.dataset)})
