"""A CUDA graph's stand-in on a CPU: operators are recorded with their tensors, and done again in the same memory.

As in a graph, numbers of Python's are what they were when it was recorded, and reading a tensor back is an error.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READING_BACK = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READING_BACK:
            raise RuntimeError(f"{function} waits for the device.")
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        for tensor in _tensors(result):  # made here: nothing of it is to be undone
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, None))
        return result


def _tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def record_tape(work):
    """A `Recorder` (see `study/stacked/captured.py`)."""
    with _Recording() as recording:
        work()
    for storage, before in recording.before.values():
        if before is not None:  # a graph does nothing while it is recorded
            storage.copy_(before)

    @torch.no_grad()
    def replay():
        for function, args, kwargs, results in recording.calls:
            again = function(*args, **kwargs)
            for place, value in zip(_tensors(results), _tensors(again), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.detach().copy_(value)

    return replay
