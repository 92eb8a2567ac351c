"""A prepared loader of somebody else's script: its place in the data, and how it gets there again unread.

A loader that accelerate has prepared reads one batch ahead. So when a checkpoint is written, the next batch has been made
already, and what was drawn for it lies before the checkpoint's random states. To go on, the order of the epoch is drawn
again from the states at its beginning, batches that were taken are passed over by their indices alone, the batch ahead is
made again from the states before it, and only then do the states of the checkpoint follow.
"""

import copy
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import IterableDataset, Sampler

from ...core.errors import LabError
from ...core.random_states import as_plain_data
from ..script.source import HostScript, NotRecognised
from .generators import find_generators, get_states, raw_states, set_states, variables_of_data
from .loader_parts import BatchIndices, CollateWithStates, WorkerStart


class WatchedLoader:
    """
    Args:
        script (`HostScript`): The script, whose variables are looked through for generators.
        loader: As `accelerator.prepare` returned it; [`NotRecognised`] if its order cannot be known.
        is_at_end (`Callable`): Whether all updates are done, so that a resumed run takes no batch.

    Attributes:
        resumed: The state from which the next epoch goes on.
        after_save: States that come back before anything is drawn for the next batch: what a script draws between a
            checkpoint and that batch is not drawn by one that resumes from the checkpoint.
    """

    def __init__(self, script: HostScript, loader: Any, is_at_end: Callable[[], bool]):
        check_loader(loader)
        self.script, self.loader, self.is_at_end = script, loader, is_at_end
        self.base = loader.base_dataloader
        self.resumed: dict[str, Any] | None = None
        self.after_save: dict[str, Any] | None = None
        self.num_passed = 0
        self._epoch: dict[str, Any] = {}
        self._num_loaded = 0
        self._is_exhausted, self._is_over = True, False
        self._before: dict[str, Any] | None = None  # states before the last batch, where this process makes it
        self._of_workers: dict[int, bytes] = {}  # states of the worker that made a batch, after it
        self._ahead: Any = None
        self._iterate = self.base.__iter__
        # accelerate calls it by this name.
        vars(self.base)["__iter__"] = self._begin_epoch

    def facts(self) -> dict[str, int]:
        """What the order of the data follows from; other numbers at a resume are an error."""
        batches = self.base.batch_sampler
        return {"rows": len(self.base.dataset), "batches": len(batches), "data workers": self.base.num_workers}

    def generators(self) -> dict[str, Any]:
        owners = {"script": self._variables(), "data": variables_of_data(self.base.dataset), "loader": vars(self.base)}
        owners |= {f"sampler{depth}": vars(sampler) for depth, sampler in enumerate(self._samplers())}
        return find_generators(owners)

    def _variables(self) -> dict[str, Any]:
        """Those of the script that can be seen where it is now, from the innermost function on."""
        found: dict[str, Any] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.script.path:
                found = {**frame.f_globals, **frame.f_locals, **found}
            frame = frame.f_back
        return found

    def _samplers(self) -> list[Any]:
        """The batch sampler, and what it is made of."""
        found, seen = [self.base.batch_sampler], 0
        while seen < len(found):
            found += [part for part in vars(found[seen]).values() if isinstance(part, Sampler) and part not in found]
            seen += 1
        return found

    # --- saved and restored -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where the script is in its data now, as plain data."""
        now = get_states(self.generators())
        if self._is_exhausted:
            iteration = self._epoch["iteration"] + 1 if self._epoch else self.loader.iteration
            return {"epoch": {"iteration": iteration, "samplers": self._plain_samplers(), "generators": now}, "passed": None}
        first = self._first_of_round(self._num_loaded - 1)
        workers = [self._of_workers[index] for index in range(first - self.base.num_workers, first) if index >= 0]
        return {
            "epoch": self._epoch,
            "passed": self._num_loaded - 1,
            "before": as_plain_data(self._before),
            "workers": [pickle.loads(states) for states in workers],
            "ahead": _digest(self._ahead),
            "now": now,
        }

    def _first_of_round(self, index: int) -> int:
        """The batch from which the workers have to make batches again, so that each makes those that it made before."""
        return index - index % self.base.num_workers if self.base.num_workers else index

    def _plain_samplers(self) -> list[dict[str, Any]]:
        """What samplers of the script's own keep, such as batches that they shuffle in place; torch's draw all anew."""
        return [
            {name: copy.deepcopy(value) for name, value in vars(sampler).items() if _is_plain(value)}
            for sampler in self._own_samplers()
        ]

    def _own_samplers(self) -> list[Any]:
        return [part for part in self._samplers() if not type(part).__module__.startswith(("torch.", "accelerate."))]

    def _restore_epoch(self, epoch: dict[str, Any]) -> None:
        self.loader.set_epoch(epoch["iteration"])
        for sampler, state in zip(self._own_samplers(), epoch["samplers"], strict=True):
            vars(sampler).update(copy.deepcopy(state))
        set_states(epoch["generators"], self.generators())

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> Iterator[Any]:
        self._check_caches()
        resumed, self.resumed = self.resumed, None
        self._is_over = self._is_over or resumed is not None and self.is_at_end()
        if self._is_over:
            return iter(())  # scripts that resume at their end would do one update more
        if resumed is not None:
            self._restore_epoch(resumed["epoch"])
        elif self.after_save is not None:
            set_states(self.after_save, self.generators())
        self.after_save = None
        states = get_states(self.generators())
        self._epoch = {"iteration": self.loader.iteration, "samplers": self._plain_samplers(), "generators": states}
        self._num_loaded, self._is_exhausted, self._of_workers = 0, False, {}
        if resumed is None or resumed["passed"] is None:
            return self._batches(self._iterator(0, []))
        first = self._first_of_round(resumed["passed"])
        return self._go_on(self._iterator(first, resumed["workers"]), first, resumed)

    def _check_caches(self) -> None:
        """What a script takes by the number of the batch would be of others, as it counts from 0 after a resume."""
        variables = self._variables()
        found = {name: variables.get(name) for name in self.script.cached_by_step}
        cached = [name for name, value in found.items() if value is not None and len(value)]
        if cached:
            shown = ", ".join(f"{name}[step]" for name in cached)
            raise LabError(
                f"--exact_resume: this script takes {shown} for each batch, and counts batches from 0 when it "
                "resumes, so that they would be of other batches. Leave out --exact_resume, or what fills them "
                "(--cache_latents, or captions of the data's own)."
            )

    def _iterator(self, num_skipped: int, of_workers: list[dict[str, Any]]) -> Iterator[Any]:
        """The loader's own iterator, from a batch on."""
        base = self.base
        indices = BatchIndices(base.batch_sampler, num_skipped)
        changed: dict[str, Any] = {"batch_sampler": indices}
        if base.num_workers:
            changed |= {"collate_fn": CollateWithStates(base.collate_fn)}
            changed |= {"worker_init_fn": WorkerStart(base.worker_init_fn, of_workers)}
        own = {name: vars(base)[name] for name in changed}
        vars(base).update(changed)  # its own __setattr__ lets nobody replace a batch sampler
        try:
            iterator = self._iterate()
        finally:
            vars(base).update(own)
        if not base.num_workers:
            indices.begin()
        return iterator

    def _go_on(self, iterator: Iterator[Any], first: int, resumed: dict[str, Any]) -> Iterator[Any]:
        passed = self.num_passed = resumed["passed"]
        # Scripts with a `resume_step` drop so many batches themselves, without a look at them.
        yield from [None] * int(self._variables().get("resume_step") or 0 if self.script.assigns("resume_step") else 0)
        self._num_loaded = first
        states = map(pickle.dumps, resumed["workers"])  # which the next checkpoint may need, too
        self._of_workers = dict(zip(range(first - len(resumed["workers"]), first), states, strict=True))
        while self._num_loaded < passed:
            self._load(iterator)
        if resumed["before"] is not None:
            set_states(resumed["before"], self.generators())
        batch = self._load(iterator)
        if _digest(batch) != resumed["ahead"]:
            raise LabError(
                f"--exact_resume: batch {passed + 1} of this epoch is not what it was when the checkpoint was written. The "
                "data or what is done to them have changed, or are not the same at every start (without --seed). Start "
                "again, or resume without --exact_resume."
            )
        set_states(resumed["now"], self.generators())
        yield batch
        yield from self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self.after_save is not None:
                set_states(self.after_save, self.generators())
            self.after_save = None
            try:
                batch = self._load(iterator)
            except StopIteration:
                self._is_exhausted, self._ahead = True, None
                return
            yield batch

    def _load(self, iterator: Iterator[Any]) -> Any:
        if not self.base.num_workers:
            self._before = raw_states(self.generators())
            batch = next(iterator)
        else:
            batch, self._of_workers[self._num_loaded] = next(iterator)
            self._of_workers.pop(self._num_loaded - 2 * self.base.num_workers, None)
        self._num_loaded += 1
        self._ahead = batch
        return batch


def check_loader(loader: Any) -> None:
    """Raises [`NotRecognised`] for loaders whose order cannot be drawn again, or not without their own help."""
    from accelerate.data_loader import DataLoaderShard

    if not isinstance(getattr(loader, "dataset", None), IterableDataset) and type(loader) is DataLoaderShard:
        base = loader.base_dataloader
        reasons = {
            "its loader keeps a state by itself (torchdata)": loader.use_stateful_dataloader,
            "its loader has no batches of indices": base.batch_sampler is None,
            "its data workers live on from epoch to epoch (persistent_workers)": base.persistent_workers,
            "its data workers give batches in any order (in_order)": not getattr(base, "in_order", True),
        }
        for reason, holds in reasons.items():
            if holds:
                raise NotRecognised(reason)
        return
    raise NotRecognised("its data are a stream, whose order only its source knows")


def _digest(batch: Any) -> str:
    """Of all tensors in a batch."""
    found = hashlib.sha256()
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)
    return isinstance(value, int | float | str | None)
