"""Rows of the tables of schedules: every entry with its defaults, each choice, both floors, another start of warm-up."""

import io
import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffusers_lrlab import get_scheduler, lr_curve
from diffusers_lrlab.schedules.momentum import read_momentum
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.schedule import resolve_schedule

BASE = 1e-3


def cos(p):
    """Half a cosine, from 1 at 0 to 0 at 1."""
    return (1 + np.cos(np.pi * np.asarray(p))) / 2


@dataclass(frozen=True)
class Row:
    """A schedule with arguments, to be built for an optimizer that suits it."""

    name: str
    kwargs: dict

    def has(self, trait):
        return trait in SCHEDULERS[self.name].traits

    @property
    def form(self):
        return self.kwargs.get("momentum_form")

    def optimizer(self, groups=1, lr=BASE):
        parameters = [{"params": [torch.zeros(1)], "lr": lr * 2**group} for group in range(groups)]
        if self.form == "heavy_ball":
            return torch.optim.SGD(parameters, momentum=0.9)
        return (torch.optim.AdamW if self.has("momentum") else torch.optim.SGD)(parameters)

    def build(self, num_updates, warmup, groups=1):
        optimizer = self.optimizer(groups)
        return get_scheduler(self.name, optimizer, self.warmup(warmup), num_updates, self.kwargs), optimizer

    def warmup(self, asked):
        return 0 if self.has("no_warmup") else asked

    def curve(self, num_updates, warmup, lr=BASE):
        return lr_curve(self.name, lr, self.warmup(warmup), num_updates, self.kwargs)

    def floor(self, lr=BASE):
        kwargs = resolve_schedule(self.name, self.kwargs).kwargs
        return (kwargs.get("min_lr_ratio") or 0.0) * lr or kwargs.get("min_lr") or 0.0


def variants(entry):
    """Keyword arguments that between them reach every choice, both floors and another start of warm-up."""
    parameters = {parameter.name: parameter for parameter in (*entry.parameters, *entry.common)}
    yield {}
    for parameter in parameters.values():
        choices = (True, False) if parameter.kind is bool else parameter.choices or ()
        yield from ({parameter.name: choice} for choice in choices if choice != parameter.default)
    extras = {"min_lr": BASE / 5, "min_lr_ratio": 0.2, "warmup_start_ratio": 0.3}
    yield from ({key: value} for key, value in extras.items() if key in parameters)


def rows(*without):
    entries = [entry for entry in SCHEDULERS.values() if not {"feedback", *without} & entry.traits]
    found = [Row(entry.name, kwargs) for entry in entries for kwargs in variants(entry)]
    return [pytest.param(row, id=" ".join([row.name, *(f"{k}={v}" for k, v in row.kwargs.items())])) for row in found]


def settings(optimizer):
    """Learning rate and momentum of every group, as the optimizer has them."""
    return [(float(group["lr"]), read_momentum(group) or 0.0) for group in optimizer.param_groups]


def run(scheduler, optimizer, num_updates):
    """What the optimizer has at each of its steps: an array of (update, group, learning rate or momentum)."""
    applied = []
    for _ in range(num_updates):
        applied.append(settings(optimizer))
        optimizer.step()
        scheduler.step()
    return np.array(applied)


def close(actual, expected, scale=BASE):
    """Equal to 1e-12 of the peak."""
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12 * scale)


def through_torch(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


# What a checkpoint of ours holds, what accelerate writes, what torch writes.
COPIES = [lambda state: json.loads(json.dumps(state)), lambda state: pickle.loads(pickle.dumps(state)), through_torch]


class CountSyncs(TorchDispatchMode):
    """Counts the reads of a tensor by the host, which is what makes it wait for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
