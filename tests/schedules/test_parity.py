"""Schedules against those whose names they have, and the ones that follow a metric; formulas: docs/test_formulas.py."""

import copy
import inspect
import itertools
import json

import diffusers.optimization
import numpy as np
import pytest
import torch
import transformers.optimization
from hosts import at_least
from schedule_rows import BASE, COPIES, Row, close, run, settings, variants
from tables import cases
from torch.optim import lr_scheduler

from diffusers_lrlab import get_scheduler, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.schedules.registries import SCHEDULERS


def sgd():
    return Row("cosine", {}).optimizer()


def applied(make_scheduler, num_updates):
    """The learning rate in the optimizer at each update under another library's scheduler."""
    optimizer = sgd()
    return run(make_scheduler(optimizer), optimizer, num_updates)[:, 0, 0]


# --- diffusers and transformers --------------------------------------------------------------------------------------

LENGTHS = [(1, 0), (2, 1), (40, 0), (40, 7), (41, 40)]
LINEAR = [{}, {"f_min": 0.2}, {"f_min": 0.5, "f_max": 0.75}, {"f_max": 3.0}]
if "f_min" not in inspect.signature(diffusers.optimization.get_linear_schedule_with_warmup).parameters:
    del LINEAR[1:]
GRID = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    *(("linear", kwargs) for kwargs in LINEAR),
    *(("cosine", {"num_cycles": cycles}) for cycles in (0.5, 0.3, 1.0, 2.7)),
    *(("cosine_with_restarts", {"num_cycles": cycles}) for cycles in (1, 2, 3, 7)),
    *(("polynomial", kwargs) for kwargs in ({}, {"power": 2.0}, {"power": 0.5, "lr_end": 1e-4}, {"lr_end": 0.0})),
    *(("piecewise_constant", {"step_rules": rules}) for rules in ("1.0", "1:5,0.1", "0.5:3,1:20,0.1:30,0")),
]


@cases(("name", "kwargs"), GRID)
@cases(("num_updates", "warmup"), LENGTHS)
def test_diffusers_names_have_diffusers_values(name, kwargs, num_updates, warmup):
    optimization = diffusers.optimization
    clock = {"num_warmup_steps": warmup, "num_training_steps": num_updates}
    if "no_warmup" in SCHEDULERS[name].traits:
        clock, warmup = {}, 0
    elif name == "constant_with_warmup":
        del clock["num_training_steps"]
    function = optimization.TYPE_TO_SCHEDULER_FUNCTION[optimization.SchedulerType(name)]
    ours, _ = get_scheduler(name, sgd(), warmup, num_updates, kwargs).values(np.arange(num_updates + 1))
    close(ours, applied(lambda optimizer: function(optimizer, **clock, **kwargs), num_updates + 1))  # up to the very end


TRANSFORMERS = [
    ("linear", {}),
    ("polynomial", {"lr_end": 1e-5, "power": 3.0}),
    ("inverse_sqrt", {}),
    *(("inverse_sqrt", {"timescale": scale}) for scale in (50, 100_000) if at_least("transformers", 5, 0)),  # ignored before
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.5}),
    ("cosine_with_min_lr", {"min_lr": BASE / 3, "num_cycles": 1.3}),
    ("cosine_with_min_lr", {"min_lr": BASE, "num_cycles": 0.5}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.5}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.0, "num_cycles": 1.3}),
    ("cosine_warmup_with_min_lr", {"min_lr": BASE / 7, "warmup_lr_rate": 0.3, "num_cycles": 0.5}),
    ("cosine_warmup_with_min_lr", {"min_lr": BASE / 7, "warmup_lr_rate": 1.0, "num_cycles": 1.3}),
]
WSD = [
    {"num_decay_steps": steps, "warmup_type": warmup, "decay_type": decay, "min_lr_ratio": ratio, "num_cycles": cycles}
    for warmup, decay in itertools.product(("linear", "cosine", "1-sqrt"), repeat=2)
    for steps, ratio, cycles in ((1, 0.0, 0.5), (30, 0.5, 0.5), (10, 0.1, 1.3))
    if decay == "cosine" or cycles == 0.5  # which has no effect on the others, and is an error there
]


