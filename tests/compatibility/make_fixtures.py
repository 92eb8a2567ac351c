"""Makes the fixtures of test_compatibility.py: runs, studies and help texts as version 0.1.0 wrote them.

    python make_fixtures.py --tree CHECKOUT --out fixtures/v1

CHECKOUT is a clone of the project at the last commit before the refactor (e2a08e3). The fixtures are what users of that
version have on disk, so they are not made again when the code changes. This script only shows how they came to be.
"""

import argparse
import contextlib
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

MODELS = {
    "tiny-mlp": {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 16, "embedding_size": 8, "num_layers": 1},
    "tiny-unet": {
        **{"_class_name": "UNet2DModel", "sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1},
        **{"block_out_channels": [4, 4], "norm_num_groups": 4, "attention_head_dim": 4},
        **{"down_block_types": ["DownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "UpBlock2D"]},
    },
}
POINTS = """--dataset_name moons --model_config_name_or_path tiny-mlp --train_batch_size 32 --num_validation_images 50
    --distance_samples 50 --eval_batch_size 20 --ddpm_num_steps 20 --cpu_threads 1""".split()
# The sampler and the schedule follow the losses, and so have a state that checkpoints must keep.
POINTS_RUN = [
    *POINTS,
    *"""--max_train_steps 40 --checkpointing_steps 20 --logging_steps 5 --validation_steps 10 --learning_rate 1e-3
    --timestep_sampler loss_second_moment:history=2
    --lr_scheduler reduce_lr_on_plateau:patience=0,factor=0.7,threshold=0.3""".split(),
]
IMAGES_RUN = """--model_config_name_or_path tiny-unet --train_batch_size 8 --num_validation_images 16 --frechet_samples 0
    --eval_batch_size 2 --ddpm_num_inference_steps 2 --cpu_threads 1 --max_train_steps 4 --checkpointing_steps 2
    --logging_steps 1 --validation_steps 2 --timestep_sampler clts --noise offset:strength=0.2 --random_flip""".split()
FINDER = "--num_updates 200 --repeats 1 --probe_size 512 --start_lr 1e-4 --end_lr 3".split()
FINDER_RUN = [*POINTS, *"--train_batch_size 128 --adam_beta2 0.99".split()]
RECORDS = {
    "optimizer": "--optimizer muon:momentum=0.9 --lr_scheduler step:step_size=2,gamma=0.5 --lr_warmup_steps 0.25",
    "momentum": "--momentum_scheduler demon:min_momentum=0.1 --lr_scheduler constant --ema_update_every 2",
    "noise": "--noise immiscible --prediction_type v_prediction --loss_weighting min_snr --ddpm_beta_schedule sigmoid",
    "timestep_lr": "--timestep_lr banded:factors=[1|2] --lr_scheduler rex:d=0.8 --log_timestep_bins 5",
    "scale_lr": "--scale_lr sqrt --base_batch_size 16 --gradient_accumulation_steps 2 --no_use_ema --max_grad_norm 0",
}
STUDY = {
    "title": "A study of two schedules",
    "base": {
        **{"model_config_name_or_path": "tiny-mlp", "max_train_steps": 40, "train_batch_size": 16},
        **{"num_validation_images": 50, "distance_samples": 50, "ddpm_num_steps": 10, "lr_warmup_steps": 0},
        **{"learning_rate": 1e-3, "checkpointing_steps": 10},
    },
    "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine", "description": "half a cosine"}},
    "datasets": ["dino", "moons"],
    "seeds": 2,
    "metrics": ["energy_distance", "validation_loss_ema"],
    "evaluation_points": 3,
}
COMMANDS = {
    "train_ddpm": ["training_scripts/train_ddpm.py"],
    "find_lr": ["training_scripts/find_lr.py"],
    "run_study": ["training_scripts/run_study.py"],
    "launch": ["-m", "diffusers_lrlab.launch"],
    "lrlab": ["-m", "diffusers_lrlab.cli"],
}
# Of a run that is finished, pictures and the pipeline's own code say nothing about compatibility.
PICTURES = ("*.png", "*.gif", "*.svg", "*.html", ".lock", "*.py")


class Maker:
    """Runs the commands of a checkout in the folder of the fixtures."""

    def __init__(self, tree, out):
        self.tree, self.out = tree.resolve(), out.resolve()
        fixed = {"PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
        self.env = {**os.environ, **fixed, "ACCELERATE_CONFIG_FILE": os.devnull}

    def run(self, *words, stop=None):
        """Stdout of `python WORDS`; `stop=(update, signal)` sends it a signal in that update, counted over all runs."""
        command = [*words] if stop is None else [__file__, "--stop", stop[0], int(stop[1] or 0), *words]
        done = subprocess.run(
            [sys.executable, *map(str, command)], cwd=self.out, env=self.env, capture_output=True, text=True
        )
        expected = {None: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[stop and stop[1]]
        if done.returncode != expected:
            raise SystemExit(f"{words} ended with {done.returncode}, not {expected}:\n{done.stderr}")
        return done.stdout

    def train(self, *options, stop=None):
        self.run(self.tree / "training_scripts" / "train_ddpm.py", *options, stop=stop)

    def study(self, action, *words, stop=None):
        # Stopped or not, all studies go through the same driver, which fixes how matrices are multiplied.
        self.run("lrlab", "study", action, *words, stop=stop or (0, None))


def make(maker):
    out = maker.out
    for name, config in MODELS.items():
        (out / name).mkdir()
        (out / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("card", "records", "help"):
        (out / name).mkdir()

    # Killed in update 27, so that the log is ahead of the checkpoint.
    maker.train(*POINTS_RUN, "--output_dir", "points-run")
    maker.train(*POINTS_RUN, "--output_dir", "points-run-interrupted", stop=(27, signal.SIGKILL))
    maker.train(*IMAGES_RUN, "--output_dir", "images-run")
    maker.train(*IMAGES_RUN, "--output_dir", "images-run-interrupted", stop=(2, signal.SIGINT))
    maker.run(maker.tree / "training_scripts" / "find_lr.py", *FINDER_RUN, *FINDER, "--output_dir", "finder-result")
    options = {"points-run": POINTS_RUN, "images-run": IMAGES_RUN, "finder-result": FINDER_RUN}
    for name, words in RECORDS.items():
        options[name] = [*POINTS, *"--max_train_steps 4 --logging_steps 1".split(), *words.split()]
        maker.train(*options[name], "--output_dir", name)
        shutil.copy(out / name / "lrlab" / "run.json", out / "records" / f"{name}.json")
        shutil.rmtree(out / name)
    (out / "options.json").write_text(json.dumps(options, indent=1) + "\n")
    for name in ("points-run", "images-run"):
        shutil.move(out / name / "README.md", out / "card" / f"{name}.md")
    for name in ("checkpoint-2", "checkpoint-4", "unet", "scheduler"):
        shutil.rmtree(out / "images-run" / name)
    shutil.rmtree(out / "points-run" / "checkpoint-20")

    (out / "study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    maker.study("run", "study.yaml", "--out", "study")
    shutil.move(out / "study" / "report" / "report.md", out / "card" / "study-report.md")
    shutil.move(out / "study" / "report" / "tables", out / "card" / "study-tables")
    # Two stacks of four runs, each in two threads: the second stack is stopped in its update 15. One by one: the last run.
    stacks, one_by_one = ("--stack_size", "4"), ("--executor", "local")
    maker.study("run", "study.yaml", "--out", "study-interrupted", *stacks, stop=(2 * (40 + 15), signal.SIGINT))
    maker.study("run", "study.yaml", "--out", "study-local-interrupted", *one_by_one, stop=(7 * 40 + 15, signal.SIGINT))

    for name, words in COMMANDS.items():
        words = [str(maker.tree / words[0]), *words[1:]] if words[0] != "-m" else words
        (out / "help" / f"{name}.txt").write_text(maker.run(*words, "--help"))
    flags = json.loads(maker.run(__file__, "--flags", maker.tree))
    (out / "help" / "flags.json").write_text(json.dumps(flags, indent=1) + "\n")
    for command in flags:
        if command.startswith("lrlab "):
            file = out / "help" / f"{command.replace(' ', '-')}.txt"
            file.write_text(maker.run("-m", "diffusers_lrlab.cli", *command.split()[1:], "--help"))


def clean(out):
    """Removes what says nothing, and makes sure that nothing names this machine."""
    for pattern in PICTURES:
        for file in out.rglob(pattern):
            file.unlink()
    for folder in sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    for file in out.rglob("trainer.json"):  # a study's runs keep whole paths
        file.write_text(file.read_text().replace(f"{out}/", ""))
    names = {os.uname().nodename, str(Path.home()), tempfile.gettempdir(), str(out), str(out.parents[2]), sys.prefix}
    for file in (path for path in out.rglob("*") if path.is_file()):
        text = file.read_bytes()
        if found := [name for name in names if len(name) > 3 and name.encode() in text]:  # a shorter one may be chance
            raise SystemExit(f"{file} names {found}.")


# --- what runs inside the checkout's own process -----------------------------------------------------------------------


def stopped(updates, number, script, arguments):
    """Runs a script whose process gets a signal in an update, if not 0; products of matrices are torch's own."""
    from diffusers_lrlab.study.matmuls import STOCK
    from diffusers_lrlab.study.stack import Stack
    from diffusers_lrlab.training.loop import Trainer

    from diffusers_lrlab.study import bench

    done = 0

    def counted(do_update):
        def counting(*inputs):
            nonlocal done
            done += 1
            if done == updates:
                os.kill(os.getpid(), number)
            return do_update(*inputs)

        return counting

    for kind in (Stack, Trainer):
        kind.do_update = counted(kind.do_update)
    bench.fastest_products = lambda *_: STOCK
    sys.argv = [script, *arguments]
    if script == "lrlab":
        sys.exit(importlib.import_module("diffusers_lrlab.cli").main())
    runpy.run_path(script, run_name="__main__")


class _Captured(BaseException):
    pass


@contextlib.contextmanager
def captured_parser():
    """Yields a list that gets the parser of the command that runs inside this block; the command goes no further."""
    parsers, parse = [], argparse.ArgumentParser.parse_known_args

    def capture(parser, *_, **__):
        parsers.append(parser)
        raise _Captured

    argparse.ArgumentParser.parse_known_args = capture
    try:
        with contextlib.suppress(_Captured):
            yield parsers
    finally:
        argparse.ArgumentParser.parse_known_args = parse


def flags_of(name, parser):
    """From each command of a parser to its flags: default, choices, type, and how many values they take."""
    flags, more = {}, {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, subparser in action.choices.items():
                more |= flags_of(f"{name} {command}", subparser)
            continue
        if action.dest == "help":
            continue
        facts = {
            "default": action.default if isinstance(action.default, (bool, int, float, type(None))) else str(action.default),
            "choices": None if action.choices is None else list(map(str, action.choices)),
            "type": getattr(action.type, "__name__", None),
            "nargs": action.nargs,
            "required": action.required,
        }
        flags |= dict.fromkeys(action.option_strings or [action.dest], facts)
    return {name: flags, **more}


def all_flags(tree):
    flags = {}
    for name, words in COMMANDS.items():
        with captured_parser() as parsers:
            if words[0] == "-m":
                sys.argv = [name]
                runpy.run_module(words[1], run_name="__main__")
            else:
                sys.argv = [words[0]]
                runpy.run_path(str(Path(tree) / words[0]), run_name="__main__")
        flags |= flags_of(name, parsers[0])
    return flags


def main():
    if sys.argv[1] == "--stop":
        updates, number, script, *arguments = sys.argv[2:]
        stopped(int(updates), int(number), script, arguments)
    elif sys.argv[1] == "--flags":
        print(json.dumps(all_flags(sys.argv[2])))
    else:
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--tree", type=Path, required=True, help="the checkout whose commands are run")
        parser.add_argument("--out", type=Path, required=True, help="a new folder")
        options = parser.parse_args()
        options.out.mkdir(parents=True)
        maker = Maker(options.tree, options.out)
        make(maker)
        clean(maker.out)


if __name__ == "__main__":
    main()
