"""Whether two checkouts of this repository train to the same bits: ten small runs in each, compared number by number.

    python -m tests.same_bits OTHER_CHECKOUT [--only REGEX]

For changes that should change nothing: `git worktree add ../before COMMIT`, then this with `../before`. Weights, averages,
samples and every logged number are compared; seconds, names and other texts are not.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
UNET = {
    "_class_name": "UNet2DModel", "sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1,
    "block_out_channels": [8, 16], "norm_num_groups": 4, "dropout": 0.1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}  # fmt: skip
STUDY = {
    "base": {"max_train_steps": 12, "train_batch_size": 16, "num_validation_images": 60, "distance_samples": 60},
    "arms": {
        "constant": {"lr_scheduler": "constant"},
        "wsd": {"lr_scheduler": "wsd", "timestep_sampler": "clts", "loss_weighting": "min_snr"},
        "adaptive": {"timestep_sampler": "loss_second_moment", "optimizer": "adam"},
    },
    "datasets": ["dino", "moons"],
    "seeds": 2,
    "evaluation_points": 2,
}
IMAGES = (
    "train --output_dir=out --seed=3 --model_config_name_or_path=unet.json --max_train_steps=6 --train_batch_size=8 "
    "--num_validation_images=16 --logging_steps=1 --validation_steps=2 --checkpointing_steps=3 --eval_batch_size=2 "
    "--ddpm_num_inference_steps=3 --distance_samples=40 --dataset_name=digits"
).split()
POINTS = (
    "train --output_dir=out --seed=3 --dataset_name=dino --max_train_steps=20 --train_batch_size=32 --logging_steps=1 "
    "--num_validation_images=64 --validation_steps=5 --checkpointing_steps=7 --eval_batch_size=20 --distance_samples=60 "
    "--ddpm_num_steps=20 --ddpm_num_inference_steps=5"
).split()
LAUNCH = ["-m", "accelerate.commands.launch"]
LAB, TRAIN = ["-m", "diffusers_lrlab"], ["-m", "diffusers_lrlab.train"]
SCRIPT = ["-m", "diffusers_lrlab.launch", str(HERE / "tests" / "scripts" / "ddpm_script.py"), "--output_dir=.", "--seed=3"]
HOOKS = "--timestep_sampler=logit_normal --loss_weighting=min_snr --log_timesteps --optimizer=lion --strict".split()
INTERRUPTED = """
import os, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
from diffusers_lrlab.cli.main import main

updates = []
def interrupt(*_):
    updates.append(1)
    if len(updates) == 9:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(interrupt)
sys.exit(0 if main(sys.argv[1:]) in (130, 143) else "was not interrupted")
"""


def runs(port: int) -> dict[str, list[list[str]]]:
    """The commands of each run, in order, as arguments of `python`."""
    launch = [*LAUNCH, f"--main_process_port={port}"]
    shards = [*LAB, "data", "export", "dino", "shards", "--n", "2000"]
    shuffled = ["--dataset_name=shards", "--streaming", "--distance_samples=0"]
    return {
        "digits": [[*LAB, *IMAGES, "--use_ema", "--timestep_sampler=stratified", "--noise=offset"]],
        "points": [[*LAB, *POINTS, "--loss_weighting=min_snr", "--lr_scheduler=wsd", "--momentum_scheduler=mdlrc"]],
        "stream": [shards, [*LAB, *[option for option in POINTS if "dataset_name" not in option], *shuffled]],
        "processes": [[*launch, "--multi_gpu", "--num_processes=2", *TRAIN, *IMAGES[1:], "--timestep_sampler=clts"]],
        "accumulation": [[*LAB, *IMAGES, "--gradient_accumulation_steps=4", "--timestep_sampler=loss_second_moment"]],
        "study": [[*LAB, "study", "run", "study.json", "--out", "out"]],
        "script": [[*SCRIPT[:2], *HOOKS, *SCRIPT[2:]]],
        "finder": [[*LAB, "find-lr", *IMAGES[1:]]],
        "resumed": [
            ["-c", INTERRUPTED, *POINTS],
            [*LAB, *POINTS, "--resume_from_checkpoint=latest"],
        ],
    }


def numbers_of(value: object) -> object:
    """The numbers of a record, without seconds, sizes and texts."""
    if isinstance(value, dict):
        kept = {key: numbers_of(item) for key, item in value.items() if not re.search("second|memory|bytes|size", key)}
        return {key: item for key, item in kept.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [numbers_of(item) for item in value]
    return value if isinstance(value, (int, float)) else None


def found_in(folder: Path) -> dict[str, str]:
    """A hash for each file with weights, samples or numbers, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"--[0-9a-f]{12}(?=\.)", "", path.relative_to(folder).as_posix())  # of a run's configuration
        if path.suffix in (".safetensors", ".npy", ".pt"):
            content = path.read_bytes() if path.suffix != ".pt" else b""
        elif path.name == "metrics.jsonl":
            content = json.dumps([numbers_of(json.loads(line)) for line in path.read_text().splitlines()]).encode()
        elif path.parent.name == "runs" and path.suffix == ".json":
            record = json.loads(path.read_text())
            content = json.dumps(numbers_of([record["train"]["results"], record["curves"], record.get("samples")])).encode()
        elif path.name == "run.json":
            content = json.dumps(numbers_of(json.loads(path.read_text())["train"]["results"])).encode()
        elif path.name.startswith("rows-") or path.name == "lr_finder.json":
            content = json.dumps(numbers_of(json.loads(path.read_text()))).encode()
        else:
            continue
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def perform(checkout: Path, commands: list[list[str]], folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True)
    (folder / "unet.json").write_text(json.dumps(UNET))
    (folder / "study.json").write_text(json.dumps(STUDY))
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    for command in commands:
        command = [argument.replace(str(HERE), str(checkout)) for argument in command]
        done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{checkout}: {' '.join(command[:40])} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return found_in(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="a regular expression for the names of runs")
    options = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as home:
        for index, (name, commands) in enumerate(runs(29_650).items()):
            if not re.search(options.only, name):
                continue
            commands = runs(29_650 + index)[name]
            before, now = (
                perform(checkout.resolve(), commands, Path(home) / label / name)
                for label, checkout in (("other", options.other), ("this", HERE))
            )
            differing = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
            status |= bool(differing) or not before
            print(f"{name:14}{len(before):4} files" + (f", these differ: {', '.join(differing)}" if differing else " equal"))
    return status


if __name__ == "__main__":
    sys.exit(main())
