"""The study's four sets with the study's settings: losses and distances beside those of its own code, and a picture.

    python benchmarks/toy2d_study.py --out toy2d
    python benchmarks/toy2d_study.py --out toy2d --seeds 3

Runs `training_scripts/train_ddpm.py --config training_scripts/recipes/lr_study_2d.yaml` for each set and seed (runs that are
finished in DIR are not done again), then samples each result by other schedulers. Prints tables, writes DIR/toy2d.png.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler

from diffusers_lrlab import PointDDPMPipeline
from diffusers_lrlab.core.environment import describe_environment
from diffusers_lrlab.core.plotting import ORANGE, new_figure, save_figure
from diffusers_lrlab.data.toy2d import toy_points
from diffusers_lrlab.evaluation.kl import knn_kl
from diffusers_lrlab.training.plots.points import draw_points, limits_of

ROOT = Path(__file__).parents[1]
# Evaluation loss and KL (bits) of three runs of the template itself (SakanaAI/AI-Scientist, templates/2d_diffusion).
TEMPLATE = {
    "circle": ((0.441, 0.438, 0.438), (0.365, 0.359, 0.368)),
    "dino": ((0.663, 0.666, 0.663), (1.088, 1.050, 1.140)),
    "line": ((0.802, 0.804, 0.802), (0.164, 0.155, 0.177)),
    "moons": ((0.617, 0.614, 0.618), (0.078, 0.088, 0.090)),
}
SAMPLERS = ((DDPMScheduler, 100), (DDIMScheduler, 100), (DDIMScheduler, 20), (DPMSolverMultistepScheduler, 20))


def results_of(out, name, seed):
    """The results of one run, done now if it is not there."""
    folder = out / f"{name}-{seed}"
    record = folder / "lrlab" / "run.json"
    if not record.exists() or json.loads(record.read_text())["run"]["status"] != "finished":
        script, recipe = (ROOT / "training_scripts" / part for part in ("train_ddpm.py", "recipes/lr_study_2d.yaml"))
        command = [sys.executable, script, f"--config={recipe}", f"--dataset_name={name}", f"--seed={seed}"]
        # The EMA of the last update is what is sampled, the raw weights what the study calls its evaluation loss.
        command += [f"--output_dir={folder}", "--overwrite_output_dir", "--checkpointing_steps=10000"]
        subprocess.run(list(map(str, command)), check=True)
    return json.loads(record.read_text())["train"]


def cell(values, digits=3):
    """Mean, and the values themselves if there are several."""
    shown = ", ".join(f"{value:.{digits}f}" for value in values)
    return shown if len(values) == 1 else f"{statistics.mean(values):.{digits}f} ({shown})"


def compare_samplers(out, name, real):
    """KL of 10,000 points of the run with seed 0 by other schedulers and numbers of steps."""
    pipeline = PointDDPMPipeline.from_pretrained(out / f"{name}-0")
    pipeline.set_progress_bar_config(disable=True)
    figures = []
    for scheduler, steps in SAMPLERS:
        pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config)
        generator = torch.Generator().manual_seed(0)
        points = pipeline(num_points=10_000, generator=generator, num_inference_steps=steps).points
        figures.append(knn_kl(real, points))
    return figures


def draw(out, results):
    """Data above samples, each set on one scale."""
    figure = new_figure(2.6 * len(TEMPLATE), 5.6, dpi=130)
    rows = figure.subplots(2, len(TEMPLATE))
    for above, below, name in zip(*rows, TEMPLATE, strict=True):
        train = results[name][0]["results"]
        real = toy_points(name, 10_000, split="test")
        pipeline = PointDDPMPipeline.from_pretrained(out / f"{name}-0")
        samples = pipeline(num_points=10_000, generator=torch.Generator().manual_seed(0)).points
        limits = limits_of(real)
        draw_points(above, real, limits, title=f"{name}: data, KL {train['kl_of_held_out_points']:+.3f} bits")
        draw_points(below, samples, limits, ORANGE, title=f"samples, KL {train['kl']:+.3f} bits")
    save_figure(figure, out / "toy2d.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    results = {name: [results_of(options.out, name, seed) for seed in range(options.seeds)] for name in TEMPLATE}

    meta = describe_environment()
    print(f"\n{meta['processor']}, {meta['cpu_cores']} cores, torch {meta['versions']['torch']}\n")
    print("| set | evaluation loss | the template's | KL, bits | the template's | KL of held-out points | training, s |")
    print("|---|---|---|---|---|---|---|")
    for name, (losses, kls) in TEMPLATE.items():
        runs = results[name]
        ours = {key: [run["results"][key] for run in runs] for key in ("training_set_loss", "kl", "kl_of_held_out_points")}
        print(
            f"| `{name}` | {cell(ours['training_set_loss'])} | {cell(losses)} | {cell(ours['kl'])} | {cell(kls)} "
            f"| {ours['kl_of_held_out_points'][0]:+.3f} | {statistics.mean(run['training_seconds'] for run in runs):.0f} |"
        )
    names = [f"{scheduler.__name__.removesuffix('Scheduler')}, {steps} steps" for scheduler, steps in SAMPLERS]
    print(f"\n| KL, bits | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for name in TEMPLATE:
        figures = compare_samplers(options.out, name, toy_points(name, 100_000))
        print(f"| `{name}` | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    draw(options.out, results)
    print(f"\nWrote {options.out / 'toy2d.png'}.")


if __name__ == "__main__":
    main()
