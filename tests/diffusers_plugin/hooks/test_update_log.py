"""Gradient norms and effective learning rates of a script's updates."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from diffusers_lrlab import get_optimizer
from diffusers_lrlab.diffusers_plugin.hooks.clock import HostClock
from diffusers_lrlab.diffusers_plugin.hooks.update_log import UpdateLog, effective_lr
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.host.run import HostRun

OPTIONAL = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("lion_pytorch", "prodigyopt", "schedulefree")),
    reason="the optimizers of other packages are not installed",
)


SKIPPING = """
import math
import torch
from accelerate import Accelerator

def main(global_step):
    accelerator = Accelerator(cpu=True)
    accelerator.scaler, accelerator.trackers = torch.amp.GradScaler("cpu", init_scale=4.0), ["one"]
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for overflows in (True, False, True, False):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2)).sum())
            if overflows:
                model.weight.grad.fill_(math.inf)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        global_step += 1
        accelerator.log({"own": 1}, step=global_step)

main(5)
"""


@OPTIONAL
def test_effective_rates():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert effective_lr(torch.optim.AdamW([parameter]).param_groups[0]) is None
    for name in ("prodigy", "schedulefree_adamw"):
        optimizer = get_optimizer(name, [parameter], 1.0)
        for _ in range(5):
            parameter.grad = torch.ones(3)
            optimizer.step()
        group = optimizer.param_groups[0]
        assert effective_lr(group) == (group["d"] * 1.0 if name == "prodigy" else group["scheduled_lr"])


def test_norms_are_read_once_a_row():
    """Those that overflowed are left out."""
    rows = []
    accelerator = SimpleNamespace(trackers=["one"])
    run = SimpleNamespace(accelerator=accelerator, optimizer=None, log=lambda values, update: rows.append((update, values)))
    log = UpdateLog(SimpleNamespace(run=run, counts=False, count_updates=lambda: 300))
    for norm in (1.0, 2.0, 6.0, 4.0, float("inf"), 2.0, 1.0):
        log._norm = torch.tensor(norm)
        log._after_update()
    assert rows == [(3, {"grad_norm": 3.0}), (6, {"grad_norm": 3.0})]
    assert log.report() == "Gradient norm before clipping: 2.67 on average, 1 at the end, and at most 6, at update 3."


@pytest.mark.parametrize("used", [True, False])
def test_a_script_that_clips_nothing_is_told_once(capsys, used):
    """Iterators that the optimizer has consumed; a fresh iterator is clipped as without the hook."""
    with Patches() as patches:
        log = UpdateLog(HostClock(HostRun(patches=patches), fix=False, strict=False))
        log.install()
        accelerator, parameter = Accelerator(cpu=True), torch.nn.Parameter(torch.ones(4))
        for _ in range(2):
            parameter.grad = torch.ones(4)
            parameters = iter([] if used else [parameter])
            accelerator.clip_grad_norm_(parameters, 1.0)
            assert parameter.grad[0] == (1.0 if used else pytest.approx(0.5))
            assert log._norm == (None if used else 2.0)
    assert capsys.readouterr().err.count("no gradient is clipped") == used


@pytest.mark.parametrize("first", ["5", "torch.tensor(5)"])
def test_no_step_of_the_tracker_is_before_one_of_the_script(monkeypatch, first):
    """Which counts updates that a gradient scaler left out, and after a resume those before it: a tracker would drop it."""
    logged, script = [], ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    with Patches() as patches:
        patches.replace(Accelerator, "log", lambda accelerator, values, step: logged.append((*values, int(step))))
        clock = HostClock(HostRun(patches=patches), fix=False, strict=False, num_updates=4)
        clock.run.install()
        UpdateLog(clock).install()
        exec(SKIPPING.replace("main(5)", f"main({first})"), vars(script))
    assert logged == [("own", 6), ("grad_norm", 6), ("own", 7), ("own", 8), ("grad_norm", 8), ("own", 9)]
