"""What a new user waits for: seconds of whole commands, from Enter to the result.

    python benchmarks/first_minutes.py
    python benchmarks/first_minutes.py --tasks find-lr study-again
    python benchmarks/first_minutes.py --tasks short --upstream PATH/train_unconditional.py
    python benchmarks/first_minutes.py --before PATH/ANOTHER_CHECKOUT

`find-lr` follows a training in the same folder, and `study-again` starts a finished study again; neither the training nor
the first start is timed. `--before` times the same commands in another checkout of this package, `--upstream` the short run
in diffusers' own script, which needs what benchmarks/train_step.py says. The commands of a task alternate, after a turn that
is not counted, and ratios are taken turn by turn. A command that the other checkout refuses has no time there.
"""

import json
import os
import shutil
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
LRLAB = ["-m", "diffusers_lrlab"]
PREVIEW = ["lrlab", "preview", "--lr_scheduler", "cosine", "--num_training_steps", "10000"]
DINO = ["--dataset_name", "dino"]
FIRST_RUN = ["train", *DINO, "--max_train_steps", "300"]
QUICK = ["study", "run", "quick", "--out", "first-study"]
# What a user types, and the arguments of Python that do the same in a checkout.
TASKS = {
    "preview": (" ".join(PREVIEW), [*LRLAB, *PREVIEW[1:]]),
    "digits": (f"{SCRIPT} --dry_run", [SCRIPT, "--dry_run"]),
    "dino": (f"{SCRIPT} --dataset_name dino --dry_run", [SCRIPT, *DINO, "--dry_run"]),
    "first-run": (f"lrlab {' '.join(FIRST_RUN)}", [*LRLAB, *FIRST_RUN]),
    "find-lr": ("lrlab find-lr --dataset_name dino", [*LRLAB, "find-lr", *DINO]),
    "study": ("lrlab study run my_study.yaml --out my-study", [*LRLAB, "study", "run", "study.yaml", "--out", "study"]),
    "quick": (f"lrlab {' '.join(QUICK)}", [*LRLAB, *QUICK]),
    "study-again": (f"lrlab {' '.join(QUICK)}", [*LRLAB, *QUICK]),
    "short": (f"{SCRIPT} --train_data_dir images --num_epochs 2 ...", []),
}
# What precedes a task in its folder, once and untimed.
PREPARATIONS = {"find-lr": [*LRLAB, "train", *DINO, "--max_train_steps", "100"], "study-again": TASKS["study-again"][1]}
# With --tiny: the quick study is that of STUDY, and the finder and the training before it are short.
TINY = {"quick": "study.yaml", "find-lr": "find-lr --num_updates 10 --repeats 1", "100": "10", "300": "10"}


def run(arguments, checkout, cwd, is_tiny):
    """Seconds of one command, with the package of a checkout."""
    words = [str(checkout / word) if word == SCRIPT else word for word in arguments]
    if is_tiny:
        words = [part for word in words for part in TINY.get(word, word).split(" ")]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    return seconds


def seconds_of(task, checkout, cwd, is_tiny):
    """Seconds of a task in a new folder, or in that of its preparation."""
    if task not in PREPARATIONS:
        shutil.rmtree(cwd, ignore_errors=True)
    if not cwd.exists():
        cwd.mkdir()
        shutil.copy(cwd.parent / "study.yaml", cwd)
        if task in PREPARATIONS:
            run(PREPARATIONS[task], checkout, cwd, is_tiny)
    return run(TASKS[task][1], checkout, cwd, is_tiny)


def short_run(script, folder, path, epochs, name):
    """Seconds of a short run by our script or diffusers': the same images, model, batch and sampling steps."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        arguments = [
            f"--train_data_dir={folder / 'images'}", f"--model_config_name_or_path={folder / 'unet'}", "--resolution=32",
            "--train_batch_size=16", f"--num_epochs={epochs}", "--learning_rate=1e-3", "--lr_warmup_steps=10", "--use_ema",
            "--num_inference_steps=10", "--eval_batch_size=16", f"--cache_dir={folder / name}",
            f"--output_dir={out}/out",
        ]  # fmt: skip
        return run_script(script, arguments, folder, path)[0]


def timed(task, options, folder):
    """Seconds of each turn, by checkout or script."""
    checkouts = {"before": options.before, "now": HERE}
    calls = {
        name: lambda checkout=checkout, name=name: seconds_of(task, checkout, folder / f"{task}-{name}", options.tiny)
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
        for name in list(calls if turn % 2 else reversed(calls)):
            try:
                took = calls[name]()
            except SystemExit as refusal:
                if name != "before":
                    raise
                print(f"  {task}: refused by the other checkout: {refusal}", file=sys.stderr, flush=True)
                del calls[name], seconds[name]
                continue
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
    parser.add_argument("--turns", type=int, default=3, help="timed turns of each command")
    parser.add_argument("--epochs", type=int, default=2, help="of the short run on 512 images in batches of 16")
    options = parse(parser, turns=0, tasks=["preview", "first-run", "find-lr", "study-again"])
    if options.before:
        options.before = options.before.resolve()
    print(machine())
    print("\n| task | what one types | before, s | now, s | now over before | diffusers' script, s | ours over it |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        (folder / "study.yaml").write_text(
            STUDY.format(updates=20 if options.tiny else 400, points=100 if options.tiny else 2000)
        )
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
    """The median of the ratios of now to another, turn by turn."""
    if other not in seconds:
        return "–"
    return f"{statistics.median(ours / theirs for ours, theirs in zip(seconds['now'], seconds[other], strict=True)):.2f}"


if __name__ == "__main__":
    main()
