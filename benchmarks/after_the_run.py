"""What is chosen after a run at a constant rate: a cool-down, its shape and beta2, the width of the EMA, or a merge.

    python benchmarks/after_the_run.py --out after-the-run
    python benchmarks/after_the_run.py --out after-the-run --jobs points --seeds 3

For each seed, trains a trunk with snapshots of averages and with checkpoints, and cool-downs over its last 20 %.
Measures what `lrlab branch`, `lrlab ema` and `lrlab merge` make of it by the held-out loss, for points also by the
divergence of samples. "Best width" is the width with the lowest mean loss over the other seeds. Prints means, paired
differences and the losses by width. Runs that are finished in DIR are not done again.
"""

import statistics
from pathlib import Path

import torch
from common import machine, make_parser, parse

from diffusers_lrlab import TrainingConfig, branch, train
from diffusers_lrlab.run.averages import RunSnapshots
from diffusers_lrlab.run.merge import merge_checkpoints
from diffusers_lrlab.run.sweep import VALIDATION, MeasuredRun, saved_weights
from diffusers_lrlab.study.analysis.statistics import add_holm, paired
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.saved_pipeline import SavedPipeline

# Rates: those that the studies model_cards/horizons-2d and horizons-shapes chose for a trunk, on a seed not used here.
POINTS = {"dataset_name": "dino", "learning_rate": 9e-4, "num_validation_images": 1000, "distance_samples": 2000}
POINTS |= {"denoiser": "mlp:hidden_size=128"}
IMAGES = {"dataset_name": "shapes", "learning_rate": 2e-3, "num_validation_images": 500, "resolution": 16}
IMAGES |= {"denoiser": "dit:hidden_size=64,num_layers=2,patch_size=4", "train_batch_size": 16}
# Options, metrics, seeds and updates.
JOBS = {"points": (POINTS, (VALIDATION, "kl"), 5, 2000), "images": (IMAGES, (VALIDATION,), 3, 2000)}
USUAL = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 25, "num_inference_steps": 50, "evaluation": False}
USUAL |= {"validation_steps": 10**6, "save_images_epochs": 10**6, "log_timestep_bins": 0, "cpu_threads": 1}
USUAL |= {"ema": "warmup_power|posthoc:sigma_rels=[0.02|0.05|0.10]", "checkpoints_total_limit": 0, "preflight": False}
NUM_CHECKPOINTS, COOLDOWN = 40, 0.2
# The shape of each cool-down, and parameters of the optimizer during it. beta2 is 0.999 before.
BRANCHES = {
    "cool-down": ("1-sqrt", None),
    "cool-down with beta2 0.9995": ("1-sqrt", {"beta2": 0.9995}),
    "cool-down by linear": ("linear", None),
    "cool-down by cosine": ("cosine", None),
    "cool-down by square": ("square", None),
}
# Checkpoints over 10, 20 and 40 % of the run, and their weights.
MERGES = ((5, "linear"), (9, "linear"), (9, "1-sqrt"), (17, "linear"))
WIDTHS = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25)
EXACT = 0.03  # residual of the profile from which a width is left out: a branch has the snapshots of its cool-down alone
# The questions, each the first against the second; chosen before any of the runs.
TESTED = (
    ("trunk, best width", "trunk, default EMA"),
    ("cool-down, best width", "cool-down, default EMA"),
    *((name, "cool-down") for name in BRANCHES if name != "cool-down"),
    ("merge of 20 % by linear", "cool-down"),
    ("merge of 20 % by 1-sqrt", "cool-down"),
    ("trunk, best width", "cool-down"),
)


