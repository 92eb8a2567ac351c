"""What each optimizer costs in memory and time, and how far it gets on digits.

    python benchmarks/optimizers.py --updates 0      memory and time only, two minutes
    python benchmarks/optimizers.py                  the losses too, an hour on 2 cores

State and time of a step are those of the digits' UNet, the optimizers taking turns in one process. The loss is that of
held-out digits with the averaged weights, at the best of three learning rates around each optimizer's default, chosen on
seed 0; the table is of the seeds after it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import SCRIPT, make_parser, parse
from diffusers import UNet2DModel

from diffusers_lrlab.models.unet import default_unet_config
from diffusers_lrlab.optimizers.entries import OPTIMIZERS, get_optimizer, optimizer_state_bytes
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config


def options_for(name):
    """Schedule and EMA as the optimizer takes them."""
    if "averages" in OPTIMIZERS[name].traits:
        return {"lr_scheduler": "constant_with_warmup", "use_ema": False}
    return {"lr_scheduler": "cosine"}


def make_step(name):
    """An optimizer of the digits' UNet and a function that times one step of it on random gradients, in ms."""
    model = UNet2DModel(**default_unet_config(8, 1, 1541))  # as many images as are not held out
    optimizer = get_optimizer(name, model.parameters(), 1e-3)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        started = time.perf_counter()
        optimizer.step()
        return 1e3 * (time.perf_counter() - started)

    return optimizer, sum(parameter.numel() for parameter in model.parameters()), step


def print_costs(names, rounds):
    """The table of memory and time."""
    made = {name: make_step(name) for name in names}
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name, (_, _, step) in made.items():
            times[name].append(step())
    print("| optimizer | state, bytes per parameter | ms per step, median |\n|---|---|---|")
    for name, (optimizer, num_parameters, _) in made.items():
        state = optimizer_state_bytes(optimizer) / num_parameters
        print(f"| `{name}` | {state:.2f} | {statistics.median(times[name][2:]):.2f} |", flush=True)


def train(name, lr, seed, num_updates, threads):
    """Held-out loss at the end of one run; infinite if it diverged."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--optimizer={name}", f"--learning_rate={lr}", f"--seed={seed}", f"--max_train_steps={num_updates}"]
        for key, value in options_for(name).items():
            arguments.append(f"--{key}={value}" if value is not False else f"--no_{key}")
        arguments += [f"--output_dir={folder}/run", "--frechet_samples=0", "--eval_batch_size=2", f"--cpu_threads={threads}"]
        arguments += ["--ddpm_num_inference_steps=2", f"--validation_steps={num_updates}"]
        result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
        if result.returncode == 2 and "diverged" in result.stderr:
            return float("inf")
        if result.returncode:
            raise SystemExit(result.stderr)
        results = json.loads(Path(folder, "run", "lrlab", "run.json").read_text())["train"]["results"]
        return results.get("validation_loss_ema", results["validation_loss"])


def print_losses(names, factors, num_seeds, num_updates, threads):
    """The table of losses, each optimizer at its own learning rate."""
    print("\n| optimizer | learning rate (of those tried) | held-out loss, mean ± std |\n|---|---|---|", flush=True)
    for name in names:
        default = resolve_config(TrainingConfig(optimizer=name, **options_for(name))).learning_rate
        tried = {factor * default: train(name, factor * default, 0, num_updates, threads) for factor in factors}
        best = min(tried, key=tried.get)
        losses = [train(name, best, seed, num_updates, threads) for seed in range(1, num_seeds + 1)]
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        edge = ", at the edge" if len(tried) > 2 and best in (min(tried), max(tried)) else ""
        print(
            f"| `{name}` | {best:.3g} ({', '.join(f'{lr:.3g}' for lr in tried)}{edge}) | "
            f"{statistics.mean(losses):.4f} ± {spread:.4f} |",
            flush=True,
        )


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--factors", type=float, nargs="+", default=[1 / 3, 1.0, 3.0], help="of the default learning rate")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=50, help="of timed steps")
    parser.add_argument("--threads", type=int, default=0, help="of each run; 0 is all cores")
    arguments = parse(parser, updates=2, seeds=1, factors=[1.0], optimizers=["sgd"], rounds=3)
    print_costs(arguments.optimizers, arguments.rounds)
    if arguments.updates:
        print_losses(arguments.optimizers, arguments.factors, arguments.seeds, arguments.updates, arguments.threads)


if __name__ == "__main__":
    main()
