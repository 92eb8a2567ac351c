"""Every registered schedule, with each choice of each parameter; joins. Those that follow a metric: test_parity."""

import copy
import itertools
import json
import pickle
import re

import numpy as np
import pytest
import torch
from schedule_rows import BASE, COPIES, CountSyncs, Row, close, cos, rows, run, through_torch
from tables import cases

from diffusers_lrlab import get_scheduler, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.spec import format_spec, parse_spec
from diffusers_lrlab.schedules.audit import ScheduleAudit
from diffusers_lrlab.schedules.momentum import rounding_of
from diffusers_lrlab.schedules.registries import SCHEDULERS

RAMPS = {"linear": lambda x: x, "cosine": lambda x: 1 - cos(x), "1-sqrt": lambda x: 1 - np.sqrt(1 - x)}


each_row = cases("row", rows())


@each_row
@cases(("num_updates", "warmup"), [(37, 0), (37, 5), (40, 0.1)])
def test_the_optimizer_has_what_the_curve_promises(row, num_updates, warmup):
    applied = run(*row.build(num_updates, warmup, groups=2), num_updates)[:, :, 0]
    for group in range(2):
        # Floors that are rates scale with the group's, as in diffusers, but for torch's `eta_min`.
        alone = row.curve(num_updates, warmup, BASE * 2**group)
        promised = alone if row.has("floor_of_all") else row.curve(num_updates, warmup) * 2**group
        assert (promised.shape, promised.dtype) == ((num_updates,), np.float64)
        close(applied[:, group], promised)


@each_row
@cases(("num_updates", "warmup"), [(1, 0), (2, 0), (2, 1), (3, 2)])
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
@cases("warmup", [0, 6])
def test_it_stays_between_floor_and_peak_and_reaches_the_peak(row, warmup):
    lrs = row.curve(60, warmup)
    assert (lrs >= 0).all()
    assert (lrs[row.warmup(warmup) :] >= row.floor() * (1 - 1e-12)).all()
    if row.form == "heavy_ball":
        assert lrs.max() > BASE  # the compensation raises the rate as the momentum falls
    elif warmup or not row.has("early_peak"):
        assert lrs.max() == pytest.approx(BASE, rel=1e-12)


@each_row
def test_an_array_is_the_scalars_and_stays_at_its_end(row):
    scheduler, _ = row.build(40, 7)
    arrays = scheduler.values(np.arange(45))
    scalars = zip(*(scheduler.values(update) for update in range(45)), strict=True)
    for array, values in zip(arrays, scalars, strict=True):
        if array is not None:
            array = np.ones(45) * array
            close(array, np.array(values, float), scale=1e-3 * BASE)
            assert (array[40:] == array[40]).all()
    scheduler, updates = row.build(10**7, 10**5)[0], np.array([0, 10**5 - 1, 10**5, 10**5 + 1, 10**7 - 1, 10**7])
    lrs = np.ones(len(updates)) * scheduler.values(updates)[0]
    close(lrs, [float(scheduler.values(int(update))[0]) for update in updates])


@cases("row", rows("no_warmup", "rises"))
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


@cases("row", rows("no_warmup"))
def test_it_is_continuous_where_the_warm_up_ends(row):
    # The steepest ramp, 1-sqrt, ends with a step of 1 / sqrt(W); whatever jumps would not become small with W.
    for warmup in (100, 10_000, 1_000_000):
        scheduler, _ = row.build(10 * warmup, warmup)
        lrs, _ = scheduler.values(np.arange(warmup - 2, warmup + 3))
        assert np.abs(np.diff(lrs)).max() <= 1.001 * BASE / np.sqrt(warmup)


@pytest.mark.slow
@each_row
def test_resumed_at_any_update_it_is_the_same(row):
    whole = run(*row.build(9, 3, groups=2), 12)
    first, first_optimizer = row.build(9, 3, groups=2)
    for stop, through in zip(range(12), itertools.cycle(COPIES), strict=False):
        second, second_optimizer = row.build(9, 3, groups=2)
        second_optimizer.load_state_dict(through_torch(first_optimizer.state_dict()))
        second.load_state_dict(through(first.state_dict()))
        assert second.get_last_lr() == first.get_last_lr()
        np.testing.assert_array_equal(run(second, second_optimizer, 12 - stop), whole[stop:])
        run(first, first_optimizer, 1)


