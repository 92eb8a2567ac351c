"""Memory and time of each optimizer.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --optimizers adamw muon --model dit
    python benchmarks/optimizers.py --optimizers adamw muon --model unet32 --device cuda

State and time of a step are those of the digits' UNet or DiT, of a UNet for 16 pixels or one of 35.75 M parameters for
32, or of a DiT-S, the optimizers taking turns in one process. On a GPU, a step ends when the GPU has done its work. How far
each gets is for a study to say: `lrlab study run optimizers`.
"""

import statistics
import time

import torch
from common import UNET, machine, make_parser, parse
from diffusers import DiTTransformer2DModel, UNet2DModel

from diffusers_lrlab.models.unet import default_unet_config
from diffusers_lrlab.optimizers.entries import OPTIMIZERS, get_optimizer, optimizer_state_bytes

# DiT: as many layers and heads as `--denoiser dit` has for digits.
DIT = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "norm_num_groups": 1}
DIT_S = {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}  # arXiv 2212.09748, table 1
MODELS = {
    "unet": lambda: UNet2DModel(**default_unet_config(8, 1, 1541)),  # as many images as are not held out
    "dit": lambda: DiTTransformer2DModel(**DIT, in_channels=1, out_channels=1, sample_size=8),
    "unet16": lambda: UNet2DModel(**default_unet_config(16, 3, 1541)),
    "unet32": lambda: UNet2DModel(**UNET),
    "dit-s": lambda: DiTTransformer2DModel(**DIT_S, in_channels=4, out_channels=8, sample_size=32),
}


def wait(device):
    """Until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def make_step(name, make_model, device):
    """An optimizer of a new model and a function that times one step of it on random gradients, in ms."""
    model = make_model().to(device)
    optimizer = get_optimizer(name, model.named_parameters(), 1e-3)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        wait(device)
        started = time.perf_counter()
        optimizer.step()
        wait(device)
        return 1e3 * (time.perf_counter() - started)

    return optimizer, sum(parameter.numel() for parameter in model.parameters()), step


def print_costs(names, rounds, make_model, device):
    """Prints the table of memory and time."""
    made = {name: make_step(name, make_model, device) for name in names}
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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    arguments = parse(parser, optimizers=["sgd"], rounds=3)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(machine() + (f", {torch.cuda.get_device_name()}" if arguments.device == "cuda" else ""))
    print_costs(arguments.optimizers, arguments.rounds, MODELS[arguments.model], arguments.device)


if __name__ == "__main__":
    main()
