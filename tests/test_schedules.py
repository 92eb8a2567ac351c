"""Every registered schedule, by its registration alone, and the edges by hand."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusers_lrlab import Progress, get_scheduler, list_schedulers, lr_curve
from diffusers_lrlab.errors import LabError
from diffusers_lrlab.progress import resolve_warmup_updates
from diffusers_lrlab.schedules.catalogue import SCHEDULERS
from diffusers_lrlab.schedules.feedback import FeedbackSchedule

BASE = 1e-3
WITH_WARMUP = [name for name in SCHEDULERS if "no_warmup" not in SCHEDULERS[name].traits]


def make_optimizer(lr=BASE, groups=1):
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr * 2**group} for group in range(groups)])


def run(scheduler, optimizer, num_updates, metric=1.0):
    """The learning rate in the optimizer at the moment of each of its steps, for every group."""
    lrs = []
    for _ in range(num_updates):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if isinstance(scheduler, FeedbackSchedule):
            scheduler.advance()
        else:
            scheduler.step()
    return np.array(lrs)


def simulate(name, num_updates, warmup=0, groups=1, **kwargs):
    optimizer = make_optimizer(groups=groups)
    return run(get_scheduler(name, optimizer, warmup, num_updates, kwargs), optimizer, num_updates)


# --- every schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_schedulers())
@pytest.mark.parametrize(("num_updates", "warmup"), [(1, 0), (2, 1), (37, 0), (37, 5), (100, 0.1)])
def test_the_optimizer_has_what_the_curve_promises(name, num_updates, warmup):
    if "no_warmup" in SCHEDULERS[name].traits:
        warmup = 0
    promised = lr_curve(name, BASE, warmup, num_updates)
    applied = simulate(name, num_updates, warmup, groups=2)
    assert promised.shape == (num_updates,)
    assert promised.dtype == np.float64
    np.testing.assert_allclose(applied[:, 0], promised, rtol=1e-12, atol=1e-18)
    if name != "polynomial":  # diffusers scales it by the optimizer's first learning rate
        np.testing.assert_allclose(applied[:, 1], 2 * promised, rtol=1e-12, atol=1e-18)
    assert (promised >= 0).all()
    assert promised.max() <= BASE * (1 + 1e-12)


@pytest.mark.parametrize("name", WITH_WARMUP)
def test_warm_up_is_linear_and_peaks_exactly_where_asked(name):
    lrs = simulate(name, 50, warmup=10)[:, 0]
    np.testing.assert_allclose(lrs[:10], BASE * np.arange(10) / 10, rtol=1e-12)
    assert lrs[10] == BASE
    assert lrs.argmax() == 10


@pytest.mark.parametrize("name", WITH_WARMUP)
def test_warm_up_as_a_fraction(name):
    np.testing.assert_array_equal(simulate(name, 50, warmup=0.2), simulate(name, 50, warmup=10))


@pytest.mark.parametrize("name", WITH_WARMUP)
@pytest.mark.parametrize("warmup", [10, 11, -1, 2.5, float("nan")])
def test_warm_up_that_does_not_fit_is_an_error(name, warmup):
    with pytest.raises(LabError, match=r"(?i)warm-up"):
        simulate(name, 10, warmup)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if "no_warmup" in SCHEDULERS[name].traits])
def test_warm_up_is_refused_where_it_would_be_ignored(name):
    with pytest.raises(LabError, match="has no warm-up"):
        simulate(name, 10, warmup=2)


@pytest.mark.parametrize("name", list_schedulers())
def test_state_round_trip_at_every_update(name):
    def make():
        optimizer = make_optimizer()
        warmup = 0 if "no_warmup" in SCHEDULERS[name].traits else 3
        return get_scheduler(name, optimizer, warmup, 12), optimizer

    scheduler, optimizer = make()
    whole = run(scheduler, optimizer, 12)
    for stop in range(12):
        first, first_optimizer = make()
        run(first, first_optimizer, stop)
        # JSON is what a checkpoint holds, pickle what accelerate writes.
        for copy in (lambda state: json.loads(json.dumps(state)), lambda state: pickle.loads(pickle.dumps(state))):
            second, second_optimizer = make()
            second_optimizer.load_state_dict(first_optimizer.state_dict())
            second.load_state_dict(copy(first.state_dict()))
            np.testing.assert_array_equal(run(second, second_optimizer, 12 - stop), whole[stop:])


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if not {"host", "feedback"} & SCHEDULERS[name].traits])
class TestCurves:
    def test_past_the_end_it_stays(self, name):
        optimizer = make_optimizer()
        lrs = run(get_scheduler(name, optimizer, 2, 10), optimizer, 30)[:, 0]
        assert (lrs[10:] == lrs[10]).all()

    def test_an_array_is_the_scalars(self, name):
        kwargs = SCHEDULERS[name].resolve({})
        curve = SCHEDULERS[name].factory
        array = curve(Progress(np.arange(40), 40, 7), BASE, **kwargs)
        # Python's and numpy's power differ in the last bit.
        np.testing.assert_allclose(array, [curve(Progress(n, 40, 7), BASE, **kwargs) for n in range(40)], rtol=1e-15)

    def test_it_never_rises_after_warm_up(self, name):
        assert (np.diff(simulate(name, 60, warmup=5)[5:, 0]) <= 0).all()

    def test_a_tensor_learning_rate_is_filled_in_place(self, name):
        lr = torch.tensor(BASE, dtype=torch.float64)
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=lr, capturable=False, foreach=False)
        run(get_scheduler(name, optimizer, 0, 5), optimizer, 4)
        assert optimizer.param_groups[0]["lr"] is lr
        assert float(lr) == pytest.approx(lr_curve(name, BASE, 0, 5)[4], rel=1e-12)

    def test_another_plan_is_refused_on_load(self, name):
        state = get_scheduler(name, make_optimizer(), 0, 10).state_dict()
        with pytest.raises(LabError, match="num_training_steps 10 -> 20"):
            get_scheduler(name, make_optimizer(), 0, 20).load_state_dict(state)

    def test_pickles(self, name):
        scheduler = get_scheduler(name, make_optimizer(), 2, 10)
        assert pickle.loads(pickle.dumps(scheduler)).get_last_lr() == scheduler.get_last_lr()


# --- parity with torch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "torch_class", "kwargs"),
    [
        ("step", "StepLR", {"step_size": 7, "gamma": 0.5}),
        ("step", "StepLR", {"step_size": 1, "gamma": 1.0}),
        ("step", "StepLR", {"step_size": 100}),
        ("exponential", "ExponentialLR", {"gamma": 0.97}),
        ("exponential", "ExponentialLR", {"gamma": 0.5}),
        ("cosine_annealing", "CosineAnnealingLR", {"T_max": 50}),
        ("cosine_annealing", "CosineAnnealingLR", {"T_max": 50, "eta_min": 1e-5}),
        ("cosine_annealing", "CosineAnnealingLR", {"T_max": 20, "eta_min": 1e-4}),
    ],
)
def test_torch_names_have_torchs_values(name, torch_class, kwargs):
    optimizer = make_optimizer(groups=2)
    reference = run(getattr(torch.optim.lr_scheduler, torch_class)(optimizer, **kwargs), optimizer, 50)
    np.testing.assert_allclose(simulate(name, 50, groups=2, **kwargs), reference, rtol=1e-12, atol=1e-17)


@pytest.mark.parametrize("warmup", [0, 4])
def test_plateau_is_torchs_behind_the_warm_up(warmup):
    metrics = [3.0, 2.0, 2.0, 2.0, 2.0, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9]
    kwargs = {"factor": 0.3, "patience": 1, "threshold": 0.01, "cooldown": 1, "min_lr": 1e-4}
    ours_optimizer, torch_optimizer = make_optimizer(), make_optimizer()
    ours = get_scheduler("reduce_lr_on_plateau", ours_optimizer, warmup, 100, kwargs)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(torch_optimizer, **kwargs)
    for _ in range(warmup):
        ours.step(99.0)  # validations during warm-up are not counted
        ours.advance()
    for metric in metrics:
        ours.advance()
        ours.step(metric)
        theirs.step(metric)
        assert ours_optimizer.param_groups[0]["lr"] == torch_optimizer.param_groups[0]["lr"]
    assert ours_optimizer.param_groups[0]["lr"] < BASE


def test_plateau_without_a_metric_says_what_to_do():
    scheduler = get_scheduler("reduce_lr_on_plateau", make_optimizer(), 0, 10)
    with pytest.raises(LabError, match=r"needs a metric: .*step\(validation_loss\)"):
        scheduler.step()


# --- exact values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_updates", "warmup", "kwargs", "expected"),
    [
        ("step", 6, 0, {}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
        ("step", 5, 2, {"step_size": 1, "gamma": 0.5}, [0, 0.5, 1, 0.5, 0.25]),
        ("exponential", 4, 0, {"gamma": 0.5}, [1, 0.5, 0.25, 0.125]),
        ("exponential", 5, 1, {"gamma": 0.1}, [0, 1, 0.1, 0.01, 0.001]),
        ("cosine_annealing", 4, 0, {}, [1, 0.8535533905932737, 0.5, 0.14644660940672627]),
        ("cosine_annealing", 3, 1, {"eta_min": 5e-4}, [0, 1, 0.75]),
        ("cosine", 4, 0, {}, [1, 0.8535533905932737, 0.5, 0.14644660940672627]),
        ("linear", 4, 0, {"f_min": 0.5}, [1, 0.875, 0.75, 0.625]),
        ("polynomial", 4, 0, {"power": 2.0, "lr_end": 0.0}, [1, 0.5625, 0.25, 0.0625]),
        ("piecewise_constant", 5, 0, {"step_rules": "1:2,0.1:4,0.01"}, [1, 1, 0.1, 0.1, 0.01]),
        ("constant", 2, 0, {}, [1, 1]),
        ("constant_with_warmup", 4, 2, {}, [0, 0.5, 1, 1]),
        ("cosine_with_restarts", 4, 0, {"num_cycles": 2}, [1, 0.5, 1, 0.5]),
        ("reduce_lr_on_plateau", 4, 2, {}, [0, 0.5, 1, 1]),
    ],
)
def test_exact_arrays(name, num_updates, warmup, kwargs, expected):
    lrs = simulate(name, num_updates, warmup, **kwargs)[:, 0]
    np.testing.assert_allclose(lrs, BASE * np.array(expected), rtol=1e-12, atol=1e-19)


def test_exponential_ends_at_one_percent_unless_told():
    optimizer = make_optimizer()
    lrs = run(get_scheduler("exponential", optimizer, 0, 100), optimizer, 101)[:, 0]
    assert lrs[100] == pytest.approx(0.01 * BASE, rel=1e-12)


# --- warm-up arithmetic ----------------------------------------------------------------------------------------------


@given(st.integers(2, 10**6), st.data())
def test_warm_up_counts_and_fractions_agree(total, data):
    updates = data.draw(st.integers(0, total - 1))
    assert resolve_warmup_updates(updates, total) == updates
    if 0 < updates:
        assert resolve_warmup_updates(updates / total, total) == updates


# --- asking for it wrongly -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("cosin", {}, "Did you mean 'cosine'"),
        ("step", {"step": 3}, "does not take 'step': it takes step_size, gamma. Did you mean 'step_size'"),
        ("step:gamma=0.5", {"gamma": 0.5}, "'gamma' is given twice"),
        ("step:gamma=1.5", {}, r"gamma=1.5; allowed: float in \(0, 1\]"),
        ("cosine", {"power": 2}, "does not take 'power'"),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
    ],
)
def test_wrong_requests(name, kwargs, message):
    with pytest.raises(LabError, match=message):
        get_scheduler(name, make_optimizer(), 0, 10, kwargs)


def test_the_length_of_the_run_is_needed():
    with pytest.raises(LabError, match="needs num_training_steps"):
        get_scheduler("cosine", make_optimizer())
    assert get_scheduler("constant", make_optimizer()).get_last_lr() == [BASE]
