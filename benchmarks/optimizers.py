"""Memory and time of each optimizer.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --optimizers adamw muon --model dit
    python benchmarks/optimizers.py --optimizers adamw muon --model dit16 --batch_size 16   whole updates
    python benchmarks/optimizers.py --optimizers adamw muon --model unet32 --device cuda

State and time of a step are those of the digits' UNet or DiT, of a UNet for 16 pixels or one of 35.75 M parameters for
32, of the DiT for 16 pixels of `lrlab study run optimizers-shapes`, or of a DiT-S, the optimizers taking turns in one
process. With a batch size, the forward and backward pass are timed too. On a GPU, a step ends when the GPU has done its
work. How far each gets is for a study to say: `lrlab study run optimizers`.
"""

import statistics
import time

import torch
from common import UNET, machine, make_parser, parse
from diffusers import DiTTransformer2DModel, UNet2DModel

from diffusers_lrlab.models.networks import default_unet_config
from diffusers_lrlab.optimizers.build import get_optimizer, optimizer_state_bytes
from diffusers_lrlab.optimizers.entries import OPTIMIZERS

# DiT: as many layers and heads as `--denoiser dit` has for digits.
DIT = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "norm_num_groups": 1}
DIT16 = {**DIT, "num_layers": 2, "patch_size": 4}
DIT_S = {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}  # arXiv 2212.09748, table 1
MODELS = {
    "unet": lambda: UNet2DModel(**default_unet_config(8, 1, 1541)),  # as many images as are not held out
    "dit": lambda: DiTTransformer2DModel(**DIT, in_channels=1, out_channels=1, sample_size=8),
    "unet16": lambda: UNet2DModel(**default_unet_config(16, 3, 1541)),
    "dit16": lambda: DiTTransformer2DModel(**DIT16, in_channels=3, out_channels=3, sample_size=16),
    "unet32": lambda: UNet2DModel(**UNET),
    "dit-s": lambda: DiTTransformer2DModel(**DIT_S, in_channels=4, out_channels=8, sample_size=32),
}


def wait(device):
    """Until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def loss_of(model, batch_size, device):
    """The mean square of the model's output for random examples."""
    config, size = model.config, (batch_size,)
    examples = torch.randn(*size, config.in_channels, config.sample_size, config.sample_size, device=device)
    timesteps = torch.randint(1000, size, device=device)
    labels = {"class_labels": torch.zeros_like(timesteps)} if isinstance(model, DiTTransformer2DModel) else {}
    return model(examples, timesteps, **labels).sample.square().mean()


def make_step(name, make_model, device, batch_size):
    """
    An optimizer of a new model and a function that times one step of it, in ms: on random gradients, or with the passes
    that compute those of `batch_size` random examples.
    """
    model = make_model().to(device)
    optimizer = get_optimizer(name, model.named_parameters(), 1e-3)

    def step():
        for parameter in model.parameters():
            parameter.grad = None if batch_size else torch.randn_like(parameter)
        wait(device)
        started = time.perf_counter()
        if batch_size:
            loss_of(model, batch_size, device).backward()
        optimizer.step()
        wait(device)
        return 1e3 * (time.perf_counter() - started)

    return optimizer, sum(parameter.numel() for parameter in model.parameters()), step


def print_costs(names, rounds, make_model, device, batch_size):
    """Prints the table of memory and time."""
    made = {name: make_step(name, make_model, device, batch_size) for name in names}
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name, (_, _, step) in made.items():
            times[name].append(step())
    timed = "update" if batch_size else "step"
    print(f"| optimizer | state, bytes per parameter | ms per {timed}, median |\n|---|---|---|")
    for name, (optimizer, num_parameters, _) in made.items():
        state = optimizer_state_bytes(optimizer) / num_parameters
        print(f"| `{name}` | {state:.2f} | {statistics.median(times[name][2:]):.2f} |", flush=True)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--model", choices=MODELS, default="unet")
    parser.add_argument("--rounds", type=int, default=50, help="of timed steps")
    parser.add_argument("--batch_size", type=int, default=0, help="of whole updates; 0 times the optimizer's step alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    arguments = parse(parser, optimizers=["sgd"], rounds=3)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(machine() + (f", {torch.cuda.get_device_name()}" if arguments.device == "cuda" else ""))
    print_costs(arguments.optimizers, arguments.rounds, MODELS[arguments.model], arguments.device, arguments.batch_size)


if __name__ == "__main__":
    main()
