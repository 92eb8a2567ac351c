"""What a new user waits for: CPU and wall seconds from Enter to the first update, to the result, and of the parts after the
last update, beside the imports that no such run can do without.

    python benchmarks/first_minutes.py
    python benchmarks/first_minutes.py --before PATH/ANOTHER_CHECKOUT
    python benchmarks/first_minutes.py --tasks quick quick-again

The tasks take turns, after a turn that is not counted; `--before` runs each in another checkout of this package, too.
`quick-again` repeats the command of a finished `quick`.
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

HERE = Path(__file__).parents[1]
FLOOR = """
import torch, accelerate
from diffusers import DDPMScheduler, {model}
import json, time
now = time.process_time()
print(json.dumps({{"first": now, "end": now}}))
"""
# Runs a command and prints CPU seconds: until the first step of an optimizer, and of the parts after the last one.
RUN = """
import importlib, json, os, sys, time
import diffusers_lrlab.cli.main as command
first, parts = [], {}
def begin(*_):
    if not first:
        first.append(time.process_time())
        for row in PARTS:
            time_part(*row)
def time_part(part, module, *names):
    *owner, name = names
    try:
        owner = getattr(importlib.import_module(module), owner[0]) if owner else importlib.import_module(module)
        function = getattr(owner, name)
    except (ImportError, AttributeError):  # of another checkout
        return
    def timed(*args, **kwargs):
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            parts[part] = parts.get(part, 0.0) + time.process_time() - started
    setattr(owner, name, timed)
def program_of(program):
    from torch.optim.optimizer import register_optimizer_step_pre_hook  # as the command imports torch: within exit_status
    register_optimizer_step_pre_hook(begin)
    return program()
run = command.exit_status
command.exit_status = lambda program, *args: run(lambda: program_of(program), *args)
status = command.main(sys.argv[1:])
print("\\n" + json.dumps({"first": first[0], **parts, "end": time.process_time()}))
sys.exit(status)
"""
_RESULTS = "diffusers_lrlab.training.results"
PARTS = [
    ("checkpoint", "diffusers_lrlab.training.trainer", "Trainer", "save"),
    ("pipeline", "diffusers_lrlab.training.trainer", "Trainer", "save_result"),
    *(("samples", _RESULTS, kind, "samples_to_show") for kind in ("ImageResults", "PointResults")),
    *(("samples", _RESULTS, kind, "samples_to_evaluate") for kind in ("ImageResults", "PointResults")),
    *(("metrics", _RESULTS, kind, "evaluate") for kind in ("ImageResults", "PointResults")),
    *(("plots", _RESULTS, kind, "draw") for kind in ("ImageResults", "PointResults")),
    *(("plots", "diffusers_lrlab.training.plots", name) for name in ("plot_losses", "plot_lr")),
    ("plots", "diffusers_lrlab.diagnostics.plot", "plot_timesteps"),
    ("card", "diffusers_lrlab.hub.card", "write_model_card"),
    ("hashes", "diffusers_lrlab.training.run_folder", "RunFolder", "write_manifest"),
]
TRAIN = ["train", "--logger=none", "--output_dir=run", "--max_train_steps=1"]
TASKS = {
    "imports, points": FLOOR.format(model="ModelMixin"),
    "imports, digits": FLOOR.format(model="UNet2DModel"),
    "points": [*TRAIN, "--dataset_name=dino"],
    "digits": TRAIN,
    "quick": ["study", "run", "quick", "--out=study"],
    "quick-again": ["study", "run", "quick", "--out=study"],
}


def run(task, checkout):
    """CPU and wall seconds of a task in a new folder, and those that a run prints."""
    work, environment = TASKS[task], {**os.environ, "PYTHONPATH": str(checkout)}
    is_run = work[0] == "train"
    if isinstance(work, str):
        command = ["-c", work]
    elif is_run:
        command = ["-c", f"PARTS = {PARTS!r}\n{RUN}", *work]
    else:
        command = ["-m", "diffusers_lrlab", *work]
    with tempfile.TemporaryDirectory() as folder:
        if task == "quick-again":
            _started([*command[:2], *TASKS["quick"]], folder, environment)
        cpu, wall, output = _started(command, folder, environment)
    if task.startswith("quick"):
        return {"cpu": cpu, "wall": wall}
    figures = json.loads(output.splitlines()[-1])
    return {"cpu": cpu, "wall": wall, "exit": cpu - figures.pop("end"), **figures}


def _started(command, folder, environment):
    before, started = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    wall, after = time.perf_counter() - started, os.times()
    if done.returncode:
        sys.exit(done.stderr)
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, wall, done.stdout


def shown(values):
    """Median and quartiles."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def main():
    """Prints the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--before", type=Path, help="another checkout of this package")
    parser.add_argument("--turns", type=int, default=3, help="counted turns of each task")
    options = parse(parser, turns=1, tasks=["imports, points", "points"])
    checkouts = {"now": HERE} | ({"before": options.before.resolve()} if options.before else {})
    found = {(task, name): [] for task in options.tasks for name in checkouts if name == "now" or task in RUNS}
    for turn in range(options.turns + 1):
        for task, name in found if turn % 2 else reversed(found):
            figures = run(task, checkouts[name])
            print(
                f"  {task}, {name}, turn {turn}: {figures['cpu']:.1f} CPU s, {figures['wall']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
            if turn or options.tiny:  # the first one fills the caches
                found[task, name].append(figures)
    print(machine(), f"medians of {options.turns} (quartiles)", sep="; ")
    print("\n| | checkout | CPU s to the first update | over its imports | CPU s in all | s in all |\n|" + 6 * "---|")
    for (task, name), rows in found.items():
        floor, first = found.get((f"imports, {task}", "now")), [row["first"] for row in rows if "first" in row]
        over = statistics.median(first) / statistics.median(row["first"] for row in floor) if floor and first else None
        cells = [task, name, shown(first) if first else "–", f"{over:.2f}" if over else "–"]
        print(f"| {' | '.join(cells)} | {shown([row['cpu'] for row in rows])} | {shown([row['wall'] for row in rows])} |")
    parts = dict.fromkeys([*(part for part, *_ in PARTS), "exit"])
    print(f"\n| CPU s after the last update | checkout | {' | '.join(parts)} |\n|---|---|{'---|' * len(parts)}")
    for (task, name), rows in found.items():
        if "exit" in rows[0]:
            cells = [shown([row[part] for row in rows]) if part in rows[0] else "–" for part in parts]
            print(f"| {task} | {name} | {' | '.join(cells)} |")


RUNS = [task for task, work in TASKS.items() if not isinstance(work, str)]

if __name__ == "__main__":
    main()
