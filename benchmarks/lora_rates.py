"""The learning rate of a LoRA beside that of full fine-tuning, and B at 16 times the rate of A.

    python benchmarks/lora_rates.py

A tiny DiT learns to predict the noise on the digits 0 to 4; then all of it, or a LoRA of its linear layers, learns 5 to 9
with AdamW, a short warm-up and a linear decay to 0, from the same weights for all seeds. Rates, two for each decade, have
the lowest loss on held-out digits 5 to 9 on one seed, with more rates while the best is at the edge; other seeds are
compared. `16 B` is LoRA+ (arXiv 2402.12354), whose rate is that of A. Prints the losses by
rate, means, and paired differences.
"""

import statistics

import torch
from common import machine, make_parser, parse
from diffusers import DiTTransformer2DModel
from muon_lora import SIZES, held_out_loss, load_images, loss_of, make_base
from peft import LoraConfig, inject_adapter_in_model

from diffusers_lrlab import get_optimizer
from diffusers_lrlab.study.analysis.statistics import add_holm, paired

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
RANK, BATCH, WARMUP = 8, 32, 20
TUNED_ON = 1000  # a seed that is not compared
MOST_RATES = 10
# Arms: whether a LoRA is trained, the rate of B over that of A, and the exponents of 10 ** (n / 2) that are tried at first.
ARMS = {
    "full": (False, 1, range(-8, -3)),
    "LoRA": (True, 1, range(-6, -1)),
    "LoRA, 16 B": (True, 16, range(-8, -3)),
}
TENFOLD = "LoRA, 10 times the full rate"
# The questions, each the first against the second; chosen before any of the runs.
TESTED = [("LoRA, 16 B", "LoRA"), (TENFOLD, "LoRA"), ("LoRA", "full")]


def rate_of(number):
    return float(f"{10 ** (number / 2):.2g}")


def make_optimizer(model, rate, factor):
    """AdamW of what is trained, with a factor on the rate of the matrices B of a LoRA."""
    parts = {1: [], factor: []}
    for name, each in model.named_parameters():
        if each.requires_grad:
            parts[factor if "lora_B" in name else 1].append(each)
    return get_optimizer("adamw", [{"params": part, "lr": rate * by} for by, part in parts.items()], rate)


def final_loss(base, arm, rate, seed, num_updates, images, held_out):
    """The held-out loss after fine-tuning at a rate; infinite if the loss is not finite."""
    is_lora, factor, _ = ARMS[arm]
    torch.manual_seed(seed)
    model = DiTTransformer2DModel(**SIZES, in_channels=1, out_channels=1, sample_size=8)
    model.load_state_dict(base)
    if is_lora:
        model.requires_grad_(False)
        lora = LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS)
        inject_adapter_in_model(lora, model, adapter_name="default")
    optimizer, generator = make_optimizer(model, rate, factor), torch.Generator().manual_seed(seed)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for update in range(num_updates):
        factor = min((update + 1) / WARMUP, 1 - update / num_updates)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = factor * peak
        batch = images[torch.randint(0, len(images), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        loss_of(model, batch, generator).backward()
        optimizer.step()
    loss = held_out_loss(model, held_out)
    return loss if loss < float("inf") else float("inf")  # not a number is no loss either


def tuned(arm, measure, is_small):
    """Losses by the exponent of the rate; more rates are tried while the best is at the edge."""
    losses = {number: measure(arm, rate_of(number)) for number in ARMS[arm][2]}
    while not is_small and len(losses) < MOST_RATES:
        best = min(losses, key=losses.get)
        beyond = {min(losses): best - 1, max(losses): best + 1}.get(best)
        if beyond is None:
            break
        losses[beyond] = measure(arm, rate_of(beyond))
    return dict(sorted(losses.items()))


def show_differences(found):
    """Means and paired differences; p is adjusted over all of them."""
    print("\n| arm | rate | loss |\n|---|---|---|")
    for (arm, rate), losses in found.items():
        print(f"| {arm} | {rate:g} | {statistics.fmean(losses):.5f} ± {statistics.stdev(losses):.5f} |")
    of_arm = {arm: losses for (arm, _), losses in found.items()}
    rows = [{"pair": (one, other), **paired(of_arm[one], of_arm[other])._asdict()} for one, other in TESTED]
    add_holm(rows)
    print("\n| difference | mean | 95 % interval | adjusted p |\n|---|---|---|---|")
    for row in rows:
        one, other = row["pair"]
        interval = "-" if row["low"] is None else f"{row['low']:+.5f} to {row['high']:+.5f}"
        p = "-" if row["p_adjusted"] is None else f"{row['p_adjusted']:.2g}"
        print(f"| {one} - {other} | {row['diff']:+.5f} | {interval} | {p} |")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=200, help="of fine-tuning")
    parser.add_argument("--base_updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5, help="that are compared, 2 or more")
    options = parse(parser, updates=2, base_updates=2, seeds=2)
    torch.set_num_threads(1)
    print(machine())
    first, images, held_out = load_images()
    base = make_base(TUNED_ON, options.base_updates, first)

    def measure(arm, rate, seed=TUNED_ON):
        return final_loss(base, arm, rate, seed, options.updates, images, held_out)

    chosen = {}
    print("\n| arm | losses by rate |\n|---|---|")
    for arm in ARMS:
        losses = tuned(arm, measure, options.tiny)
        chosen[arm] = rate_of(min(losses, key=losses.get))
        print(f"| {arm} | {', '.join(f'{rate_of(number):g}: {loss:.5f}' for number, loss in losses.items())} |", flush=True)
    asked = [*((arm, arm, rate) for arm, rate in chosen.items()), (TENFOLD, "LoRA", 10 * chosen["full"])]
    show_differences(
        {(shown, rate): [measure(arm, rate, seed) for seed in range(options.seeds)] for shown, arm, rate in asked}
    )


if __name__ == "__main__":
    main()