@cases("name", ["cosine", "one_cycle", "mdlrc"])
@cases(("stop", "by"), [(0, "state"), (5, "state"), (5, "last_epoch")])
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
            read = float(lr)
        assert syncs.count == 1
        close(read, row.curve(9, 2)[update])
    assert optimizer.param_groups[0]["lr"] is lr
    json.dumps(scheduler.state_dict())


def test_a_strict_audit_tells_both_values():
    for momentum, told in ((None, "expects 0.0002 \\("), (0.9, "0.0002, momentum 0.8 instead of 0.9 \\(")):
        with pytest.raises(LabError, match=f"At update 7 the optimizer has a learning rate of 0.0001 where .*{told}"):
            ScheduleAudit(strict=True).check(7, [(1e-4, 0.8)], [(2e-4, momentum)], [1e-3])


def test_the_audit_knows_the_rounding_of_rates_in_tensors():
    group = {"lr": torch.tensor(1e-4), "betas": (torch.tensor(0.9, dtype=torch.float64), 0.999)}
    assert rounding_of([{"lr": 1e-4}, {"lr": 1e-4, "momentum": 0.9}]) == 0.0
    assert rounding_of([{"lr": 1e-4}, group]) == 2**-23
    rounded = float(group["lr"])
    for lr, rounding, passes in ((rounded, 0.0, False), (rounded, 2**-23, True), (1.001e-4, 2**-23, False)):
        audit = ScheduleAudit()
        audit.check(0, [(lr, None)], [(1e-4, None)], [1e-4], rounding)
        assert audit.passed == passes
        assert audit.summary().endswith("within the rounding of the optimizer's tensors (1.2e-07).") == passes


def test_the_audit_measures_learning_rates_by_their_peak_and_momenta_as_they_are():
    audit = ScheduleAudit()
    audit.check(2, [(2e-4, 0.9), (0.0, None)], [(2e-4, 0.9), (0.0, None)], [1e-3, 0.0])  # a frozen group, too
    assert audit.passed
    audit.check(3, [(3e-4, 0.9), (1e-4, None)], [(2e-4, 0.8), (None, None)], [1e-3, 1e-5])
    audit.check(4, [(2e-4, 0.9)], [(1.9e-4, 0.9)], [1e-3])
    assert (audit.num_updates, audit.first_deviating_update) == (3, 3)
    assert audit.largest_lr_deviation == pytest.approx(0.1)
    assert audit.largest_momentum_deviation == pytest.approx(0.1)


TOTAL, WARMUP, BOUNDARY = 60, 6, 30
FRAME = ("min_lr", "eta_min", "lr_end", "warmup_type", "warmup_start_ratio")
# Every registered schedule of the learning rate and the clock alone, with each choice of each parameter.
PARTS = [row for row in rows("momentum") if not set(FRAME) & row.values[0].kwargs.keys()]


def join(schedules, boundaries, total=TOTAL, warmup=0, **kwargs):
    return lr_curve("join", BASE, warmup, total, {"schedules": schedules, "boundaries": boundaries, **kwargs})


def alone(spec, total):
    """The part as a run of its own; a floor in units of the learning rate is the whole's business."""
    name, kwargs = parse_spec(spec)
    if "min_lr" in SCHEDULERS[name].facts and "min_lr_ratio" not in kwargs:
        kwargs["min_lr"] = 0.0
    return BASE * lr_curve(name, 1.0, 0, total, kwargs)


@cases("row", PARTS)
def test_any_schedule_can_be_the_first_part_behind_the_warm_up_and_one_in_the_middle_at_a_smaller_scale(row):
    spec = format_spec(row.name, row.kwargs)
    lrs, first = join([spec, spec, "rex"], [20, 40], warmup=WARMUP, scales=[1.0, 0.5, 0.25]), alone(spec, 20 - WARMUP)
    close(lrs[WARMUP:], np.concatenate([first, 0.5 * alone(spec, 20), 0.25 * alone("rex", 20)]))
    top = BASE if row.has("early_peak") else first[0]  # which has begun to fall at its first update
    close(lrs[:WARMUP], top * np.arange(WARMUP) / WARMUP)


def test_one_cycle_without_its_momentum_is_a_part_like_others():
    spec = "one_cycle:cycle_momentum=false"
    close(join(["constant", spec], [BOUNDARY])[BOUNDARY:], alone(spec, TOTAL - BOUNDARY))


def test_floors_of_the_whole_and_of_a_part():
    plain = join(["constant", "linear"], [BOUNDARY])
    close(join(["constant", "linear"], [BOUNDARY], min_lr=BASE / 4), BASE / 4 + 0.75 * plain)
    close(join(["constant", "linear:min_lr_ratio=0.25"], [BOUNDARY]), BASE / 4 + 0.75 * plain)
    close(join(["constant", "linear"], [BOUNDARY], min_lr_ratio=0.25), BASE / 4 + 0.75 * plain)