class Seed:
    """The runs of one seed, and what is measured of them."""

    def __init__(self, out, job, seed, updates, small, branches):
        options, metrics, *_ = JOBS[job]
        self.trunk, at = out / f"{job}-{seed}", round((1 - COOLDOWN) * updates)
        if not RunFolder(self.trunk).is_finished():
            given = {**USUAL, **options, **small, "seed": seed, "max_train_steps": updates}
            train(TrainingConfig(**given, checkpointing_steps=updates // NUM_CHECKPOINTS, output_dir=str(self.trunk)))
        self.branches = {}
        for name in branches:
            decay, changed = BRANCHES[name]
            into = out / f"{job}-{seed}-branches" / name.replace(" ", "-")
            (self.branches[name],) = branch(
                self.trunk, at, updates - at, decay=decay, optimizer_kwargs=changed, output_dir=into
            )
        self.measured = {metric: MeasuredRun(self.trunk, metric) for metric in metrics}
        self.pipelines = {folder: SavedPipeline.of(folder) for folder in (self.trunk, *self.branches.values())}

    def weights_of(self, folder, within=None):
        """The saved average of a run, or the weights in a folder of its own, by parameter."""
        return saved_weights(self.pipelines[folder], self.measured[VALIDATION].names, within)

    def last_weights(self, folder):
        return self.weights_of(folder, RunFolder(folder).newest_checkpoint())

    def merged(self, last, weights):
        into = self.trunk.with_name(f"{self.trunk.name}-merged-{last}-{weights}")
        if not into.exists():
            merge_checkpoints(self.trunk, last, weights, into)
        return self.weights_of(self.trunk, into)

    def results(self):
        """The metrics of all results but those of the best width, by name."""
        found = {"trunk": self.last_weights(self.trunk), "trunk, default EMA": self.weights_of(self.trunk)}
        for name, folder in self.branches.items():
            found |= {name: self.last_weights(folder), f"{name}, default EMA": self.weights_of(folder)}
        for last, weights in MERGES:
            share = (last - 1) / NUM_CHECKPOINTS
            found[f"merge of {100 * share:.0f} % by {weights}"] = self.merged(last, weights)
        return {name: self.measure(weights) for name, weights in found.items()}

    def measure(self, weights):
        return {metric: measured.value(weights) for metric, measured in self.measured.items()}

    def losses_by_width(self, folder):
        """The held-out loss of each width that the snapshots give exactly enough."""
        snapshots, found = RunSnapshots(folder), {}
        for width in WIDTHS:
            if (combination := snapshots.combination(width)).residual < EXACT:
                weights = snapshots.weights(combination.coefficients.tolist())
                found[width] = self.measured[VALIDATION].value(weights)
        return found

    def at_width(self, folder, width):
        snapshots = RunSnapshots(folder)
        return self.measure(snapshots.weights(snapshots.combination(width).coefficients.tolist()))


def best_width(losses):
    """The width with the lowest mean loss over seeds."""
    return min(losses[0], key=lambda width: statistics.fmean(of_seed[width] for of_seed in losses))


def add_best_widths(seeds, values):
    """Measures the width that the other seeds choose; returns the losses of all widths and the widths chosen."""
    curves, chosen = {}, {}
    for name in ("trunk", "cool-down"):
        folders = [seed.trunk if name == "trunk" else seed.branches["cool-down"] for seed in seeds]
        curves[name] = [seed.losses_by_width(folder) for seed, folder in zip(seeds, folders, strict=True)]
        chosen[name] = []
        for number, (seed, folder) in enumerate(zip(seeds, folders, strict=True)):
            width = best_width([losses for other, losses in enumerate(curves[name]) if other != number])
            chosen[name].append(width)
            values[number][f"{name}, best width"] = seed.at_width(folder, width)
    return curves, chosen


def tests_of(values, metric):
    """The questions with their paired differences; p is adjusted over those of this metric and job."""
    rows = []
    for one, other in (pair for pair in TESTED if values[0].keys() >= {*pair}):
        found = paired([of_seed[one][metric] for of_seed in values], [of_seed[other][metric] for of_seed in values])
        rows.append({"one": one, "other": other, **found._asdict()})
    add_holm(rows)
    return rows


def cell(value, form=".4f"):
    return "-" if value is None else f"{value:{form}}"


def show(job, values, curves, chosen):
    metrics = JOBS[job][1]
    print(f"\n| {job} | {' | '.join(metrics)} |\n|---{'|---' * len(metrics)}|")
    for name in values[0]:
        of_metrics = [[of_seed[name][metric] for of_seed in values] for metric in metrics]
        spreads = [f"{statistics.fmean(each):.4f} ± {statistics.stdev(each):.4f}" for each in of_metrics]
        print(f"| {name} | {' | '.join(spreads)} |")
    print(f"\n| {job}: difference | metric | mean | 95 % interval | p | adjusted p |\n|---|---|---|---|---|---|")
    for metric in metrics:
        for row in tests_of(values, metric):
            interval = f"{cell(row['low'], '+.4f')} to {cell(row['high'], '+.4f')}"
            of_p = f"{cell(row['p'], '.2g')} | {cell(row['p_adjusted'], '.2g')}"
            print(f"| {row['one']} - {row['other']} | {metric} | {cell(row['diff'], '+.4f')} | {interval} | {of_p} |")
    print(f"\n| {job}: width | {' | '.join(curves)} |\n|---|---|---|")
    for width in WIDTHS:
        losses = [[of_seed[width] for of_seed in curve if width in of_seed] for curve in curves.values()]
        print(f"| {width:g} | {' | '.join(cell(statistics.fmean(each)) if each else '-' for each in losses)} |")
    for name, widths in chosen.items():
        print(f"\nBest widths of the {name}, each by the other seeds: {', '.join(f'{width:g}' for width in widths)}.")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS], help="what is trained on (default: all)")
    parser.add_argument("--seeds", type=int, help="2 or more (default: 5 for points, 3 for images)")
    parser.add_argument("--updates", type=int, help="of each run")
    parser.set_defaults(small={}, branches=[*BRANCHES])
    small = {"num_validation_images": 100, "distance_samples": 50, "ddpm_num_steps": 20, "num_inference_steps": 2}
    options = parse(parser, jobs=["points"], seeds=2, updates=80, small=small, branches=[*BRANCHES][:2])
    if options.seeds is not None and options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: must be 2 or more, as differences are over seeds")
    torch.set_num_threads(1)
    print(machine())
    for job in options.jobs:
        num, updates = options.seeds or JOBS[job][2], options.updates or JOBS[job][3]
        seeds = [Seed(options.out, job, seed, updates, options.small, options.branches) for seed in range(num)]
        values = [seed.results() for seed in seeds]
        show(job, values, *add_best_widths(seeds, values))


if __name__ == "__main__":
    main()
