"""The cost of `lrlab audit` per update of a plain training loop.

    python benchmarks/audit.py

The loop runs bare and with the recorder, in processes that take turns update by update. Prints the extra CPU time of an
update: mean and standard error.
"""

import math
import multiprocessing
import sys
import tempfile
import time

import numpy as np
import torch
from common import machine, make_parser, parse

from diffusers_lrlab.audit.recorder.recorder import Recorder

GOAL_MS = 20  # of which the audit may take 1 %
LOOPS = {
    "bare": (False, 1, 1),
    "audited": (True, 1, 1),
    "bare, 4 backward passes": (False, 1, 4),
    "audited, 4 backward passes": (True, 1, 4),
    "bare, 100 parameter groups": (False, 100, 1),
    "audited, 100 parameter groups with learning rates of their own": (True, 100, 1),
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


def run(place, is_audited, num_groups, accumulation, updates, folder, turns, results):
    torch.set_num_threads(1)
    if is_audited:
        Recorder(folder).install()
    loop, seconds = updates_of(num_groups, accumulation), []
    for _ in range(updates):
        turns[place].acquire()
        begun = time.process_time()
        next(loop)
        seconds.append(time.process_time() - begun)
        turns[(place + 1) % len(turns)].release()
    results.put((place, seconds))


def measure(updates):
    """Seconds of each update after the first tenth, by name."""
    context = multiprocessing.get_context("fork")
    turns = [context.Semaphore(int(place == 0)) for place in range(len(LOOPS))]
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run, args=(place, *loop, updates, folder, turns, results))
            for place, loop in enumerate(LOOPS.values())
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
    return {name: np.array(found[place][updates // 10 :]) for place, name in enumerate(LOOPS)}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=500)
    options = parse(parser, updates=10)
    measured = measure(options.updates)
    print(f"{machine()}; {options.updates} updates\n")
    print(f"| what | ms an update | microseconds more than bare | share of an update of {GOAL_MS} ms |\n|---|---|---|---|")
    for name, seconds in measured.items():
        bare = measured[name.replace("audited", "bare").replace(" with learning rates of their own", "")]
        extra = 1e6 * (seconds - bare)
        row = [name, f"{1e3 * seconds.mean():.2f}"]
        if name.startswith("audited"):
            row += [f"{extra.mean():.0f} ± {extra.std(ddof=1) / math.sqrt(len(extra)):.0f}"]
            row += [f"{100 * extra.mean() / (1e3 * GOAL_MS):.2f} %"]
        print(f"| {' | '.join([*row, '', ''][:4])} |")


if __name__ == "__main__":
    main()