INNER = 'join:{"schedules": ["linear", "rex:d=0.9"], "boundaries": [15], "scales": [1.0, 0.5]}'


@cases(
    "text",
    [
        "join:schedules=[constant|join:schedules=[linear|rex:d=0.9],boundaries=[0.5],scales=[1|0.5]],boundaries=[30]",
        f"join:{json.dumps({'schedules': ['constant', INNER], 'boundaries': [0.5]})}",
    ],
)
def test_joins_nest_in_either_form(text):
    expected = np.concatenate([BASE * np.ones(30), alone("linear", 15), alone("rex:d=0.9", 15) / 2])
    close(lr_curve(text, BASE, 0, TOTAL), expected)


@cases(
    ("kwargs", "message"),
    [
        ({"boundaries": []}, "join got 2 schedules, 0 boundaries and 2 scales. It takes one schedule or more, one boundary"),
        ({"schedules": ["linear"] * 3, "boundaries": [40, 20]}, "at the updates [40, 20]; they must increase"),
        ({"boundaries": [61]}, "boundaries at the updates [61]; they must increase and lie inside the run of 60"),
        ({"boundaries": [0.05]}, "boundaries at the updates [3]; the first must come after the 6 updates of warm-up"),
        ({"schedules": ["constant", "cosine:min_lr=1e-5"]}, "join cannot take min_lr inside 'cosine:min_lr=1e-5'"),
        ({"schedules": ["constant", "one_cycle"]}, "join cannot take 'one_cycle', which also sets the momentum"),
        ({"schedules": ["constant", "greedy"]}, "join cannot take 'greedy', which follows a metric"),
    ],
)
def test_joins_that_cannot_be(kwargs, message):
    with pytest.raises(LabError, match=re.escape(message)):
        join(**{"schedules": ["linear", "cosine"], "boundaries": [0.5], "warmup": WARMUP, **kwargs})


@cases(
    ("interpolation", "expected"),
    [
        ("linear", [0.2, 0.2, 0.2, 0.6, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [0.2, 0.2, 0.2, 0.6, 1, *cos([1 / 4, 1 / 2, 3 / 4]), 0, 0]),
        ("constant", [0.2, 0.2, 0.2, 0.2, 1, 1, 1, 1, 0, 0]),
    ],
)
@cases("updates", [[2, 4, 8], [0.2, 0.4, 0.8], [2, 0.4, 8]])
def test_piecewise_goes_through_its_points(interpolation, expected, updates):
    kwargs = {"updates": updates, "values": [0.2, 1.0, 0.0], "interpolation": interpolation}
    close(lr_curve("piecewise", BASE, 0, 10, kwargs), BASE * np.array(expected))


def test_piecewise_counts_from_the_start_of_the_run_and_warm_up_multiplies_it():
    kwargs = {"updates": [2, 6], "values": [1.0, 0.5], "min_lr": BASE / 10}
    shape = np.array([1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5])
    expected = (0.1 + 0.9 * shape) * np.minimum(np.arange(8) / 4, 1)
    close(lr_curve("piecewise", BASE, 4, 8, kwargs), BASE * expected)


@cases(("updates", "counts"), [([0, 1.0], [0, 8]), ([0.25, 1.0], [2, 8]), ([1, 8], [1, 8]), ([1], [1])])
def test_one_is_the_end_of_the_run_after_fractions_only(updates, counts):
    values = [1.0, 0.5][-len(counts) :]  # one point alone is a constant
    expected = BASE * np.interp(np.arange(8), counts, values)
    close(lr_curve("piecewise", BASE, 0, 8, {"updates": updates, "values": values}), expected)


def test_piecewise_has_a_value_for_each_point():
    with pytest.raises(LabError, match="piecewise got 3 updates and 2 values; give equally many"):
        lr_curve("piecewise", BASE, 0, 10, {"updates": [1, 2, 3], "values": [1.0, 0.5]})


def test_milestones_are_updates_of_the_run_or_fractions_in_any_order():
    expected = BASE * np.array([0, 0.25, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]) * [1, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    for milestones in ([4, 7], [0.7, 0.4], [4, 0.7]):
        close(lr_curve("multistep", BASE, 2, 10, {"milestones": milestones, "gamma": 0.5}), expected)
