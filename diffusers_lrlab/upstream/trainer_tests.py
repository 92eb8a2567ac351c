"""Tests that come with the changes to other trainers."""

_RATES = """

def rates(scheduler, optimizer, num_updates, steps_per_update):
    found = []
    for _ in range(num_updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(steps_per_update):  # accelerate: once per process
            scheduler.step()
    return found

"""

REX = """\
import pytest
import torch

from musubi_tuner.modules.lr_schedulers import RexLR


@pytest.mark.parametrize("num_warmup_steps", [1, 2, 10, 50])
def test_the_warmup_starts_at_its_lowest_rate(num_warmup_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    RexLR(optimizer, max_lr=1.0, min_lr=0.01, num_steps=100, num_warmup_steps=num_warmup_steps)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
"""

_ARGS = """
ARGS = {
    **{"lr_scheduler": "constant_with_warmup", "lr_scheduler_type": "", "lr_scheduler_args": None},
    **{"lr_scheduler_num_cycles": 1, "lr_scheduler_power": 1.0, "lr_scheduler_timescale": None, "optimizer_type": "AdamW"},
    **{"lr_scheduler_min_lr_ratio": None, "max_train_steps": 40, "lr_decay_steps": 0},
}
"""

_WARMUP = (
    """\
import argparse

import pytest
import torch

{imports}
"""
    + _ARGS.replace("{", "{{").replace("}", "}}")
    + _RATES
    + """
@pytest.mark.parametrize("num_processes", [1, 4])
@pytest.mark.parametrize("lr_warmup_steps", [20, 0.5])
def test_the_warmup_lasts_as_many_updates_on_any_number_of_processes(num_processes, lr_warmup_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    args = argparse.Namespace(**ARGS, lr_warmup_steps=lr_warmup_steps)
    scheduler = {call}
    assert rates(scheduler, optimizer, 40, num_processes) == pytest.approx([min(n / 20, 1) for n in range(40)])
"""
)
WARMUP = _WARMUP.format(
    imports="from musubi_tuner.training.trainer_base import NetworkTrainer",
    call="NetworkTrainer.get_lr_scheduler(NetworkTrainer.__new__(NetworkTrainer), args, optimizer, num_processes)",
)
SD_SCRIPTS_WARMUP = _WARMUP.format(
    imports="from library.train_util import get_scheduler_fix", call="get_scheduler_fix(args, optimizer, num_processes)"
)

LENGTH = (
    '''\
"""The schedule ends with the run. train.py is a script, so that its statements are taken out of it."""
import ast
import types
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / 'train.py'


def make_scheduler(optimizer, config, steps_per_epoch):
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        body = getattr(node, 'body', [])
        body = body if isinstance(body, list) else []
        targets = [ast.unparse(each.targets[0]) if isinstance(each, ast.Assign) else '' for each in body]
        if 'scheduler_type' in targets:
            part = body[targets.index('scheduler_type'):targets.index('model_engine.lr_scheduler') + 1]
            names = {'torch': torch, 'optimizer': optimizer, 'config': config, 'steps_per_epoch': steps_per_epoch}
            names['model_engine'] = types.SimpleNamespace()
            exec(compile(ast.Module(part, []), str(SCRIPT), 'exec'), names)
            return names['model_engine'].lr_scheduler
    raise AssertionError('train.py does not make a scheduler')

'''
    + _RATES
    + """
@pytest.mark.parametrize('warmup_steps', [0, 5, 50])
@pytest.mark.parametrize('lr_scheduler', ['linear', 'cosine'])
def test_the_schedule_ends_with_the_run(lr_scheduler, warmup_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = {'lr_scheduler': lr_scheduler, 'epochs': 2, 'warmup_steps': warmup_steps}
    found = rates(make_scheduler(optimizer, config, 50), optimizer, 100, 1)
    assert max(found) == pytest.approx(1.0) and found.index(max(found)) == warmup_steps
    assert found[-1] <= 1.1 / (100 - warmup_steps)
"""
)

COSINE = (
    """\
import math
import types
import unittest
from unittest.mock import MagicMock

import torch

from simpletuner.helpers.training.custom_schedule import get_lr_scheduler

"""
    + _RATES
    + """
def cosine_rates(lr_warmup_steps, num_processes=1):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    args = types.SimpleNamespace(lr_scheduler="cosine", lr_warmup_steps=lr_warmup_steps, max_train_steps=100, lr_end=4e-7)
    accelerator = types.SimpleNamespace(num_processes=num_processes)
    scheduler = get_lr_scheduler(args, optimizer, accelerator, MagicMock(), global_step=0)
    return rates(scheduler, optimizer, 100, num_processes)


def expected(lr_warmup_steps):
    wave = [(1 + math.cos(math.pi * n / (100 - lr_warmup_steps))) / 2 for n in range(100 - lr_warmup_steps)]
    return [1e-4 * n / lr_warmup_steps for n in range(lr_warmup_steps)] + [4e-7 + (1e-4 - 4e-7) * y for y in wave]


class TestCosine(unittest.TestCase):
    def test_it_rises_in_its_warmup_and_falls_once(self):
        for warmup, processes in ((0, 1), (20, 1), (20, 4)):
            for found, right in zip(cosine_rates(warmup, processes), expected(warmup)):
                self.assertAlmostEqual(found, right, places=12)

    def test_a_warmup_longer_than_the_run_is_left_out(self):
        for found, right in zip(cosine_rates(400_000), expected(0)):
            self.assertAlmostEqual(found, right, places=12)
"""
)
