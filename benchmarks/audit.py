"""The cost of `lrlab audit` per update of a plain training loop.

    python benchmarks/audit.py

Bare updates and updates with the recorder take turns in one loop. Prints the extra CPU time of an update: the median of the
pairs, since a shared machine interrupts some, and its 95 % interval by bootstrap.
"""

import sys
import tempfile
import time

import numpy as np
import torch
from common import machine, make_parser, parse
from scipy.stats import bootstrap
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diffusers_lrlab.audit.recorder import Recorder

GOAL_MS = 20  # of which the audit may take 1 %
# Parameter groups and backward passes of an update.
LOOPS = {
    "one parameter group": (1, 1),
    "4 backward passes": (1, 4),
    "100 parameter groups with learning rates of their own": (100, 1),
}


def updates_of(num_groups, accumulation):
    """Training loop of an MLP with clipping and a cosine; yields after each update."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(100)]
    head = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.SiLU(), torch.nn.Linear(512, 64))
    parameters = [layer.weight for layer in layers] + [*head.parameters()]
    groups = [{"params": parameters[place::num_groups], "lr": 1e-4 * (1 + place)} for place in range(num_groups)]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
    noise = torch.randn(256, 64)
    while True:
        for _ in range(accumulation):
            hidden = noise
            for layer in layers[:20]:
                hidden = hidden + torch.tanh(layer(hidden))
            (head(hidden).square().mean() / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


class Recording:
    """The recorder, whose hooks can be taken out of torch and put back."""

    def __init__(self, folder):
        schedulers = [kind for kind in vars(torch.optim.lr_scheduler).values() if isinstance(kind, type)]
        owners = [torch.optim.Optimizer, torch.nn.Module, torch.autograd, torch.nn.utils, torch.nn.utils.clip_grad]
        owners += [torch.amp.GradScaler, *schedulers]
        before = [(owner, dict(vars(owner))) for owner in owners]
        Recorder(folder).install()
        self.replaced = [
            (owner, name, value, vars(owner)[name])
            for owner, attributes in before
            for name, value in attributes.items()
            if vars(owner)[name] is not value and callable(value)
        ]
        names = vars(sys.modules[register_optimizer_step_pre_hook.__module__])
        self.hooks = [
            (table, dict(table)) for table in (names[f"_global_optimizer_{when}_hooks"] for when in ("pre", "post"))
        ]

    def switch(self, is_on):
        for owner, name, original, hooked in self.replaced:
            setattr(owner, name, hooked if is_on else original)
        for table, hooks in self.hooks:
            table.clear()
            table.update(hooks if is_on else {})


def measure(num_groups, accumulation, updates, recording):
    """Seconds of bare updates and of audited ones of the same loop, in turns, after the first tenth."""
    recording.switch(True)
    loop = updates_of(num_groups, accumulation)
    for _ in range(80):  # the first 64 losses are examined
        next(loop)
    seconds = {False: [], True: []}
    for turn in range(updates):
        for is_on in (False, True) if turn % 2 else (True, False):
            recording.switch(is_on)
            begun = time.process_time()
            next(loop)
            seconds[is_on].append(time.process_time() - begun)
    return [np.array(seconds[is_on][updates // 10 :]) for is_on in (False, True)]


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=500)
    options = parse(parser, updates=10)
    torch.set_num_threads(1)
    print(f"{machine()}; {options.updates} updates\n")
    print(
        f"| what | ms an update, bare | microseconds more, audited | share of an update of {GOAL_MS} ms |\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(folder)
        for name, loop in LOOPS.items():
            bare, audited = measure(*loop, options.updates, recording)
            extra = 1e6 * (audited - bare)
            low, high = bootstrap((extra,), np.median, rng=0).confidence_interval
            median = np.median(extra)
            row = [name, f"{1e3 * np.median(bare):.2f}", f"{median:.0f} ({low:.0f} to {high:.0f})"]
            print(f"| {' | '.join(row)} | {100 * median / (1e3 * GOAL_MS):.2f} % |", flush=True)


if __name__ == "__main__":
    main()