@cases(("name", "kwargs"), TRANSFORMERS)
@cases(("num_updates", "warmup"), LENGTHS)
def test_transformers_names_have_transformers_values(name, kwargs, num_updates, warmup):
    def theirs(optimizer):
        return transformers.optimization.get_scheduler(name, optimizer, warmup, num_updates, kwargs)

    close(lr_curve(name, BASE, warmup, num_updates, kwargs), applied(theirs, num_updates))


@cases("kwargs", WSD)
@cases("stable", [None, 3])
def test_warmup_stable_decay_is_transformers(kwargs, stable):
    def theirs(optimizer):
        total = 40 if stable is None else None  # transformers warns if it gets both
        return transformers.optimization.get_wsd_schedule(
            optimizer, 7, num_training_steps=total, num_stable_steps=stable, **kwargs
        )

    close(lr_curve("warmup_stable_decay", BASE, 7, 40, {"num_stable_steps": stable, **kwargs}), applied(theirs, 40))


# --- torch -----------------------------------------------------------------------------------------------------------

TORCH = [
    *(("step", "StepLR", {"step_size": size, "gamma": gamma}) for size, gamma in ((7, 0.5), (1, 1.0), (100, 0.1))),
    *(("multistep", "MultiStepLR", {"milestones": at, "gamma": 0.3}) for at in ([1], [30, 5], [8, 8, 90])),
    *(("exponential", "ExponentialLR", {"gamma": gamma}) for gamma in (0.97, 1.0)),
    *(
        ("cosine_annealing", "CosineAnnealingLR", {"T_max": period, "eta_min": floor})
        for period, floor in ((50, 1e-5), (20, 1e-4), (200, 0.0), (1, 0.0))
    ),
    *(
        ("cosine_annealing_warm_restarts", "CosineAnnealingWarmRestarts", {"T_0": first, "T_mult": factor, "eta_min": floor})
        for first, factor, floor in ((1, 1, 0.0), (2, 3, 1e-4), (7, 2, 0.0), (60, 2, 1e-4))
    ),
]


@cases(("name", "torch_class", "kwargs"), TORCH)
@cases("warmup", [0, 6])
def test_torchs_names_have_torchs_values_once_warm_up_is_over(name, torch_class, kwargs, warmup):
    theirs = applied(lambda optimizer: getattr(lr_scheduler, torch_class)(optimizer, **kwargs), 50)
    if name == "multistep":  # which counts from the start of the run
        close(lr_curve(name, BASE, 0, 50, kwargs), theirs)
    else:
        close(lr_curve(name, BASE, warmup, 50 + warmup, kwargs)[warmup:], theirs)


@cases("mode", ["triangular", "triangular2", "exp_range"])
@cases("sizes", [(5, 11), (1, 1), (60, 3)])
@cases("floor", [0.0, 2e-4])
def test_cyclic_is_torchs(mode, sizes, floor):
    kwargs = {"step_size_up": sizes[0], "step_size_down": sizes[1], "mode": mode}
    kwargs |= {"gamma": 0.95} if mode == "exp_range" else {}
    theirs = applied(lambda optimizer: lr_scheduler.CyclicLR(optimizer, floor, BASE, cycle_momentum=False, **kwargs), 50)
    close(lr_curve("cyclic", BASE, 0, 50, {"min_lr": floor, **kwargs}), theirs)


@cases(
    "kwargs",
    [
        {},
        {"pct_start": 0.17, "anneal_strategy": "linear", "div_factor": 10.0, "final_div_factor": 3.0},
        {"pct_start": 0.5, "three_phase": True, "base_momentum": 0.5, "max_momentum": 0.99},
        {"pct_start": 0.17, "three_phase": True, "anneal_strategy": "linear", "cycle_momentum": False},
        {"div_factor": 1.0, "three_phase": True},
    ],
)
@cases("total", [3, 50])
def test_one_cycle_is_torchs_with_its_momentum(kwargs, total):
    ours, theirs = (torch.optim.AdamW([torch.zeros(1)], lr=BASE) for _ in range(2))
    expected = run(lr_scheduler.OneCycleLR(theirs, BASE, total, **kwargs), theirs, total)
    close(run(get_scheduler("one_cycle", ours, 0, total, kwargs), ours, total), expected)


# --- groups of parameters with rates of their own ----------------------------------------------------------------------

