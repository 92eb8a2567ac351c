"""Saves and restores the position of a third-party script's dataloader, skipping batches without reading them.

A loader prepared by accelerate reads one batch ahead. So at a checkpoint the next batch is already made, and the random
numbers for it were drawn before the checkpoint's states. A resume redraws the order of the epoch from the states at its
start, skips the indices of the batches taken, remakes the batch ahead from the states before it, and only then restores the
states of the checkpoint.
"""

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import IterableDataset, Sampler

from ...core.errors import LabError
from ...core.random_states import as_plain_data
from ..script.source import HostScript, NotRecognised
from .generators import find_generators, get_states, raw_states, set_states, variables_of_data
from .loader_parts import BatchIndices, CollateWithStates, WorkerStart
from .run import calling_frames


class WatchedLoader:
    """
    A loader from `accelerator.prepare`; raises [`NotRecognised`] if its order cannot be known. `is_at_end` says whether all
    updates are done, so that a resumed run takes no batch.
    """

    def __init__(self, script: HostScript, loader: Any, is_at_end: Callable[[], bool]):
        check_loader(loader)
        self.script, self.loader, self.is_at_end = script, loader, is_at_end
        self.base = loader.base_dataloader
        self.resumed: dict[str, Any] | None = None  # the state from which the next epoch continues
        # States to restore before the next batch: a resumed run does not draw the random numbers that a script draws after
        # a checkpoint.
        self.after_save: dict[str, Any] | None = None
        self.num_skipped = 0  # batches of the resumed epoch that were not read again
        self._epoch: dict[str, Any] = {}
        self._num_loaded = 0
        self._is_exhausted, self._is_over = True, False
        self._before: dict[str, Any] | None = None  # states before the last batch, without workers
        self._worker_states: dict[int, bytes] = {}  # of the worker that made a batch, after it
        self._ahead: Any = None
        self._iterate = self.base.__iter__
        # accelerate calls it by this name.
        vars(self.base)["__iter__"] = self._begin_epoch

    def facts(self) -> dict[str, int]:
        """The numbers that determine the order of the data; others at a resume are an error."""
        batches = self.base.batch_sampler
        return {"rows": len(self.base.dataset), "batches": len(batches), "data workers": self.base.num_workers}

    def generators(self) -> dict[str, Any]:
        owners = {"script": self._variables(), "data": variables_of_data(self.base.dataset), "loader": vars(self.base)}
        owners |= {f"sampler{depth}": vars(sampler) for depth, sampler in enumerate(self._samplers())}
        return find_generators(owners)

    def _variables(self) -> dict[str, Any]:
        """The variables visible where the script is now; those of inner functions win."""
        found: dict[str, Any] = {}
        for frame in calling_frames():
            if frame.f_code.co_filename == self.script.path:
                found = {**frame.f_globals, **frame.f_locals, **found}
        return found

    def _samplers(self) -> list[Any]:
        """The batch sampler, and the samplers it is made of."""
        found = [self.base.batch_sampler]
        for sampler in found:  # grows
            found += [part for part in vars(sampler).values() if isinstance(part, Sampler) and part not in found]
        return found

    # --- saved and restored -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The script's position in its data, as plain data."""
        now = get_states(self.generators())
        if self._is_exhausted:
            iteration = self._epoch["iteration"] + 1 if self._epoch else self.loader.iteration
            return {"epoch": {"iteration": iteration, "samplers": self._plain_samplers(), "generators": now}, "passed": None}
        first = self._first_of_round(self._num_loaded - 1)
        workers = [self._worker_states[index] for index in range(first - self.base.num_workers, first) if index >= 0]
        return {
            "epoch": self._epoch,
            "passed": self._num_loaded - 1,
            "before": as_plain_data(self._before),
            "workers": [pickle.loads(states) for states in workers],
            "ahead": _digest(self._ahead),
            "now": now,
        }

    def continue_from(self, state: dict[str, Any]) -> None:
        """Continues from this state's random numbers, whatever the script draws before the next batch."""
        self.after_save = state["epoch"]["generators"] if state["passed"] is None else state["now"]

    def _restore_after_save(self) -> None:
        if self.after_save is not None:
            set_states(self.after_save, self.generators())
        self.after_save = None

    def _first_of_round(self, index: int) -> int:
        """The batch from which workers have to remake batches, so that each of them remakes its own."""
        return index - index % self.base.num_workers if self.base.num_workers else index

    def _plain_samplers(self) -> list[dict[str, Any]]:
        """The plain attributes of custom samplers, such as batches shuffled in place; torch's samplers keep nothing."""
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
            return iter(())  # a script that resumes at its end would do another update
        if resumed is not None:
            self.after_save = None
            self._restore_epoch(resumed["epoch"])
        self._restore_after_save()
        states = get_states(self.generators())
        self._epoch = {"iteration": self.loader.iteration, "samplers": self._plain_samplers(), "generators": states}
        self._num_loaded, self._is_exhausted, self._worker_states = 0, False, {}
        if resumed is None or resumed["passed"] is None:
            return self._batches(self._iterator(0, []))
        first = self._first_of_round(resumed["passed"])
        return self._resume_epoch(self._iterator(first, resumed["workers"]), first, resumed)

    def _check_caches(self) -> None:
        """Refuses caches indexed by the batch count, which starts at 0 after a resume."""
        variables = self._variables()
        found = {name: variables.get(name) for name in self.script.indexed_by_step}
        cached = [name for name, value in found.items() if value is not None and len(value)]
        if cached:
            shown = ", ".join(f"{name}[step]" for name in cached)
            raise LabError(
                f"--exact_resume: this script reads {shown} for each batch, but counts batches from 0 after a resume, so it "
                "would read the values of other batches. Remove --exact_resume, or the option that fills them "
                "(--cache_latents, or a caption column)."
            )

    def _iterator(self, num_skipped: int, worker_states: list[dict[str, Any]]) -> Iterator[Any]:
        """The loader's own iterator, from a batch on."""
        base = self.base
        indices = BatchIndices(base.batch_sampler, num_skipped)
        changed: dict[str, Any] = {"batch_sampler": indices}
        if base.num_workers:
            changed |= {"collate_fn": CollateWithStates(base.collate_fn)}
            changed |= {"worker_init_fn": WorkerStart(base.worker_init_fn, worker_states)}
        own = {name: vars(base)[name] for name in changed}
        vars(base).update(changed)  # its __setattr__ refuses a new batch sampler
        try:
            iterator = self._iterate()
        finally:
            vars(base).update(own)
        if not base.num_workers:
            indices.begin()
        return iterator

    def _resume_epoch(self, iterator: Iterator[Any], first: int, resumed: dict[str, Any]) -> Iterator[Any]:
        passed = self.num_skipped = resumed["passed"]
        # Scripts with a `resume_step` drop that many batches without looking at them.
        yield from [None] * int(self._variables().get("resume_step") or 0 if self.script.assigns("resume_step") else 0)
        self._num_loaded = first
        states = map(pickle.dumps, resumed["workers"])  # for the next checkpoint
        self._worker_states = dict(zip(range(first - len(resumed["workers"]), first), states, strict=True))
        while self._num_loaded < passed:
            self._load(iterator)
        if resumed["before"] is not None:
            set_states(resumed["before"], self.generators())
        batch = self._load(iterator)
        if _digest(batch) != resumed["ahead"]:
            raise LabError(
                f"--exact_resume: batch {passed + 1} of this epoch differs from when the checkpoint was written. The data "
                "or their processing changed, or they differ at every start (without --seed). Start again, or resume "
                "without --exact_resume."
            )
        set_states(resumed["now"], self.generators())
        yield batch
        yield from self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._restore_after_save()
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
            batch, self._worker_states[self._num_loaded] = next(iterator)
            self._worker_states.pop(self._num_loaded - 2 * self.base.num_workers, None)
        self._num_loaded += 1
        self._ahead = batch
        return batch


def check_loader(loader: Any) -> None:
    """Raises [`NotRecognised`] for a loader whose order cannot be redrawn from the states at the start of its epoch."""
    from accelerate.data_loader import DataLoaderShard

    if isinstance(getattr(loader, "dataset", None), IterableDataset) or type(loader) is not DataLoaderShard:
        raise NotRecognised("its data are a stream, whose order only its source knows")
    base = loader.base_dataloader
    reasons = {
        "its loader saves its own state (torchdata)": loader.use_stateful_dataloader,
        "its loader has no batch sampler": base.batch_sampler is None,
        "its data workers persist across epochs (persistent_workers)": base.persistent_workers,
        "its data workers return batches in any order (in_order)": not getattr(base, "in_order", True),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotRecognised(reason)


def _digest(batch: Any) -> str:
    """A hash of all tensors in a batch."""
    found = hashlib.sha256()
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)
    return isinstance(value, int | float | str | None)
