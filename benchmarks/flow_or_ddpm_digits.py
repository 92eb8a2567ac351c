"""DDPM and flow matching on digits, with and without labels: quality by the number of sampling steps, and a plot.

    python benchmarks/flow_or_ddpm_digits.py --out flow-or-ddpm-digits
    python benchmarks/flow_or_ddpm_digits.py --out flow-or-ddpm-digits --seeds 3

Runs `training_scripts/train_ddpm.py --lr_scheduler cosine` for each model and seed, for as many updates and at the same
learning rate (runs that are finished in DIR are not done again), and samples each result with 10, 20 and 50 steps. Prints
tables, writes DIR/samples.png.
"""

import json
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import SCRIPT, machine, make_parser
from diffusers import DDIMScheduler, DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar

import diffusers_lrlab  # noqa: F401  the pipelines of its runs
from diffusers_lrlab.core.plotting import new_figure, save_figure
from diffusers_lrlab.data.loading import load_image_data
from diffusers_lrlab.evaluation.features import class_reader, frechet_distance, image_features
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config

LABELS = ["--label_column=label", "--label_dropout=0.1"]
FLOW = ["--objective=flow_matching"]
MODELS = {"ddpm": [], "flow": FLOW, "ddpm, labels": LABELS, "flow, labels": FLOW + LABELS}
# The model, its sampler in place of the pipeline's own, and the guidance scale of models with labels.
SAMPLED = {
    "DDPM": ("ddpm", None, None),
    "DDPM, sampled by DDIM": ("ddpm", DDIMScheduler, None),
    "flow": ("flow", None, None),
    "DDPM with labels, by DDIM": ("ddpm, labels", DDIMScheduler, 1.0),
    "DDPM with labels, by DDIM, guidance 2": ("ddpm, labels", DDIMScheduler, 2.0),
    "flow with labels": ("flow, labels", None, 1.0),
    "flow with labels, guidance 2": ("flow, labels", None, 2.0),
}
STEPS = (10, 20, 50)
SHOWN = 10  # samples of each row of the plot, one of each class where there are labels


def train(out, name, seed, more):
    """The folder of one run, which is done now if missing, and its record."""
    folder = out / f"{name.replace(', ', '-')}-{seed}"
    record = folder / "lrlab" / "run.json"
    if not record.exists() or json.loads(record.read_text())["run"]["status"] != "finished":
        command = [sys.executable, SCRIPT, "--lr_scheduler=cosine", f"--seed={seed}", f"--output_dir={folder}"]
        command += ["--overwrite_output_dir", "--no_evaluation", *MODELS[name], *more]
        subprocess.run(list(map(str, command)), check=True)
    return folder, json.loads(record.read_text())["train"]


@cache
def held_out(seed):
    """Held-out digits of the runs with a seed, and a reader of classes that was trained on the others."""
    config = resolve_config(parse_arguments(["--dataset_name=digits", f"--seed={seed}", *LABELS], ""))
    data = load_image_data(config, config.seed, config.layout(1))
    return data.held_out.data, class_reader("digits", data.all_in_memory(), data.held_out)


def sample(folder, scheduler, guidance, num, num_steps):
    """Images `(num, 1, height, width)` in [-1, 1] of a saved run; of the labels 0, 1, ..., 9, 0, ... if it has labels."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config)
    images = []
    for start in range(0, num, 500):
        count, generator = min(500, num - start), torch.Generator().manual_seed(start)
        what = {"batch_size": count}
        if guidance is not None:
            what = {"class_labels": (torch.arange(start, start + count) % 10).tolist(), "guidance_scale": guidance}
        images.append(pipeline(generator=generator, num_inference_steps=num_steps, output_type="np", **what).images)
    pixels = np.concatenate(images).reshape(num, *images[0].shape[1:3], -1)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2) * 2 - 1


def measure(folder, seed, row, num, num_steps):
    """Fréchet distance to held-out digits, share of samples of the class asked for, and the first samples."""
    _, scheduler, guidance = SAMPLED[row]
    images = sample(folder, scheduler, guidance, num, num_steps)
    real, reader = held_out(seed)
    features = image_features("digits")
    distance = frechet_distance(features(images), features(real))
    accuracy = None if guidance is None else reader.accuracy(images, np.arange(num) % 10)
    return distance, accuracy, images[:SHOWN]


def spread(values, digits):
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def draw(out, shown):
    """A row of samples for each model and sampler, a block of columns for each number of steps."""
    figure = new_figure(12, 0.5 * len(shown), dpi=130)
    axes = figure.subplots(len(shown), len(STEPS), squeeze=False)
    for index, (row, blocks) in enumerate(shown.items()):
        for axis, num_steps, images in zip(axes[index], STEPS, blocks, strict=True):
            tiles = F.pad(images.mean(dim=1), (1, 1, 1, 1), value=1.0)
            axis.imshow(np.concatenate(list(tiles.numpy()), axis=1), cmap="gray", vmin=-1, vmax=1)
            axis.set_axis_off()
            if index == 0:
                axis.set_title(f"{num_steps} steps", fontsize=9)
        axes[index][0].text(-1, images.shape[-1] / 2, row, ha="right", va="center", fontsize=8)
    save_figure(figure, out / "samples.png")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    disable_progress_bar()
    num, more, names = 1000, [], [*MODELS]
    if options.tiny:
        num, more, names = 20, ["--max_train_steps=2", "--num_validation_images=10"], ["flow, labels"]
    sampled = {row: name for row, (name, *_) in SAMPLED.items() if name in names}
    runs = {(name, seed): train(options.out, name, seed, more) for seed in range(options.seeds) for name in names}

    print(f"\n{machine()}\n\n| model | updates | training, s |\n|---|---|---|")
    for name in names:
        of_name = [runs[name, seed][1] for seed in range(options.seeds)]
        print(f"| {name} | {of_name[0]['num_updates']} | {spread([run['training_seconds'] for run in of_name], 0)} |")

    titles = " | ".join(f"{num_steps} steps" for num_steps in STEPS)
    print(f"\n| Fréchet distance, and share of {num} samples of the class asked for | {titles} |")
    print(f"|---{'|---' * len(STEPS)}|")
    shown = {}
    for row, name in sampled.items():
        cells, shown[row] = [], []
        for num_steps in STEPS:
            found = [measure(runs[name, seed][0], seed, row, num, num_steps) for seed in range(options.seeds)]
            distances, accuracies, images = zip(*found, strict=True)
            has_labels = accuracies[0] is not None
            cells.append(spread(distances, 2) + (f"; {spread(accuracies, 3)}" if has_labels else ""))
            shown[row].append(images[0])
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
    errors = [held_out(seed)[1].error for seed in range(options.seeds)]
    print(f"\nThe classifier misreads {spread(errors, 3)} of the held-out digits.")
    draw(options.out, shown)
    print(f"Wrote {options.out / 'samples.png'}.")


if __name__ == "__main__":
    main()
