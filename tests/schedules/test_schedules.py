"""Every registered schedule, by its registration alone: a new one is tested here without a line being added.

The rows are every entry with its defaults, with each choice of each parameter, with both kinds of floor, and with a
warm-up that starts above 0. Schedules that follow a metric are in test_parity.py.
"""

import copy
import io
import itertools
import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffusers_lrlab import get_scheduler, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.schedules.momentum import read_momentum
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.resolve import resolve_schedule

BASE = 1e-3


def cos(p):
    """Half a cosine, from 1 at 0 to 0 at 1."""
    return (1 + np.cos(np.pi * np.asarray(p))) / 2


RAMPS = {"linear": lambda x: x, "cosine": lambda x: 1 - cos(x), "1-sqrt": lambda x: 1 - np.sqrt(1 - x)}


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


each_row = pytest.mark.parametrize("row", rows())
each_row_with_warmup = pytest.mark.parametrize("row", rows("no_warmup"))
each_row_with_ramp = pytest.mark.parametrize("row", rows("no_warmup", "rises"))


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


# --- what the optimizer gets -----------------------------------------------------------------------------------------


@each_row
@pytest.mark.parametrize(("num_updates", "warmup"), [(37, 0), (37, 5), (40, 0.1)])
def test_the_optimizer_has_what_the_curve_promises(row, num_updates, warmup):
    applied = run(*row.build(num_updates, warmup, groups=2), num_updates)[:, :, 0]
    for group in range(2):
        promised = row.curve(num_updates, warmup, BASE * 2**group)
        assert (promised.shape, promised.dtype) == ((num_updates,), np.float64)
        close(applied[:, group], promised)


