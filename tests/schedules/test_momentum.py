"""Momentum schedules: the formulas, what the optimizer has when it steps, and what is refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedule_rows import BASE, CountSyncs, close, run, settings
from tables import cases
from torch.optim import lr_scheduler
from transformers.optimization import Adafactor as HFAdafactor

from diffusers_lrlab import get_momentum_scheduler, get_scheduler, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.progress import Progress
from diffusers_lrlab.schedules.schedule import resolve_schedule


def weights():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    return [parameter]


def adamw(beta1=0.9, **kwargs):
    return torch.optim.AdamW(weights(), lr=BASE, betas=(beta1, 0.999), **kwargs)


def demon(beta, p):
    return beta * (1 - p) / ((1 - beta) + beta * (1 - p))


def clocks():
    """Length of the run, warm-up, update."""
    return st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, n)))


@given(st.floats(0.01, 0.9999), st.just(0.0) | st.floats(0, 0.99), clocks())
def test_the_weight_of_a_fresh_gradient_stays_what_it_was(beta, floor, clock):
    total, warmup, update = clock
    for form, keeps in (("ema", lambda b: 1 - b), ("heavy_ball", lambda b: 1 / (1 - b))):
        schedule = resolve_schedule("mdlrc", {"min_momentum": floor, "momentum_form": form})
        lr, momentum = schedule.at(Progress(update, total, warmup), 1.0, beta)
        ramp = min(update / warmup, 1) if warmup else 1
        assert lr * keeps(momentum) == pytest.approx(ramp * keeps(beta), rel=1e-12)
        assert min(floor, beta) <= momentum <= beta * (1 + 1e-15)
        if floor == 0:
            p = max(update - warmup, 0) / (total - warmup)
            assert momentum == pytest.approx(demon(beta, p), abs=1e-12)
            assert form == "heavy_ball" or lr == pytest.approx(ramp * (1 - beta * p), rel=1e-9)


@cases("name", ["demon", "mdlrc", "mdlrc_linear"])
def test_a_floor_of_the_momentum_holds(name):
    kwargs = ({}, {"min_momentum": 0.3})
    free, held = (get_momentum_scheduler(name, adamw(), 3, 20, own).values(np.arange(25))[1] for own in kwargs)
    close(held, np.maximum(free, 0.3))
    assert free[-1] == free[20] == 0


EXPECTED = {  # momentum and factor on the learning rate at beta, p
    "constant": lambda beta, p: (beta, 1),
    "demon": lambda beta, p: (demon(beta, p), 1),
    "mdlrc": lambda beta, p: (demon(beta, p), 1 - beta * p),
    "mdlrc:momentum_form=heavy_ball": lambda beta, p: (demon(beta, p), 1 / (1 - beta * p)),
    "mdlrc_lr_only": lambda beta, p: (beta, 1 - beta * p),
    "mdlrc_linear": lambda beta, p: (beta * (1 - p), 1 - p),
}


def adamw_of_tensors():
    lr, *betas = (torch.tensor(value, dtype=torch.float64) for value in (BASE, 0.9, 0.999))
    return torch.optim.AdamW(weights(), lr, tuple(betas), foreach=False)


def muon(**arguments):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return torch.optim.Muon(weights(), **arguments)


ADAFACTOR = {"lr": BASE, "relative_step": False, "scale_parameter": False}
EMA = ("demon", "mdlrc", "mdlrc_lr_only", "mdlrc_linear", "constant")
HEAVY_BALL = ("demon", "mdlrc:momentum_form=heavy_ball", "mdlrc_linear", "constant")
OPTIMIZERS = {
    "Adam": (lambda: torch.optim.Adam(weights(), lr=BASE), EMA),
    "AdamW": (lambda: adamw(0.95), EMA),
    "AdamW of tensors": (adamw_of_tensors, EMA),
    "NAdam": (lambda: torch.optim.NAdam(weights(), lr=BASE), EMA),
    "RAdam": (lambda: torch.optim.RAdam(weights(), lr=BASE), EMA),
    "transformers' Adafactor": (lambda: HFAdafactor(weights(), beta1=0.8, **ADAFACTOR), EMA),
    "SGD": (lambda: torch.optim.SGD(weights(), lr=BASE, momentum=0.9), HEAVY_BALL),
    "Nesterov": (lambda: torch.optim.SGD(weights(), lr=BASE, momentum=0.8, nesterov=True), HEAVY_BALL),
    "RMSprop": (lambda: torch.optim.RMSprop(weights(), lr=BASE, momentum=0.9), HEAVY_BALL),
    "Muon": (lambda: muon(lr=BASE), ("demon", "constant")),
}


def watch(optimizer):
    """Records what the optimizer has each time it steps."""
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(settings(optimizer)[0]))
    return seen


@cases(("kind", "spec"), [(kind, spec) for kind, (_, specs) in OPTIMIZERS.items() for spec in specs])
def test_the_optimizer_has_both_numbers_when_it_steps(kind, spec):
    optimizer = OPTIMIZERS[kind][0]()
    beta, seen = settings(optimizer)[0][1], watch(optimizer)
    scheduler = get_momentum_scheduler(spec, optimizer, 2, 10, lr_scheduler="constant_with_warmup")
    run(scheduler, optimizer, 10)
    expected = np.array([EXPECTED[spec](beta, p) for p in np.maximum(np.arange(10) - 2, 0) / 8])
    ramp = np.minimum(np.arange(10) / 2, 1)
    close(seen, np.stack([BASE * ramp * expected[:, 1], expected[:, 0]], axis=1))


@cases("spec", ["demon", "mdlrc", "mdlrc_lr_only", "mdlrc_linear", "one_cycle"])
def test_tensors_are_filled_in_place_and_never_read(spec):
    optimizer = adamw_of_tensors()
    scheduler, group = get_momentum_scheduler(spec, optimizer, 2, 8), optimizer.param_groups[0]
    lr, beta1 = group["lr"], group["betas"][0]
    optimizer.step()
    for update in range(1, 8):
        with CountSyncs() as syncs:
            scheduler.step()
        assert syncs.count == 0
        close([float(lr), float(beta1)], [float(value) for value in scheduler.values(update)])
    assert group["lr"] is lr
    assert group["betas"][0] is beta1
    json.dumps(scheduler.state_dict())


def test_each_group_starts_from_its_own_momentum():
    optimizer = torch.optim.AdamW([{"params": weights(), "betas": (beta, 0.99)} for beta in (0.5, 0.9)], lr=BASE)
    applied = run(get_scheduler("mdlrc", optimizer, 0, 4), optimizer, 4)
    for group, beta in enumerate((0.5, 0.9)):
        close(applied[:, group, 1], demon(beta, np.arange(4) / 4))
        close(applied[:, group, 0], BASE * (1 - beta * np.arange(4) / 4))


def test_the_momentum_that_a_run_began_with_is_saved():
    first, second = adamw(0.9), adamw(0.5)
    saved, resumed = (get_scheduler("mdlrc", optimizer, 0, 8) for optimizer in (first, second))
    run(saved, first, 3)
    resumed.load_state_dict(saved.state_dict())
    assert second.param_groups[0]["initial_momentum"] == 0.9
    close(run(resumed, second, 5), run(saved, first, 5))


def stand_in(name):
    """An optimizer of another class name, for packages that may not be there."""
    return type(name, (torch.optim.AdamW,), {})(weights(), lr=BASE)


NONE = "has none: give it one, "
SIGN = "the compensation would have the wrong sign. Give momentum_form="


@cases(
    ("make", "spec", "message"),
    [
        (lambda: torch.optim.Adagrad(weights()), "demon", f"needs an optimizer with momentum, and this Adagrad {NONE}"),
        (lambda: HFAdafactor(weights(), **ADAFACTOR), "mdlrc", f"this Adafactor {NONE}such as beta1=0.9"),
        (lambda: stand_in("AdamWScheduleFree"), "demon", "its beta1 interpolates between two sequences of weights"),
        (muon, "mdlrc", "which Muon normalises away. Use 'demon'."),
        (lambda: torch.optim.SGD(weights(), momentum=0.9), "mdlrc", f"does not suit SGD, .* {SIGN}heavy_ball"),
        (lambda: torch.optim.Adam(weights()), "mdlrc:momentum_form=heavy_ball", f"does not suit Adam, .* {SIGN}ema."),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(make, spec, message):
    for get in (get_momentum_scheduler, get_scheduler):
        with pytest.raises(LabError, match=message):
            get(spec, make(), 0, 10)


@cases(
    ("momentum", "lr_scheduler", "message"),
    [
        ("demon", "one_cycle", "'one_cycle' sets the momentum, and so does .*'demon'. Give it cycle_momentum=false"),
        ("mdlrc", "reduce_lr_on_plateau", "'mdlrc' sets the learning rate, and so does the schedule 'reduce_lr_on_plateau'"),
        ("demon", "greedy", "follows a metric: build a momentum scheduler beside it, without lr_scheduler"),
    ],
)
def test_two_things_that_drive_one_number_are_refused(momentum, lr_scheduler, message):
    with pytest.raises(LabError, match=message):
        get_momentum_scheduler(momentum, adamw(), 0, 10, lr_scheduler=lr_scheduler)


@cases("spec, first", [("demon", True), ("one_cycle", False)])
def test_a_momentum_schedule_leaves_the_rate_to_a_foreign_scheduler(spec, first):
    optimizer, alone, n = adamw(), adamw(), np.arange(8)
    makers = [
        lambda: get_momentum_scheduler(spec, optimizer, 0, 8),
        lambda: lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 2, 1) * 0.9**n),
    ]
    schedulers, seen = [make() for make in makers[:: 1 if first else -1]], watch(optimizer)
    for _ in n:
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    close([lr for lr, _ in seen], BASE * np.minimum(n / 2, 1) * 0.9**n)
    of_torch = run(lr_scheduler.OneCycleLR(alone, BASE, 8), alone, 8)[:, 0, 1]
    momenta = of_torch if spec == "one_cycle" else np.ones(8) * EXPECTED[spec](0.9, n / 8)[0]
    close([momentum for _, momentum in seen], momenta)


@pytest.mark.parametrize(
    ("lr_scheduler", "together", "alone"),
    [("inverse_sqrt:timescale=10", 0.05, 0.5), ("cosine:min_lr_ratio=0.2", 0.2, 0.2), ("rex", 0, 0)],
)
def test_a_product_of_two_decays_warns_with_both_ends(lr_scheduler, together, alone):
    message = f"together they end at {together:g} of the peak, '.*' alone at {alone:g}. Use 'constant_with_warmup' beside"
    with pytest.warns(UserWarning, match=message):
        scheduler = get_momentum_scheduler("mdlrc", adamw(), 0, 30, lr_scheduler=lr_scheduler)
    lrs, _ = scheduler.values(np.arange(31))
    assert lrs[30] == pytest.approx(together * BASE, abs=1e-15)
    if "ratio" not in lr_scheduler:  # a floor holds for the product
        close(lrs[:30], lr_curve(lr_scheduler, BASE, 0, 30) * (1 - 0.9 * np.arange(30) / 30))
