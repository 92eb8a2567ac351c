"""The first updates of a LoRA by Muon and by AdamW, at the same rates.

    python benchmarks/muon_lora.py

A tiny DiT learns to predict the noise on the digits 0 to 4; then a LoRA of its attention learns 5 to 9. Muon's first step
of the zero B has a size that does not depend on its gradient, as Adam's has. The table has the change of the adapted
weights (B A times its scale) relative to them, by norms over all layers, after some updates, and the losses on held-out
digits 5 to 9 with fixed noise: medians over seeds. The first line is the model without LoRA.
"""

import statistics

import torch
from common import machine, make_parser, parse
from diffusers import DDPMScheduler, DiTTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from sklearn.datasets import load_digits

from diffusers_lrlab import get_optimizer

SIZES = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "norm_num_groups": 1, "num_embeds_ada_norm": 1}
NOISE = DDPMScheduler()


def load_images():
    """Images of the digits 0 to 4, then of 5 to 9 for training and held out: float32 in [-1, 1]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    first, second = (images[torch.tensor(chosen)] for chosen in (digits.target < 5, digits.target >= 5))
    return first, second[:-200], second[-200:]


def loss_of(model, images, generator):
    """The mean squared error of the predicted noise."""
    noise = torch.randn(images.shape, generator=generator)
    times = torch.randint(0, 1000, (len(images),), generator=generator)
    label = torch.zeros(len(images), dtype=torch.long)
    predicted = model(NOISE.add_noise(images, noise, times), timestep=times, class_labels=label).sample
    return (predicted - noise).square().mean()


def train(model, optimizer, images, num_updates, seed, num_warmup=0, after=lambda update: None):
    """Trains with 64 images an update at the rate of the optimizer, after a linear warm-up; `after` follows each update."""
    generator = torch.Generator().manual_seed(seed)
    rates = [group["lr"] for group in optimizer.param_groups]
    for update in range(1, num_updates + 1):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, update / max(1, num_warmup))
        batch = images[torch.randint(0, len(images), (64,), generator=generator)]
        optimizer.zero_grad()
        loss_of(model, batch, generator).backward()
        optimizer.step()
        after(update)


@torch.no_grad()
def relative_change(model):
    """The norm of B A times its scale over that of the adapted weights."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    changed = sum(layer.get_delta_weight("default").square().sum() for layer in layers)
    return float((changed / sum(layer.weight.square().sum() for layer in layers)).sqrt())


@torch.no_grad()
def held_out_loss(model, images):
    model.eval()
    loss = loss_of(model, images.repeat(4, 1, 1, 1), torch.Generator().manual_seed(0))
    model.train()
    return float(loss)


def make_base(seed, num_updates, images):
    """The weights of a model that knows the first digits."""
    torch.manual_seed(seed)
    model = DiTTransformer2DModel(**SIZES, in_channels=1, out_channels=1, sample_size=8)
    train(model, get_optimizer("adamw", model.parameters(), 1e-3), images, num_updates, seed)
    return model.state_dict()


def follow_lora(base, seed, optimizer, rate, num_warmup, updates, images, held_out):
    """Changes and losses of one LoRA after each of `updates`."""
    torch.manual_seed(seed)
    model = DiTTransformer2DModel(**SIZES, in_channels=1, out_channels=1, sample_size=8)
    model.load_state_dict(base)
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    lora = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=targets)  # as the scripts of diffusers
    inject_adapter_in_model(lora, model, adapter_name="default")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    changes, losses = [], []

    def note(update):
        if update in updates:
            changes.append(relative_change(model))
            losses.append(held_out_loss(model, held_out))

    train(model, get_optimizer(optimizer, named, rate), images, max(updates), seed, num_warmup, note)
    return changes, losses


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 1e-3, 1e-2])
    parser.add_argument("--updates", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--base_updates", type=int, default=600)
    parser.add_argument("--warmup", type=int, default=20, help="updates of the warm-up, beside none")
    parser.add_argument("--seeds", type=int, default=3)
    options = parse(parser, rates=[1e-3], updates=[1, 2], base_updates=2, seeds=1)
    print(machine())
    first, images, held_out = load_images()
    bases = [make_base(seed, options.base_updates, first) for seed in range(options.seeds)]
    whole = DiTTransformer2DModel(**SIZES, in_channels=1, out_channels=1, sample_size=8)
    losses = [held_out_loss(whole, held_out) for base in bases if whole.load_state_dict(base)]
    print(f"without LoRA: loss {statistics.median(losses):.4f}")
    heads = [f"change after {update}" for update in options.updates] + [f"loss after {update}" for update in options.updates]
    print("| optimizer | rate | warm-up |", " | ".join(heads), "|\n" + "|---" * (3 + len(heads)) + "|")
    for rate in options.rates:
        for warmup in (0, options.warmup):
            for name in ("adamw", "muon"):
                found = [
                    follow_lora(base, seed, name, rate, warmup, options.updates, images, held_out)
                    for seed, base in enumerate(bases)
                ]
                medians = [
                    [statistics.median(column) for column in zip(*part, strict=True)] for part in zip(*found, strict=True)
                ]
                shown = [f"{100 * change:.3g} %" for change in medians[0]] + [f"{loss:.4f}" for loss in medians[1]]
                print(f"| `{name}` | {rate:g} | {warmup} |", " | ".join(shown), "|", flush=True)


if __name__ == "__main__":
    main()
