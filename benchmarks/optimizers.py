"""Memory and time of each optimizer.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --optimizers adamw muon --model dit

State and time of a step are those of the digits' UNet, or of its DiT, the optimizers taking turns in one process. How far
each gets is for a study to say: `lrlab study run optimizers`.
"""

import statistics
import time

import torch
from common import machine, make_parser, parse
from diffusers import DiTTransformer2DModel, UNet2DModel

from diffusers_lrlab.models.unet import default_unet_config
from diffusers_lrlab.optimizers.entries import OPTIMIZERS, get_optimizer, optimizer_state_bytes

# DiT: as many layers and heads as `--denoiser dit` has for digits.
DIT = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "norm_num_groups": 1}
MODELS = {
    "unet": lambda: UNet2DModel(**default_unet_config(8, 1, 1541)),  # as many images as are not held out
    "dit": lambda: DiTTransformer2DModel(**DIT, in_channels=1, out_channels=1, sample_size=8),
}


def make_step(name, make_model):
    """An optimizer of a new model and a function that times one step of it on random gradients, in ms."""
    model = make_model()
    optimizer = get_optimizer(name, model.named_parameters(), 1e-3)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        started = time.perf_counter()
        optimizer.step()
        return 1e3 * (time.perf_counter() - started)

    return optimizer, sum(parameter.numel() for parameter in model.parameters()), step


def print_costs(names, rounds, make_model):
    """Prints the table of memory and time."""
    made = {name: make_step(name, make_model) for name in names}
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name, (_, _, step) in made.items():
            times[name].append(step())
    print("| optimizer | state, bytes per parameter | ms per step, median |\n|---|---|---|")
    for name, (optimizer, num_parameters, _) in made.items():
        state = optimizer_state_bytes(optimizer) / num_parameters
        print(f"| `{name}` | {state:.2f} | {statistics.median(times[name][2:]):.2f} |", flush=True)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--model", choices=MODELS, default="unet")
    parser.add_argument("--rounds", type=int, default=50, help="of timed steps")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    arguments = parse(parser, optimizers=["sgd"], rounds=3)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(machine())
    print_costs(arguments.optimizers, arguments.rounds, MODELS[arguments.model])


if __name__ == "__main__":
    main()