polynomial = diffusers.optimization.get_polynomial_decay_schedule_with_warmup
with_min_lr = transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup
annealing, restarts = lr_scheduler.CosineAnnealingLR, lr_scheduler.CosineAnnealingWarmRestarts
OF_GROUPS = {
    "polynomial:lr_end=1e-5": lambda optimizer: polynomial(optimizer, 3, 12, lr_end=1e-5),
    "polynomial": lambda optimizer: polynomial(optimizer, 3, 12),
    "cosine_with_min_lr:min_lr=1e-4": lambda optimizer: with_min_lr(optimizer, 3, 12, min_lr=1e-4),
    "cosine_with_min_lr": lambda optimizer: with_min_lr(optimizer, 3, 12, min_lr_rate=0.1),
    "cosine_annealing:eta_min=1e-4": lambda optimizer: annealing(optimizer, 12, eta_min=1e-4),
    "cosine_annealing_warm_restarts:T_0=12,eta_min=1e-4": lambda optimizer: restarts(optimizer, 12, eta_min=1e-4),
}


def of_groups(*rates):
    groups = [{"params": [torch.zeros(1)], **({} if lr is None else {"lr": lr})} for lr in rates]
    return torch.optim.AdamW(groups, lr=BASE)


@cases("spec", OF_GROUPS)
def test_floors_of_groups_are_those_of_the_original(spec):
    ours, theirs = of_groups(None, BASE / 2, 2 * BASE), of_groups(None, BASE / 2, 2 * BASE)
    found = run(get_scheduler(spec, ours, 0 if "annealing" in spec else 3, 12), ours, 12)
    close(found, run(OF_GROUPS[spec](theirs), theirs, 12))


@cases("spec", [*OF_GROUPS, "rex:min_lr=1e-5", "cosine:min_lr_ratio=0.1"])
def test_a_frozen_group_stays_frozen(spec):
    optimizer = of_groups(None, 0.0)
    found = run(get_scheduler(spec, optimizer, 0, 12), optimizer, 12)[:, :, 0]
    assert (found[:, 1] == 0).all()
    assert (found[:, 0] > 0).any()


# --- schedules that follow a metric ----------------------------------------------------------------------------------
METRICS = [3.0, 2.0, 1.0, 1.5, 1.2, 1.2, 1.3, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2, 0.9, 1.8, 3.6]
FEEDBACK = [entry for entry in SCHEDULERS.values() if "feedback" in entry.traits]


def impatient(entry, kwargs):
    """With its patience, if it has any, short enough for a test."""
    takes = {parameter.name for parameter in entry.parameters}
    return Row(entry.name, kwargs | ({"patience": 1} if "patience" in takes else {}))


ROWS = [pytest.param(impatient(e, kwargs), id=" ".join([e.name, *kwargs])) for e in FEEDBACK for kwargs in variants(e)]
each_feedback_row, each_feedback_name = cases("row", ROWS), cases("row", [impatient(entry, {}) for entry in FEEDBACK])


def feed(scheduler, optimizer, metrics):
    """The learning rate at each update of a run that is validated after every one."""
    lrs = []
    for metric in metrics:
        lrs.append(settings(optimizer)[0][0])
        optimizer.step()
        scheduler.advance()
        scheduler.step(metric)
    return lrs


@each_feedback_row
def test_feedback_warms_up_by_the_clock_and_then_follows_the_metric(row):
    lrs = feed(*row.build(100, 4), METRICS)
    close(lrs[:5], BASE * np.arange(5) / 4)
    close(row.curve(6, 4), BASE * np.minimum(np.arange(6) / 4, 1))
    assert len(set(lrs[4:])) > 1
    assert min(lrs[4:]) >= row.floor()
    # Metrics of the warm-up, however good, leave no trace.
    assert feed(*row.build(100, 4), [-99.0, 99.0, -99.0, *METRICS[3:]]) == lrs


@pytest.mark.slow
@each_feedback_row
@cases("loaded_before_the_scheduler_is_built", [False, True])
def test_feedback_resumed_at_any_update_is_the_same(row, loaded_before_the_scheduler_is_built):
    whole = feed(*row.build(100, 3), METRICS)
    for stop, through in itertools.product(range(len(METRICS)), COPIES):
        first, first_optimizer = row.build(100, 3)
        feed(first, first_optimizer, METRICS[:stop])
        second, optimizer = row.build(100, 3)
        optimizer.load_state_dict(copy.deepcopy(first_optimizer.state_dict()))
        if loaded_before_the_scheduler_is_built:
            second = get_scheduler(row.name, optimizer, 3, 100, row.kwargs)
        second.load_state_dict(through(first.state_dict()))
        assert feed(second, optimizer, METRICS[stop:]) == whole[stop:]


