"""What somebody waits for in the first minutes: seconds of whole commands, from Enter to the result.

    python benchmarks/first_minutes.py
    python benchmarks/first_minutes.py --tasks short --upstream PATH/train_unconditional.py
    python benchmarks/first_minutes.py --before PATH/ANOTHER_CHECKOUT

`--before` times the same commands in another checkout of this package, `--upstream` the short run in diffusers' own script,
which needs what benchmarks/train_step.py says. All that are timed of a task take turns, after one turn that is not counted,
and each turn is compared with itself.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, make_parser, parse
from train_step import UNET, run_script, write_images

HERE = Path(__file__).parents[1]
SCRIPT = "training_scripts/train_ddpm.py"
# The preset `quick` with one seed instead of three.
STUDY = """\
title: "Three schedules on two sets of points"
base: {{max_train_steps: {updates}, lr_warmup_steps: 0, learning_rate: 1e-3, num_validation_images: {points}, \
distance_samples: {points}}}
arms: {{constant: {{lr_scheduler: constant}}, cosine: {{lr_scheduler: cosine}}, \
wsd: {{lr_scheduler: "wsd:num_decay_steps=0.3"}}}}
datasets: [dino, moons]
seeds: 1
baseline: constant
metrics: [kl, validation_loss_ema, energy_distance]
evaluation_points: 10
"""
LRLAB = ["-m", "diffusers_lrlab.cli"]
PREVIEW = ["lrlab", "preview", "--lr_scheduler", "cosine", "--num_training_steps", "10000"]
# What a user types, and the arguments of Python that do the same in a checkout.
TASKS = {
    "preview": (" ".join(PREVIEW), [*LRLAB, *PREVIEW[1:]]),
    "digits": (f"{SCRIPT} --dry_run", [SCRIPT, "--dry_run"]),
    "dino": (f"{SCRIPT} --dataset_name dino --dry_run", [SCRIPT, "--dataset_name", "dino", "--dry_run"]),
    "study": ("lrlab study run my_study.yaml --out my-study", [*LRLAB, "study", "run", "study.yaml", "--out", "study"]),
    "short": (f"{SCRIPT} --train_data_dir images --num_epochs 2 ...", []),
}


def seconds_of(arguments, checkout, folder):
    """Seconds of one command in a folder of its own, with the package of a checkout."""
    words = [str(checkout / word) if word == SCRIPT else word for word in arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "study.yaml").write_text((folder / "study.yaml").read_text())
        started = time.perf_counter()
        done = subprocess.run([sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    return seconds


def short_run(script, folder, path, epochs, name):
    """Seconds of a short run by a script, ours or diffusers': the same images, model, batch and steps of sampling."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        arguments = [
            f"--train_data_dir={folder / 'images'}", f"--model_config_name_or_path={folder / 'unet'}", "--resolution=32",
            "--train_batch_size=16", f"--num_epochs={epochs}", "--learning_rate=1e-3", "--lr_warmup_steps=10", "--use_ema",
            "--num_inference_steps=10", "--eval_batch_size=16", f"--cache_dir={folder / name}",
            f"--output_dir={place}/out",
        ]  # fmt: skip
        return run_script(script, arguments, folder, path)[0]


def timed(task, options, folder):
    """Seconds of each turn, by who was timed."""
    checkouts = {"before": options.before, "now": HERE}
    calls = {
        name: lambda checkout=checkout: seconds_of(TASKS[task][1], checkout, folder)
        for name, checkout in checkouts.items()
        if checkout
    }
    if task == "short":
        calls = {
            name: lambda checkout=checkout, name=name: short_run(checkout / SCRIPT, folder, checkout, options.epochs, name)
            for name, checkout in checkouts.items()
            if checkout
        }
        if options.upstream:
            script = options.upstream.resolve()
            calls["diffusers"] = lambda: short_run(script, folder, options.torchvision, options.epochs, "diffusers")
    seconds = {name: [] for name in calls}
    for turn in range(options.turns + 1):
        for name in calls if turn % 2 else reversed(calls):
            took = calls[name]()
            print(f"  {task}, turn {turn}, {name}: {took:.1f} s", file=sys.stderr, flush=True)
            if turn or options.tiny:  # the first one fills the caches
                seconds[name].append(took)
    return seconds


def main():
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--before", type=Path, help="another checkout of this package")
    upstream = os.environ.get("TRAIN_UNCONDITIONAL")
    parser.add_argument(
        "--upstream",
        type=Path,
        default=Path(upstream) if upstream else None,
        help="diffusers' train_unconditional.py; the environment variable TRAIN_UNCONDITIONAL if not given",
    )
    parser.add_argument("--torchvision", type=Path, help="folder that holds torchvision, if it is not installed")
    parser.add_argument("--turns", type=int, default=3, help="times that each command is timed")
    parser.add_argument("--epochs", type=int, default=2, help="of the short run, of 512 images in batches of 16")
    options = parse(parser, turns=0, tasks=["preview"])
    if options.before:
        options.before = options.before.resolve()
    print(machine())
    print("\n| task | what one types | before, s | now, s | now over before | diffusers' script, s | ours over it |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        (folder / "study.yaml").write_text(STUDY.format(updates=400, points=2000))
        if "short" in options.tasks:
            (folder / "unet").mkdir()
            (folder / "unet" / "config.json").write_text(json.dumps(UNET))
            write_images(folder / "images")
        for task in options.tasks:
            seconds = timed(task, options, folder)
            cells = [task, f"`{TASKS[task][0]}`", _median(seconds, "before"), _median(seconds, "now")]
            cells += [_ratio(seconds, "before"), _median(seconds, "diffusers"), _ratio(seconds, "diffusers")]
            print(f"| {' | '.join(cells)} |", flush=True)


def _median(seconds, name):
    return (
        f"{statistics.median(seconds[name]):.1f} ({', '.join(f'{one:.1f}' for one in seconds[name])})"
        if name in seconds
        else "–"
    )


def _ratio(seconds, other):
    """Ours now over another, turn by turn, the median of them."""
    if other not in seconds:
        return "–"
    return f"{statistics.median(ours / theirs for ours, theirs in zip(seconds['now'], seconds[other], strict=True)):.2f}"


if __name__ == "__main__":
    main()
