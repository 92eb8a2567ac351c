r"""Whether the best learning rate stays the same as a model gets wider: standard parametrisation beside muP.

    python benchmarks/width_transfer.py --out docs/width_transfer.png
    python benchmarks/width_transfer.py --updates 2000 --widths 64 256 --seeds 5
    python benchmarks/width_transfer.py --dataset digits --denoiser "dit:hidden_size={width},num_layers=2,patch_size=4" \
        --updates 300 --batch 32 --held_out 300

Trains a model (an MLPDenoiser on points) at each width and learning rate, with one rate for all parameters and with
--width_base, and compares the validation losses of the last weights. The table has the best rate of each width, and what it
costs to take the best rate of the smallest width instead. --losses keeps the results, so that a stopped sweep goes on.
"""

import itertools
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from common import machine, make_parser, parse

from diffusers_lrlab.core.plotting import COLORS, new_figure, plain_axes, save_figure
from diffusers_lrlab.core.words import counted
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.kinds import kind_of
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer, do_one_update

TITLES = {"standard": "one rate for all parameters", "muP": "muP (--width_base)"}


def resolve(options, kind, width, rate, seed):
    """The configuration of a run. Clipping is off: it depends on the norm of all gradients, which grows with the width."""
    return resolve_config(
        TrainingConfig(
            dataset_name=options.dataset,
            denoiser=options.denoiser.format(width=width),
            width_base=options.widths[0] if kind == "muP" else None,
            learning_rate=rate,
            max_train_steps=options.updates,
            train_batch_size=options.batch,
            seed=seed,
            num_validation_images=options.held_out,
            max_grad_norm=0.0,
            use_ema=False,
            evaluation=False,
            log_timestep_bins=0,
        )
    )


def load_data(options, seed):
    """The data of all runs with a seed."""
    config = resolve(options, "standard", options.widths[0], options.rates[0], seed)
    return kind_of(config).load_data(config, 1)


def final_loss(plan, data, folder):
    """The validation loss of the last weights of a run, infinite if it diverged."""
    trainer = Trainer(plan, data, Accelerator(cpu=True), RunFolder(Path(folder)))
    trainer.set_training()
    for batch in trainer.batches(plan.config.seed, range(plan.num_updates)):
        trainer.run.check_rates()
        do_one_update(trainer, batch)
        trainer.run.advance()
    trainer.release()
    loss = float(trainer.run.validation_losses()["validation_loss"].mean())
    return loss if math.isfinite(loss) else math.inf


def name_of(options, kind, width, rate, seed):
    run = f"{options.dataset}, {options.denoiser}, {options.held_out} held out, {options.updates} x {options.batch}"
    return f"{run}, {kind}, width {width}, rate {rate:g}, seed {seed}"


def sweep(options):
    """The losses of all seeds, by parametrisation, width and rate."""
    known = json.loads(options.losses.read_text()) if options.losses and options.losses.exists() else {}
    losses = {key: [] for key in itertools.product(TITLES, options.widths, options.rates)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            data = load_data(options, seed)
            for key, values in losses.items():
                name = name_of(options, *key, seed)
                if name not in known:
                    known[name] = final_loss(make_plan(resolve(options, *key, seed), data, None), data, folder)
                if options.losses:
                    options.losses.write_text(json.dumps(known))
                values.append(known[name])
    return losses


def mean_losses(losses, kind, width, rates):
    """Their means over the seeds, by rate."""
    return {rate: statistics.fmean(losses[kind, width, rate]) for rate in rates}


def print_table(losses, options):
    print("| parametrisation | width | best rate | its loss | loss at the best rate of the smallest width | diverged runs |")
    print("|---|---|---|---|---|---|")
    for kind in TITLES:
        means = {width: mean_losses(losses, kind, width, options.rates) for width in options.widths}
        transferred = min(means[options.widths[0]], key=means[options.widths[0]].get)
        for width, by_rate in means.items():
            best = min(by_rate, key=by_rate.get)
            spread = max(losses[kind, width, best]) - min(losses[kind, width, best])
            diverged = sum(math.isinf(loss) for rate in options.rates for loss in losses[kind, width, rate])
            print(
                f"| {kind} | {width} | {best:.3g} | {by_rate[best]:.4f} ± {spread / 2:.4f} | {by_rate[transferred]:.4f} | "
                f"{diverged} |"
            )


def plot(losses, options, path):
    """Loss over rate, a line for each width and a panel for each parametrisation; large dots are the best rates."""
    figure = new_figure(9, 4, dpi=150)
    finite = [loss for values in losses.values() for loss in values if math.isfinite(loss)]
    low = min(finite)
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), TITLES.items(), strict=True):
        plain_axes(axes)
        for width, color in zip(options.widths, COLORS, strict=False):
            means = mean_losses(losses, kind, width, options.rates)
            means = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
            axes.plot(*zip(*means.items(), strict=True), color=color, label=f"width {width}", marker=".")
            seeds = [losses[kind, width, rate] for rate in means]
            axes.fill_between([*means], [*map(min, seeds)], [*map(max, seeds)], color=color, alpha=0.15, linewidth=0)
            best = min(means, key=means.get)
            axes.plot(best, means[best], "o", color=color, markersize=8)
        axes.set(title=title, xlabel="learning rate", xscale="log", ylim=(low - 0.005, low + options.shown))
    figure.axes[0].set_ylabel("validation loss")
    figure.axes[1].legend(frameon=False)
    save_figure(figure, path)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--dataset", default="dino", help="name of a data set")
    parser.add_argument("--denoiser", default="mlp:hidden_size={width}", help="with {width} in place of its width")
    parser.add_argument("--held_out", type=int, default=2000, help="held-out examples")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="the first is --width_base")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4 * 2**power for power in range(7)])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--shown", type=float, default=0.07, help="range of losses in the plot, above the lowest")
    parser.add_argument("--losses", type=Path, help="JSON file of the losses so far")
    parser.add_argument("--out", type=Path, help="PNG of the plot")
    options = parse(parser, widths=[8, 16], rates=[1e-3, 1e-2], seeds=2, updates=4, batch=8)
    torch.set_num_threads(1)
    losses = sweep(options)
    print(f"{options.dataset}, {options.denoiser}, {options.updates} updates of {options.batch} examples,")
    rates = ", ".join(f"{rate:.3g}" for rate in options.rates)
    print(f"{counted(options.seeds, 'seed')}, base width {options.widths[0]}, rates {rates}")
    print(f"{machine()}\n")
    print_table(losses, options)
    if options.out:
        plot(losses, options, options.out)


if __name__ == "__main__":
    main()