@each_feedback_name
def test_feedback_keeps_a_tensor_learning_rate_and_a_state_of_numbers(row):
    json.dumps(row.build(10, 0)[0].state_dict(), allow_nan=False)
    optimizer = row.optimizer()
    lr = optimizer.param_groups[0]["lr"] = torch.tensor(BASE, dtype=torch.float64)
    scheduler = get_scheduler(row.name, optimizer, 3, 100, row.kwargs)
    close(feed(scheduler, optimizer, METRICS), feed(*row.build(100, 3), METRICS))
    assert optimizer.param_groups[0]["lr"] is lr
    json.dumps(scheduler.state_dict())


PLATEAU = {"factor": 0.3, "patience": 1, "threshold": 0.01, "cooldown": 1, "min_lr": 1e-4}
GREEDY_LR = getattr(transformers.optimization, "GreedyLR", None)
GREEDY = {"factor": 0.5, "patience": 1, "cooldown": 2, "warmup": 1, "min_lr": 1e-4, "max_lr": 3e-3, "reset_start": 1}


@cases(
    ("name", "theirs", "kwargs"),
    [
        *(("reduce_lr_on_plateau", lr_scheduler.ReduceLROnPlateau, {**PLATEAU, "mode": mode}) for mode in ("min", "max")),
        ("reduce_lr_on_plateau", lr_scheduler.ReduceLROnPlateau, {"patience": 0, "threshold_mode": "abs", "eps": 1e-5}),
        *(("greedy", GREEDY_LR, {**GREEDY, "mode": mode}) for mode in ("min", "max")),
        ("greedy", GREEDY_LR, {**GREEDY, "smooth": True, "window_size": 3}),
        ("greedy", GREEDY_LR, {"patience": 0, "threshold_mode": "rel", "min_lr": 0.0}),
    ],
)
@cases("warmup", [0, 4])
def test_feedback_is_torchs_and_transformers_behind_the_warm_up(name, theirs, kwargs, warmup):
    # A validation counts once the warm-up is over, the one after its last update included.
    ours = feed(*Row(name, kwargs).build(100, warmup), [99.0] * (warmup - 1) + METRICS * 2)
    scheduler, expected = theirs(optimizer := sgd(), **kwargs), []
    for metric in METRICS * 2:
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(metric)
    assert ours[warmup:] == expected[warmup > 0 :]
    assert len(set(expected)) > 2


@pytest.mark.skipif(GREEDY_LR is None, reason="this transformers has no GreedyLR")
@cases(("lr", "floor"), [(0.02, 2e-4), (1.0, 1e-3)])
def test_the_floor_of_greedy_is_a_hundredth_of_the_rate_or_that_of_transformers(lr, floor):
    scheduler = get_scheduler("greedy", torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr), 0, 100)
    assert scheduler.min_lrs == [pytest.approx(floor, rel=1e-12)]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_adaptive_follows_its_docstring_to_the_number(mode):
    # The first one is no change; -10 %: up; +5 %: down; within 1 %: stays; up to the ceiling; down to the floor.
    metrics = [1.0, 0.9, 0.945, 0.945, 0.9404, 0.5, 0.25, 0.5, 1.0, 2.0, 4.0]
    factors = [1, 2, 0.5, 0.5, 0.5, 1, 2, 0.5, 0.3, 0.3, 0.3]
    kwargs = {"increase": 2.0, "decrease": 0.25, "min_lr_ratio": 0.3, "max_lr_ratio": 2.0, "mode": mode}
    sign = 1 if mode == "min" else -1
    lrs = feed(*Row("adaptive", kwargs).build(100, 0), [sign * metric for metric in (*metrics, 0.0)])
    close(lrs[1:], BASE * np.array(factors))


@each_feedback_name
def test_feedback_needs_a_metric_and_more_than_a_count(row):
    with pytest.raises(LabError, match=r"needs a metric: call advance\(\) .*step\(validation_loss\)"):
        row.build(10, 0)[0].step()
    with pytest.raises(LabError, match="restore it by load_state_dict"):
        get_scheduler(row.name, sgd(), 0, 10, last_epoch=3)
