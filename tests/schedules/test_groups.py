"""Groups of parameters with rates of their own: the same values as in diffusers, transformers and torch."""

import pytest
import torch
from diffusers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from diffusers_lrlab import get_scheduler

UPDATES, WARMUP = 12, 3
polynomial = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType("polynomial")]
with_min_lr = get_cosine_with_min_lr_schedule_with_warmup
REFERENCES = {
    "polynomial:lr_end=1e-5": lambda optimizer: polynomial(optimizer, WARMUP, UPDATES, lr_end=1e-5),
    "polynomial": lambda optimizer: polynomial(optimizer, WARMUP, UPDATES),
    "cosine_with_min_lr:min_lr=1e-4": lambda optimizer: with_min_lr(optimizer, WARMUP, UPDATES, min_lr=1e-4),
    "cosine_with_min_lr": lambda optimizer: with_min_lr(optimizer, WARMUP, UPDATES, min_lr_rate=0.1),
    "cosine_annealing:eta_min=1e-4": lambda optimizer: CosineAnnealingLR(optimizer, UPDATES, eta_min=1e-4),
    "cosine_annealing_warm_restarts:T_0=12,eta_min=1e-4": lambda optimizer: CosineAnnealingWarmRestarts(
        optimizer, UPDATES, eta_min=1e-4
    ),
}


def optimizer_of(*rates, default=1e-3):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **({} if lr is None else {"lr": lr})} for lr in rates]
    return torch.optim.AdamW(groups, lr=default)


def rates_of(scheduler, optimizer):
    rows = []
    for _ in range(UPDATES):
        rows.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("spec", REFERENCES)
def test_floors_of_groups_are_those_of_the_original(spec):
    rates = (None, 5e-4, 2e-3)
    ours, theirs = optimizer_of(*rates), optimizer_of(*rates)
    warmup = 0 if "annealing" in spec else WARMUP
    found = rates_of(get_scheduler(spec, ours, warmup, UPDATES), ours)
    torch.testing.assert_close(found, rates_of(REFERENCES[spec](theirs), theirs), rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("spec", [*REFERENCES, "rex:min_lr=1e-5", "cosine:min_lr_ratio=0.1"])
def test_a_frozen_group_stays_frozen(spec):
    optimizer = optimizer_of(None, 0.0)
    found = rates_of(get_scheduler(spec, optimizer, 0, UPDATES), optimizer)
    assert found[:, 1].eq(0).all()
    assert found[:, 0].gt(0).any()
