"""Time of a study with one worker over that with two.

    python benchmarks/study_pool.py --rounds 3
    python benchmarks/study_pool.py --executors pool,ray

Workers have one thread each, and have begun before the clock starts. `product` are two processes that multiply matrices as
long as these studies take: what the machine itself gives two of them.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from common import machine, make_parser, parse

MODEL = {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 128, "embedding_size": 64, "num_layers": 3}


def make_study(folder, updates):
    """Four runs on points, and the study's context."""
    from diffusers_lrlab.study.runs.context import StudyContext
    from diffusers_lrlab.study.runs.results import StudyFolder
    from diffusers_lrlab.study.spec.expansion import expand
    from diffusers_lrlab.study.spec.reading import load_spec

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    base = {
        "model_config_name_or_path": "model",
        "max_train_steps": updates,
        "train_batch_size": 256,
        "distance_samples": 200,
    }
    base |= {"lr_warmup_steps": 0, "num_validation_images": 200, "num_inference_steps": 10}
    arms = {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine"}}
    spec = {"base": base, "arms": arms, "datasets": ["dino", "moons"], "seeds": 1}
    spec |= {"metrics": ["validation_loss_ema"], "evaluation_points": 1}
    (folder / "study.yaml").write_text(json.dumps(spec))  # which is YAML, too
    spec = load_spec(str(folder / "study.yaml"))
    study = StudyContext(StudyFolder(folder / "out"), stack_size=1, quiet=True)
    study.folder.write_spec(spec, "")
    return study, expand(spec)


def seconds_of(study, specs, executor, pool):
    """Seconds of all runs with these workers."""
    from diffusers_lrlab.study.executors import assign_executors
    from diffusers_lrlab.study.executors.workers import make_jobs, run_jobs

    for spec in specs:
        study.folder.run_file(spec.id).unlink(missing_ok=True)
    started = time.perf_counter()
    run_jobs(make_jobs(assign_executors(specs, study, executor), study, pool), pool, study)
    return time.perf_counter() - started


def multiply(seconds):
    """Number of matrix products in this many seconds."""
    import torch

    torch.set_num_threads(1)
    a, count, end = torch.randn(256, 256), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(a, a)
        count += 1
    return count


def products(seconds, rounds):
    """Matrix products of two processes over those of one, round by round."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(multiply, [0.1, 0.1]))
        return [sum(pool.map(multiply, [seconds] * 2)) / pool.submit(multiply, seconds).result() for _ in range(rounds)]


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100, help="of each of the four runs")
    parser.add_argument("--executors", default="pool,ray")
    options = parse(parser, rounds=1, updates=2, executors="pool")
    os.environ["OMP_NUM_THREADS"] = "1"
    from diffusers_lrlab.study.executors import open_workers

    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        study, specs = make_study(Path(folder), options.updates)
        for executor in options.executors.split(","):
            if executor == "ray" and find_spec("ray") is None:
                print("Ray is not installed.")
                continue
            seconds = []
            for num_workers in (1, 2):
                with open_workers(executor, num_workers, study) as pool:
                    seconds_of(study, specs, executor, pool)  # imports, data
                    seconds.append([seconds_of(study, specs, executor, pool) for _ in range(options.rounds)])
            turns = [*zip(*seconds, strict=True)]
            one, two = (statistics.median(column) for column in zip(*turns, strict=True))
            rows[executor] = f"{one:.2f} | {two:.2f}", [a / b for a, b in turns]
    rows["product"] = "- | -", products(0.2 if options.tiny else 1.5, options.rounds)
    print(f"{machine()}\n\n| {len(specs)} runs of {options.updates} updates | one worker, s | two, s | times as fast |")
    print("|---|---|---|---|")
    for name, (seconds, ratios) in rows.items():
        print(f"| {name} | {seconds} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
