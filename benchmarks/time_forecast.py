"""The forecast of a run's time beside the real time, in three cases, in turns.

    python benchmarks/time_forecast.py
    python benchmarks/time_forecast.py --rounds 1

A machine's speed drifts, by more than a forecast is off: each run is compared with the mean of the forecasts just before and
just after it, and beside it is how much these two differ. The seconds of a run are those of `run.json`: updates,
validations, samples, distances, pictures, checkpoints; no imports, data and checks before it. What the forecast leaves out
(drawing, writing) is part of what it is off by.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import SCRIPT, make_parser

CASES = {
    "digits, batch 64, 600 updates": ["--max_train_steps=600"],
    "digits, batch 16, accumulation of 2, SGD, 600 updates": [
        *("--max_train_steps=600", "--train_batch_size=16", "--gradient_accumulation_steps=2"),
        *("--optimizer=sgd", "--frechet_samples=0"),
    ],
    "points (dino), batch 256, 5,000 updates": ["--dataset_name=dino", "--max_train_steps=5000"],
}
TINY = {
    "tiny": [
        *("--dataset_name=line", "--max_train_steps=4", "--distance_samples=10", "--eval_batch_size=10"),
        *("--num_validation_images=10", "--num_inference_steps=2"),
    ]
}


def forecast(arguments):
    """The forecast seconds, in this process."""
    from diffusers_lrlab.forecast.timing import forecast_time
    from diffusers_lrlab.training.arguments import parse_arguments
    from diffusers_lrlab.training.prepare import prepare
    from diffusers_lrlab.training.run_folder import RunFolder
    from diffusers_lrlab.training.trainer import Trainer

    plan, data, accelerator = prepare(parse_arguments(arguments, ""))
    with tempfile.TemporaryDirectory() as folder:
        return forecast_time(Trainer(plan, data, accelerator, RunFolder(Path(folder)))).total


def run(command):
    """The output of a process; ends the benchmark with its error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def measured(arguments, folder):
    """Seconds of the real run."""
    run([sys.executable, SCRIPT, *arguments, f"--output_dir={folder}"])
    return json.loads((Path(folder) / "lrlab" / "run.json").read_text())["run"]["seconds"]


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forecast", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.forecast:
        print(forecast(rest))
        return
    print("| run | forecast, s | the run, s | off by (each round) | forecasts before and after differ by |")
    print("|---|---|---|---|---|")
    for name, arguments in (TINY if options.tiny else CASES).items():
        command = [sys.executable, __file__, "--forecast", *arguments, "--output_dir=unused"]
        before, expected, real, drifts = float(run(command).splitlines()[-1]), [], [], []
        for _ in range(1 if options.tiny else options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                real.append(measured(arguments, Path(folder) / "run"))
            after = float(run(command).splitlines()[-1])
            expected.append((before + after) / 2)
            drifts.append(f"{after / before - 1:+.0%}")
            before = after
        each = ", ".join(f"{a / b - 1:+.1%}" for a, b in zip(expected, real, strict=True))
        print(
            f"| {name} | {statistics.median(expected):.1f} | {statistics.median(real):.1f} | {each} | {', '.join(drifts)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
