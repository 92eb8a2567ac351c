"""Programs whose learning rate is wrong in one way each, beside those where it is not; and how they are audited."""

import textwrap
from pathlib import Path

import started
from runs import environment

from diffusers_lrlab.audit.evidence import read_processes
from diffusers_lrlab.audit.result import make_audit

PRELUDE = """
import torch
from diffusers import optimization
from torch.optim.lr_scheduler import *
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
x = torch.randn(8, 4)

def train(optimizer, updates=40, accumulation=1, step=lambda: None, micro_step=lambda: None, micro_end=lambda: None,
          before_step=lambda: None, divide=True):
    for _ in range(updates):
        for _ in range(accumulation):
            loss = model(x).square().mean()
            (loss / accumulation if divide and accumulation > 1 else loss).backward()
            micro_step()
            micro_end()
        before_step()
        optimizer.step()
        step()
        optimizer.zero_grad()

def get_scheduler(name, optimizer, warmup, steps=None):
    return optimization.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)

def adam(lr=1e-3, **kwargs):
    return torch.optim.AdamW(model.parameters(), lr=lr, **kwargs)
"""
RECORD = """
from pathlib import Path
from diffusers_lrlab.audit.recorder import Recorder
recorder = Recorder({folder!r})
recorder.install()
"""
# One process for many programs, since starting one takes longer than they do.
ALL = """
for name, program in PROGRAMS.items():
    folder = Path(FOLDER) / name
    folder.mkdir()
    recorder.__init__(str(folder))
    exec(PRELUDE + program, {})
    recorder._finish()
recorder.__init__(FOLDER)
"""


def process_of(program, folder, processes=1, records=True):
    """Exit status and stderr of a program, whose records, if any, are in `folder`."""
    Path(folder).mkdir(exist_ok=True)
    code = RECORD.format(folder=str(folder)) * records + PRELUDE + textwrap.dedent(program)
    env = {**environment(), "ACCELERATE_USE_CPU": "true"}
    if processes == 1:
        status, _, stderr = started.run("-c", code, env=env)
    else:
        status, _, stderr = started.run_ranks("-c", code, processes=processes, env=env)
    return status, stderr


def audit_of(program, folder, expectation=None, status=0, processes=1):
    """The audit of a program that ends with this status."""
    ended, stderr = process_of(program, folder, processes)
    assert ended == status, stderr
    return make_audit(["python"], ended, read_processes(Path(folder)), expectation)


def audits_of_all(programs, folder):
    """The audits of many programs by name, all run in one process, which is forgotten about between them."""
    programs = {name: textwrap.dedent(program) for name, program in programs.items()}
    given = f"FOLDER, PRELUDE, PROGRAMS = {str(folder)!r}, {PRELUDE!r}, {programs!r}\n"
    status, _, stderr = started.run("-c", RECORD.format(folder=str(folder)) + given + ALL, env=environment())
    assert status == 0, stderr
    return {name: make_audit(["python"], 0, read_processes(Path(folder) / name), None) for name in programs}


def names_of(audit, optimizer=0):
    return {finding.name for finding in audit.sections[optimizer].findings}