@each_row
@pytest.mark.parametrize(("num_updates", "warmup"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_runs_of_few_updates_are_as_promised_or_refused(row, num_updates, warmup):
    try:
        promised = row.curve(num_updates, warmup)
    except LabError:
        with pytest.raises(LabError):
            row.build(num_updates, warmup)
        return
    close(run(*row.build(num_updates, warmup), num_updates)[:, 0, 0], promised)
    assert (promised >= 0).all()


@each_row
@pytest.mark.parametrize("warmup", [0, 6])
def test_it_stays_between_floor_and_peak_and_reaches_the_peak(row, warmup):
    lrs = row.curve(60, warmup)
    assert (lrs >= 0).all()
    assert (lrs[row.warmup(warmup) :] >= row.floor() * (1 - 1e-12)).all()
    if row.form == "heavy_ball":
        assert lrs.max() > BASE  # the compensation raises the rate as the momentum falls
    elif warmup or not row.has("early_peak"):
        assert lrs.max() == pytest.approx(BASE, rel=1e-12)


@each_row
def test_past_the_end_it_stays_where_it_was_at_the_end(row):
    scheduler, optimizer = row.build(10, 2)
    applied = run(scheduler, optimizer, 30)
    assert (applied[10:] == applied[10]).all()
    close(scheduler.values(np.array([10, 11, 10**6]))[0], applied[10, 0, 0])


@each_row
def test_an_array_is_the_scalars(row):
    scheduler, _ = row.build(40, 7)
    arrays = scheduler.values(np.arange(45))
    scalars = zip(*(scheduler.values(update) for update in range(45)), strict=True)
    for array, values in zip(arrays, scalars, strict=True):
        if array is not None:
            close(np.ones(45) * array, np.array(values, float), scale=1e-3 * BASE)


@each_row
def test_ten_million_updates(row):
    total, scheduler = 10**7, row.build(10**7, 10**5)[0]
    updates = np.array([0, 1, 10**5 - 1, 10**5, 10**5 + 1, total // 2, total - 1, total])
    lrs = np.ones(len(updates)) * scheduler.values(updates)[0]
    assert np.isfinite(lrs).all()
    assert (lrs >= 0).all()
    close(lrs, [float(scheduler.values(int(update))[0]) for update in updates])


# --- warm-up ---------------------------------------------------------------------------------------------------------


@each_row_with_ramp
def test_the_warm_up_has_its_documented_start_and_shape(row):
    lrs, warmup = row.curve(50, 4), 4
    start = row.kwargs.get("warmup_start_ratio")
    fraction, top = np.arange(warmup) / warmup, lrs[warmup]
    if row.has("early_peak"):  # transformers' own: counted from 1, unless it is told where to start
        fraction = (np.arange(warmup) + 1) / warmup if start is None else np.arange(warmup) / (warmup - 1)
        top = BASE
    if start is None:
        start = row.floor() / BASE if row.has("warmup_from_floor") else 0.0
    ramp = RAMPS[row.kwargs.get("warmup_type", "linear")](fraction)
    close(lrs[:warmup], top * (start + (1 - start) * ramp))
    assert lrs[: warmup + 1].argmax() == warmup - row.has("early_peak")


@each_row_with_warmup
def test_it_is_continuous_where_the_warm_up_ends(row):
    # The steepest ramp, 1-sqrt, ends with a step of 1 / sqrt(W); whatever jumps would not become small with W.
    for warmup in (100, 10_000, 1_000_000):
        scheduler, _ = row.build(10 * warmup, warmup)
        lrs, _ = scheduler.values(np.arange(warmup - 2, warmup + 3))
        assert np.abs(np.diff(lrs)).max() <= 1.001 * BASE / np.sqrt(warmup)


@each_row_with_warmup
def test_a_fraction_is_the_count_it_rounds_to(row):
    np.testing.assert_array_equal(row.curve(50, 0.2), row.curve(50, 10))
    np.testing.assert_array_equal(row.curve(50, 0.113), row.curve(50, 6))


# --- state -----------------------------------------------------------------------------------------------------------


def through_torch(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


# What a checkpoint of ours holds, what accelerate writes, what torch writes.
COPIES = [lambda state: json.loads(json.dumps(state)), lambda state: pickle.loads(pickle.dumps(state)), through_torch]


@each_row
def test_resumed_at_any_update_it_is_the_same(row):
    whole = run(*row.build(9, 3, groups=2), 12)
    first, first_optimizer = row.build(9, 3, groups=2)
    for stop in range(12):
        for through in COPIES:
            second, second_optimizer = row.build(9, 3, groups=2)
            second_optimizer.load_state_dict(through_torch(first_optimizer.state_dict()))
            second.load_state_dict(through(first.state_dict()))
            assert second.get_last_lr() == first.get_last_lr()
            np.testing.assert_array_equal(run(second, second_optimizer, 12 - stop), whole[stop:])
        run(first, first_optimizer, 1)


@pytest.mark.parametrize("name", ["cosine", "one_cycle", "mdlrc"])
@pytest.mark.parametrize(("stop", "by"), [*itertools.product([0, 5, 9], ["state", "last_epoch"])])
def test_resumed_into_an_optimizer_that_was_loaded_before_the_scheduler_was_built(name, stop, by):
    row = Row(name, {})
    first, optimizer = row.build(9, 3)
    whole, resumed = run(*row.build(9, 3), 12), row.optimizer()
    run(first, optimizer, stop)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    second = get_scheduler(name, resumed, 3, 9, last_epoch=-1 if by == "state" else stop - 1)
    if by == "state":
        second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(run(second, resumed, 12 - stop), whole[stop:])


@each_row
def test_it_pickles_with_its_optimizer(row):
    scheduler, optimizer = row.build(8, 2)
    run(scheduler, optimizer, 3)
    twin = pickle.loads(pickle.dumps(scheduler))
    np.testing.assert_array_equal(run(twin, twin.optimizer, 8), run(scheduler, optimizer, 8))


@each_row
def test_another_plan_is_refused_on_load(row):
    state = row.build(10, 2)[0].state_dict()
    with pytest.raises(LabError, match="num_training_steps 10 -> 20"):
        row.build(20, 2)[0].load_state_dict(state)


# --- tensors ---------------------------------------------------------------------------------------------------------


class CountSyncs(TorchDispatchMode):
    """Counts the reads of a tensor by the host, which is what makes it wait for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_reads_of_tensors_are_counted():
    with CountSyncs() as syncs:
        float(torch.ones(()))
    assert syncs.count == 1


@each_row
def test_a_tensor_learning_rate_is_filled_in_place_and_never_read(row):
    optimizer = row.optimizer()
    lr = optimizer.param_groups[0]["lr"] = torch.tensor(BASE, dtype=torch.float64)
    scheduler = get_scheduler(row.name, optimizer, row.warmup(2), 9, row.kwargs)
    optimizer._opt_called = True  # no optimizer.step(): it is the scheduler's own reads that are counted
    for update in range(1, 9):
        with CountSyncs() as syncs:
            scheduler.step()
        assert syncs.count == 0
        close(float(lr), row.curve(9, 2)[update])
    assert optimizer.param_groups[0]["lr"] is lr
    json.dumps(scheduler.state_dict())
