"""Results of studies that nobody ran, and their summaries."""

from types import SimpleNamespace

import numpy as np

from diffusers_lrlab.study.analysis.summary import summarise
from diffusers_lrlab.study.spec.spec import StudySpec

PAPER_ARMS = ("constant", "paper_baseline", "step", "exponential", "plateau", "cosine")
PAPER_DATASETS = ("circle", "dino", "line", "moons")
UPDATES = np.arange(50, 10_001, 50)


def made_up_run(arm, dataset, seed, place=0, **changes):
    """A run whose figures get worse with `place`, the arm's among the arms."""
    rng = np.random.default_rng([seed, place, sum(map(ord, dataset))])
    shift = np.random.default_rng([seed, sum(map(ord, dataset))]).normal()  # shared by the arms of a seed
    kl = 0.3 + 0.1 * place + 0.03 * shift + 0.01 * rng.normal()
    loss = 0.44 + 0.02 * place + np.exp(-UPDATES / 800) + 0.01 * rng.normal(size=len(UPDATES))
    angles = rng.uniform(0, 2 * np.pi, 400)
    points = np.stack([np.cos(angles), np.sin(angles)], 1) * 3 + rng.normal(0, 0.03 + 0.1 * place, (400, 2))
    record = {
        "run": {"error": None, "executor": {"name": "stacked"}, "command": "lrlab study run x"},
        "train": {
            "num_updates": 10_000, "updates_done": 10_000, "num_parameters": 296_450,
            "training_seconds": 30 + rng.normal(), "sampling_seconds": 4.4 + 0.1 * rng.normal(), "evaluation_seconds": 6.0,
        },
    }  # fmt: skip
    run = {
        "id": f"{place}-{dataset}-{seed}", "arm": arm, "dataset": dataset, "seed": seed, "stage": "compare",
        "status": "finished", "learning_rate": 3e-4, "record": record,
        "results": {
            "kl": kl, "kl_of_held_out_points": 0.02, "coverage": 1 - kl,
            "training_set_loss": 0.44 + 0.02 * place + 0.001 * rng.normal(),
        },
        "curves": {
            "loss": {"update": UPDATES.tolist(), "loss": loss.tolist(),
                     "lr": (3e-4 * (0.5 + 0.5 * np.cos(np.pi * UPDATES / 10_000 * (place > 0)))).tolist()},
            "quality": {"update": UPDATES[9::10].tolist(), "validation_loss_ema": (loss[9::10] + 0.01).tolist()},
        },
        "samples": {"points": points.round(4).tolist()},
        "config": {"train_batch_size": 256, "seed": seed, "output_dir": "/somewhere", "optimizer": "adamw"},
    }  # fmt: skip
    return SimpleNamespace(**{**run, **changes})


def summary_of(results, arms, baseline, **study):
    """The summary that the package makes of runs."""
    described = {arm: {"description": f"The arm {arm}", "lr_scheduler": "constant"} for arm in arms}
    datasets, seeds = {run.dataset: {} for run in results}, tuple(sorted({run.seed for run in results}))
    spec = StudySpec("made-up", "A made-up study", {}, described, datasets, seeds, baseline, (), "")
    meta = {"versions": {"python": "3.12.1", "torch": "2.13.0"}, "processor": "A processor", "cpu_cores": 2}
    notes = {"metrics": ["kl", "training_set_loss", "coverage"], "meta": meta}
    compared = [run for run in results if run.stage == "compare"]
    summary = summarise(spec, compared, [], notes, "lrlab study run made-up --out there")
    summary["study"] |= study
    return summary


def made_up_study(arms=PAPER_ARMS, datasets=PAPER_DATASETS, seeds=5, change=lambda run: run, **study):
    results = [
        change(made_up_run(arm, dataset, seed, place))
        for place, arm in enumerate(arms) for dataset in datasets for seed in range(seeds)
    ]  # fmt: skip
    return results, summary_of(results, list(arms), arms[0], **study)