ENGINE = """
import sys, types; sys.modules['deepspeed'] = deepspeed = types.ModuleType('deepspeed')
class DeepSpeedEngine(torch.nn.Module):
    def __init__(self): super().__init__(); self.optimizer = adam(); engines.append(self)
deepspeed.DeepSpeedEngine, engines = DeepSpeedEngine, []"""
# A loss scaler skips the first 8 of 100 updates; the statement steps the scheduler or not.
SCALED = """
o = adam(); s = OneCycleLR(o, max_lr=1e-3, total_steps=100, pct_start=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for n in range(100):
    scaler.scale(model(x).square().mean() * (float("inf") if n < 8 else 1.0)).backward()
    scaler.step(o); scaler.update(); {}; o.zero_grad()
"""
# A loss scaler finds an overflow in the updates of a condition.
OVERFLOWS = """
o, scaler = adam(), torch.amp.GradScaler("cpu", init_scale=8.0)
for n in range(20):
    scaler.scale(model(x).mean() * (float("inf") if {} else 1)).backward()
    scaler.step(o); scaler.update(); o.zero_grad()
"""
# A checkpoint is loaded, and the statement is run between the states of the optimizer and of the scheduler.
LOADED = """
o = adam(); s = get_scheduler('linear', o, 0, 40); train(o, 30, step=s.step)
states = o.state_dict(), s.state_dict()
o = adam(); s = get_scheduler('linear', o, 0, 40)
o.load_state_dict(states[0]); {}; s.load_state_dict(states[1])
train(o, 10, step=s.step)
"""
# By the name of a finding: a program that has it, and one that has not.
PAIRS = {
    "too_long": (
        "o = adam(); s = get_scheduler('cosine', o, 16, 160); train(o, accumulation=4, step=s.step)",
        "o = adam(); s = get_scheduler('cosine', o, 4, 40); train(o, accumulation=4, step=s.step)",
    ),
    "rose_after_end": (
        "o = adam(); s = get_scheduler('cosine', o, 4, 40); train(o, accumulation=2, micro_step=s.step)",
        "o = adam(); s = CosineAnnealingLR(o, 40); train(o, step=s.step)",
    ),
    "too_short": (
        "o = adam(); s = get_scheduler('linear', o, 4, 40); train(o, accumulation=4, micro_step=s.step)",
        "o = adam(); s = get_scheduler('linear', o, 16, 160); train(o, accumulation=4, micro_step=s.step)",
    ),
    "still_warming_up": (
        "o = adam(); s = get_scheduler('constant_with_warmup', o, 100); train(o, step=s.step)",
        "o = adam(); s = get_scheduler('constant_with_warmup', o, 10); train(o, step=s.step)",
    ),
    "high_at_first": (
        "o = adam(); s = LambdaLR(o, lambda n: 0.6 if n == 0 else min(n / 20, 1)); train(o, step=s.step)",
        "o = adam(); s = LambdaLR(o, lambda n: min(n / 20, 1)); train(o, step=s.step)",
    ),
    "never_scheduled": (
        "o = adam(); s = get_scheduler('linear', o, 0, 40); train(o)",
        "o = adam(); train(o)",
    ),
    "discarded": (
        "o = adam(); train(o, accumulation=4, micro_end=o.zero_grad)",
        "o = adam(); o.zero_grad(); train(o, accumulation=4)",
    ),
    "rounded": (
        "o = adam(lr=torch.tensor(1e-3, dtype=torch.bfloat16)); train(o)",
        "o = adam(lr=torch.tensor(1e-3)); train(o)",
    ),
    "jumped by a load": (
        "o = adam(); train(o, 3); state = o.state_dict(); o = adam(lr=1e-4); o.load_state_dict(state); train(o)",
        "o = adam(); train(o, 3); state = o.state_dict(); o = adam(); o.load_state_dict(state); train(o)",
    ),
    "jumped": (LOADED.format("o.param_groups[0]['lr'] = 1e-3"), LOADED.format("pass")),
    "high_at_end": (
        "o = adam(); s = ExponentialLR(o, 0.99); train(o, step=s.step)",
        "o = adam(); s = ExponentialLR(o, 0.9); train(o, step=s.step)",
    ),
    "not_finite": (
        "o = adam(); train(o, 9); o.param_groups[0]['lr'] = float('nan'); train(o, 2)",
        "o = adam(); train(o, 9); o.param_groups[0]['lr'] = 0.0; train(o, 2)",
    ),
    "over_early": (
        "o = adam(); s = ExponentialLR(o, 0.8); train(o, 100, step=s.step)",
        "o = adam(); s = ExponentialLR(o, 0.1 ** (4 / 100)); train(o, 100, step=s.step)",
    ),
    "schedule_not_resumed": (
        """
        o = adam(); s = get_scheduler('cosine', o, 10, 100); train(o, 40, step=s.step); state = o.state_dict()
        o = adam(); o.load_state_dict(state); s = get_scheduler('cosine', o, 10, 100); train(o, 60, step=s.step)
        """,
        """
        o = adam(); s = get_scheduler('cosine', o, 10, 100); train(o, 40, step=s.step); state = o.state_dict()
        o = adam(); o.load_state_dict(state); s = LambdaLR(o, s.lr_lambdas[0], 39); train(o, 60, step=s.step)
        """,
    ),
    "ahead_of_updates": (
        SCALED.format("s.step()"),
        SCALED.format("n >= 8 and s.step()"),
    ),
    "warmup_scaled": (
        "o = adam(); s = get_scheduler('constant_with_warmup', o, 20); train(o, accumulation=4, micro_step=s.step)",
        "o = adam(); s = get_scheduler('constant_with_warmup', o, 20); train(o, accumulation=4, step=s.step)",
    ),
    "summed": (
        "o = adam(); train(o, accumulation=4, divide=False)",
        "o = adam(); train(o, accumulation=4)",
    ),
    "clipped": (
        "o = adam(); train(o, before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4))",
        "o = adam(); train(o, before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4))",
    ),
    "clipped_early": (
        "o = adam(); train(o, accumulation=2, micro_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))",
        "o = adam(); train(o, accumulation=2, before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))",
    ),
    "rarely_stepped": (
        "o = adam(); s = StepLR(o, 1)\nfor _ in range(4): train(o, 10); s.step()",
        "o = adam(); s = StepLR(o, 10); train(o, step=s.step)",
    ),
    "overflowed": (OVERFLOWS.format("n % 4 == 0"), OVERFLOWS.format("False")),
    "unused": (
        "o = adam(); train(o, accumulation=4)\nfor _ in range(3): model(x).mean().backward()",
        "o = adam(); train(o, accumulation=4)\nmodel(x).mean().backward()",
    ),
    "engine_hides": (
        f"{ENGINE}; train(DeepSpeedEngine().optimizer); engines.clear(); sys.modules.pop('deepspeed')",
        f"{ENGINE}; train(adam()); sys.modules.pop('deepspeed')",
    ),
    "own_estimate": (
        "o = adam(); o.param_groups[0].update(d=1e-6, k=0); train(o)",
        "o = adam(); train(o)",
    ),
}
# It takes seconds to import a compiler.
COMPILED = """
o = adam(); s = get_scheduler('linear', o, 0, 40)
compiled = torch.compile(o.step, backend="eager")
for _ in range(8):
    model(x).mean().backward(); compiled(); s.step(); o.zero_grad()
"""
