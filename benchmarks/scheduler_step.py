"""The cost of a schedule per update, beside torch's LambdaLR and accelerate's wrapper around it.

    python benchmarks/scheduler_step.py

Prints the median microseconds of one `step()` with one parameter group, all schedules taking turns in one process.
"""

import statistics
import warnings
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from common import in_turns, make_parser, parse

from diffusers_lrlab import get_scheduler
from diffusers_lrlab.schedules.registries import SCHEDULERS


def make_optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)


def make_schedulers(num_updates):
    """Schedulers by name: torch's, accelerate's, and all of ours that follow the clock."""
    lambda_lr = torch.optim.lr_scheduler.LambdaLR(make_optimizer(), lambda n: 1 - n / num_updates)
    schedulers = {"torch LambdaLR": lambda_lr}
    optimizer = Accelerator(cpu=True).prepare(make_optimizer())
    inner = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 1 - n / num_updates)
    schedulers["accelerate's wrapper around it"] = AcceleratedScheduler(inner, optimizer)
    for name, entry in SCHEDULERS.items():
        if "feedback" not in entry.traits:
            warmup = 0 if entry.traits & {"no_warmup", "rises"} else 100
            schedulers[name] = get_scheduler(name, make_optimizer(), warmup, num_updates)
    many = "|".join(["cosine"] * 8)
    spec = f"join:schedules=[{many}],boundaries=[{'|'.join(str(share / 8) for share in range(1, 8))}]"
    schedulers["join of 8"] = get_scheduler(spec, make_optimizer(), 100, num_updates)
    return schedulers


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500, help="per round")
    arguments = parse(parser, rounds=1, steps=2000)
    schedulers = make_schedulers(arguments.rounds * arguments.steps)
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # there is nothing to optimize here

    def steps(scheduler):
        for _ in range(arguments.steps):
            scheduler.step()

    calls = {name: partial(steps, scheduler) for name, scheduler in schedulers.items()}
    times = in_turns(calls, arguments.rounds, 0)
    print("| schedule | microseconds per step, median | slowest round |\n|---|---|---|")
    for name, rounds in times.items():
        median, slowest = (1e3 * each / arguments.steps for each in (statistics.median(rounds), max(rounds)))
        print(f"| {name} | {median:.1f} | {slowest:.1f} |")


if __name__ == "__main__":
    main()
