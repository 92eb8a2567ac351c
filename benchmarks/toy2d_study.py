"""The study's four data sets with its settings: losses and distances beside those of its own code, and a plot.

    python benchmarks/toy2d_study.py --out toy2d
    python benchmarks/toy2d_study.py --out toy2d --seeds 3

Runs `training_scripts/train_ddpm.py --config training_scripts/recipes/lr_study_2d.yaml` for each set and seed (runs that are
finished in DIR are not done again), then samples each result by other schedulers. Prints tables, writes DIR/toy2d.png.
"""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import SCRIPT, make_parser
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler

from diffusers_lrlab import PointDDPMPipeline
from diffusers_lrlab.core.environment import describe_environment
from diffusers_lrlab.core.plotting import ORANGE, new_figure, save_figure
from diffusers_lrlab.data.toy2d import toy_points
from diffusers_lrlab.evaluation.distances import knn_kl
from diffusers_lrlab.training.plots import draw_points, limits_of

RECIPE = SCRIPT.parent / "recipes" / "lr_study_2d.yaml"
# Evaluation loss and KL (bits) of three runs of the template itself (SakanaAI/AI-Scientist, templates/2d_diffusion).
TEMPLATE = {
    "circle": ((0.441, 0.438, 0.438), (0.365, 0.359, 0.368)),
    "dino": ((0.663, 0.666, 0.663), (1.088, 1.050, 1.140)),
    "line": ((0.802, 0.804, 0.802), (0.164, 0.155, 0.177)),
    "moons": ((0.617, 0.614, 0.618), (0.078, 0.088, 0.090)),
}
SAMPLERS = ((DDPMScheduler, 100), (DDIMScheduler, 100), (DDIMScheduler, 20), (DPMSolverMultistepScheduler, 20))
TINY = ["--max_train_steps=2", "--distance_samples=100", "--num_validation_images=100", "--eval_batch_size=10"]


def results_of(out, name, seed, more):
    """The results of one run, done now if missing."""
    folder = out / f"{name}-{seed}"
    record = folder / "lrlab" / "run.json"
    if not record.exists() or json.loads(record.read_text())["run"]["status"] != "finished":
        command = [sys.executable, SCRIPT, f"--config={RECIPE}", f"--dataset_name={name}", f"--seed={seed}"]
        # The EMA of the last update is what is sampled, the raw weights what the study calls its evaluation loss.
        command += [f"--output_dir={folder}", "--overwrite_output_dir", "--checkpointing_steps=10000", *more]
        subprocess.run(list(map(str, command)), check=True)
    return json.loads(record.read_text())["train"]


def cell(values, digits=3):
    """Mean, and the values themselves if there are several."""
    shown = ", ".join(f"{value:.{digits}f}" for value in values)
    return shown if len(values) == 1 else f"{statistics.mean(values):.{digits}f} ({shown})"


def compare_samplers(out, name, real, num_points):
    """KL of points of the run with seed 0 by other schedulers and numbers of steps."""
    pipeline = PointDDPMPipeline.from_pretrained(out / f"{name}-0")
    pipeline.set_progress_bar_config(disable=True)
    figures = []
    for scheduler, steps in SAMPLERS:
        pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config)
        generator = torch.Generator().manual_seed(0)
        points = pipeline(num_points=num_points, generator=generator, num_inference_steps=steps).points
        figures.append(knn_kl(real, points))
    return figures


def draw(out, results, num_points):
    """Data above samples, each set on one scale."""
    figure = new_figure(2.6 * len(results), 5.6, dpi=130)
    rows = figure.subplots(2, len(results), squeeze=False)
    for above, below, name in zip(*rows, results, strict=True):
        train = results[name][0]["results"]
        real = toy_points(name, num_points, split="test")
        pipeline = PointDDPMPipeline.from_pretrained(out / f"{name}-0")
        samples = pipeline(num_points=num_points, generator=torch.Generator().manual_seed(0)).points
        limits = limits_of(real)
        draw_points(above, real, limits, title=f"{name}: data, KL {train['kl_of_held_out_points']:+.3f} bits")
        draw_points(below, samples, limits, ORANGE, title=f"samples, KL {train['kl']:+.3f} bits")
    save_figure(figure, out / "toy2d.png")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    names, more, num_points = (["line"], TINY, 100) if options.tiny else (list(TEMPLATE), [], 10_000)
    results = {name: [results_of(options.out, name, seed, more) for seed in range(options.seeds)] for name in names}

    meta = describe_environment()
    print(f"\n{meta['processor']}, {meta['cpu_cores']} cores, torch {meta['versions']['torch']}\n")
    print("| set | evaluation loss | the template's | KL, bits | the template's | KL of held-out points | training, s |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        losses, kls = TEMPLATE[name]
        keys = ("training_set_loss", "kl", "kl_of_held_out_points")  # a tiny run has no loss of the training set
        ours = {key: [run["results"].get(key, math.nan) for run in runs] for key in keys}
        print(
            f"| `{name}` | {cell(ours['training_set_loss'])} | {cell(losses)} | {cell(ours['kl'])} | {cell(kls)} "
            f"| {ours['kl_of_held_out_points'][0]:+.3f} | {statistics.mean(run['training_seconds'] for run in runs):.0f} |"
        )
    samplers = [f"{scheduler.__name__.removesuffix('Scheduler')}, {steps} steps" for scheduler, steps in SAMPLERS]
    print(f"\n| KL, bits | {' | '.join(samplers)} |\n|---{'|---' * len(samplers)}|")
    for name in results:
        figures = compare_samplers(options.out, name, toy_points(name, 10 * num_points), num_points)
        print(f"| `{name}` | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    draw(options.out, results, num_points)
    print(f"\nWrote {options.out / 'toy2d.png'}.")


if __name__ == "__main__":
    main()
