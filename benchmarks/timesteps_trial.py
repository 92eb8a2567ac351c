"""Does it help? Curricula, controls, a weighting and a noise assignment against uniform timesteps, on digits.

    python benchmarks/timesteps_trial.py --out trial --seeds 5          an hour on 2 cores
    python benchmarks/timesteps_trial.py --out trial --seeds 5          again: goes on where it stopped, prints the tables

Every arm is the main job of the README with one thing changed. Seed s gives every arm the same initial weights, images,
and noise, and timesteps of the same rank, so arms are compared seed by seed. The validation loss is unweighted, of uniform
timesteps and fixed noise; the Fréchet distance is that of the main job. Equal time: an arm whose update costs more than
half a percent more than the baseline's is run again with as many updates as fit into the baseline's time.
"""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import SCRIPT, machine, make_parser, make_trainer, parse
from scipy import stats

ARMS = {
    "uniform": [],
    "stratified": ["--timestep_sampler=stratified"],
    "clts": ["--timestep_sampler=clts"],
    "clts_static": ["--timestep_sampler=clts_static"],
    "clts_reversed": ["--timestep_sampler=clts_reversed"],
    "min_snr": ["--loss_weighting=min_snr"],
    "immiscible": ["--noise=immiscible"],
}
CONTROLS = ("clts_static", "clts_reversed", "clts")
METRICS = {"validation_loss_ema": "validation loss", "frechet_distance": "Fréchet distance"}
TINY = ["--frechet_samples=10", "--ddpm_num_inference_steps=2", "--eval_batch_size=2", "--num_validation_images=40"]


def measure_costs(rounds):
    """The cost of an update of each arm over the baseline's: median of ratios, the arms taking turns in one process."""
    with tempfile.TemporaryDirectory() as base:
        loops = {}
        for name, flags in ARMS.items():
            arguments = [*flags, f"--max_train_steps={rounds + 20}", "--num_validation_images=0"]
            arguments += ["--frechet_samples=0"]  # which needs held-out images
            loops[name] = make_trainer(Path(base) / name, arguments).updates()
        times = {name: [] for name in ARMS}
        for turn in range(rounds + 10):
            for name in ARMS if turn % 2 else reversed(ARMS):
                started = time.perf_counter()
                next(loops[name])
                if turn >= 10:
                    times[name].append(time.perf_counter() - started)
    return {
        name: statistics.median(own / base for own, base in zip(times[name], times["uniform"], strict=True)) for name in ARMS
    }


def train(out, name, seed, num_updates, threads):
    """The results of one run, taken from `out` if it is there already."""
    folder = out / f"{name}-{num_updates}-{seed}"
    record = folder / "lrlab" / "run.json"
    if not record.exists() or json.loads(record.read_text())["run"]["status"] != "finished":
        arguments = [*ARMS[name], f"--seed={seed}", f"--max_train_steps={num_updates}", f"--output_dir={folder}"]
        arguments += [f"--cpu_threads={threads}", "--overwrite_output_dir", "--save_images_epochs=100000"]
        arguments += [f"--checkpointing_steps={num_updates}", f"--validation_steps={num_updates}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment
        )
        if result.returncode:
            raise SystemExit(result.stderr)
        print(f"  {folder.name} done", flush=True)
    results = json.loads(record.read_text())["train"]["results"]
    return {metric: results[metric] for metric in METRICS}


def half_width(differences):
    """Half the width of the 95 % interval of the mean of paired differences, by Student's t."""
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return stats.t.ppf(0.975, len(differences) - 1) * spread


def holm(p_values):
    """p-values adjusted for their number by Holm's method."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def compared(results, baseline, metric):
    """The cells of one metric: mean ± standard deviation, and the paired difference to the baseline with its verdict."""
    values = {key: [run[metric] for run in runs] for key, runs in results.items()}
    base = [run[metric] for run in baseline]
    differences = {key: [own - other for own, other in zip(v, base, strict=True)] for key, v in values.items() if v != base}
    adjusted = holm([stats.ttest_1samp(difference, 0).pvalue for difference in differences.values()])
    cells = {key: [f"{statistics.mean(v):.4f} ± {statistics.stdev(v):.4f}", "–"] for key, v in values.items()}
    for (key, difference), p in zip(differences.items(), adjusted, strict=True):
        mean = statistics.mean(difference)
        verdict = "cannot tell" if p >= 0.05 else "better" if mean < 0 else "worse"
        cells[key][1] = f"{mean:+.4f} ± {half_width(difference):.4f}, p = {p:.2g}: {verdict}"
    return cells


def print_table(results, baseline):
    """All metrics of all arms."""
    columns = {metric: compared(results, baseline, metric) for metric in METRICS}
    print("| arm | updates | " + " | ".join(f"{name} | difference to uniform" for name in METRICS.values()) + " |")
    print("|---|---|" + "---|---|" * len(METRICS))
    for name, num_updates in results:
        cells = [cell for metric in METRICS for cell in columns[metric][name, num_updates]]
        print(f"| `{name}` | {num_updates} | {' | '.join(cells)} |")


def print_controls(results, controls, num_updates):
    """Curriculum, density and direction against each other: paired differences, p-values adjusted per metric."""
    pairs = list(itertools.combinations(controls, 2))
    for metric, label in METRICS.items():
        runs = {name: [run[metric] for run in results[name, num_updates]] for name in controls}
        differences = [[own - other for own, other in zip(runs[a], runs[b], strict=True)] for a, b in pairs]
        adjusted = holm([stats.ttest_1samp(difference, 0).pvalue for difference in differences])
        for (a, b), difference, p in zip(pairs, differences, adjusted, strict=True):
            print(f"{label}, {a} - {b}: {statistics.mean(difference):+.4f} ± {half_width(difference):.4f}, p = {p:.2g}")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=5, help="3 at least")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100, help="updates that are timed")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    options = parse(parser, seeds=2, updates=2, rounds=2)
    if options.tiny:
        for name in ARMS.keys() - {"uniform", *CONTROLS[:2]}:
            del ARMS[name]
        for flags in ARMS.values():
            flags += TINY
    controls = CONTROLS[:2] if options.tiny else CONTROLS
    options.out.mkdir(parents=True, exist_ok=True)
    print(machine())

    costs_file = options.out / "costs.json"
    if not costs_file.exists():
        costs_file.write_text(json.dumps(measure_costs(options.rounds)))
    costs = json.loads(costs_file.read_text())
    print("\nan update, over one with uniform timesteps: " + ", ".join(f"{name} {cost:.3f}" for name, cost in costs.items()))

    lengths = [(name, options.updates) for name in ARMS]
    lengths += [(name, math.floor(options.updates / cost)) for name, cost in costs.items() if cost > 1.005]
    jobs = [(name, length, seed) for seed in range(options.seeds) for name, length in lengths]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda job: train(options.out, job[0], job[2], job[1], options.threads), jobs))
    found = dict(zip(jobs, done, strict=True))
    results = {key: [found[*key, seed] for seed in range(options.seeds)] for key in lengths}
    print(f"\n{options.seeds} seeds, mean ± standard deviation; with fewer updates, equal time\n")
    print_table(results, results["uniform", options.updates])
    print()
    print_controls(results, controls, options.updates)


if __name__ == "__main__":
    main()
