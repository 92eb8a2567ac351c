"""Makes the fixture of test_compatibility.py: what version 0.1.0 writes, and the flags that it takes.

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests python tests/compatibility/make_fixture.py

It is made again as often as the code changes before 0.1.0 is published, and never afterwards.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import yaml
from accelerate.state import AcceleratorState, GradientState
from blank_pictures import leave_pictures_blank

import diffusers_lrlab
from diffusers_lrlab.cli.main import main as lrlab
from diffusers_lrlab.study.stacked.stack import Stack

FIXTURE = Path(__file__).parent / "v0.1.0"
MODEL = {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 16, "embedding_size": 8, "num_layers": 1}
# The sampler and the schedule follow the losses, and so have a state that checkpoints must keep.
RUN = """--dataset_name moons --model_config_name_or_path tiny-mlp --train_batch_size 32 --num_validation_images 50
    --distance_samples 50 --eval_batch_size 20 --ddpm_num_steps 20 --max_train_steps 40
    --checkpointing_steps 20 --logging_steps 5 --validation_steps 10 --learning_rate 1e-3 --save_images_epochs 100
    --timestep_sampler loss_second_moment:history=2 --ema power_function
    --lr_scheduler reduce_lr_on_plateau:patience=0,factor=0.7,threshold=0.3""".split()
STUDY = {
    "title": "A study of two schedules",
    "base": {
        **{"model_config_name_or_path": "tiny-mlp", "max_train_steps": 40, "train_batch_size": 16},
        **{"num_validation_images": 50, "distance_samples": 50, "ddpm_num_steps": 10, "lr_warmup_steps": 0},
        **{"learning_rate": 1e-3, "checkpointing_steps": 10},
    },
    "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine", "description": "half a cosine"}},
    "datasets": ["moons"],
    "seeds": 2,
    "metrics": ["energy_distance", "validation_loss_ema"],
    "evaluation_points": 3,
}


def call(*arguments):
    """The exit status of `lrlab` in this process."""
    # accelerate keeps one precision and accumulation for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return lrlab(list(map(str, arguments)))


def make():
    """All of the fixture, in the current folder."""
    Path("tiny-mlp").mkdir()
    Path("tiny-mlp", "config.json").write_text(json.dumps(MODEL, indent=1) + "\n")
    assert call("train", *RUN, "--output_dir", "run") == 0
    Path("study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    assert call("study", "run", "study.yaml", "--out", "study") == 0
    # Two stacks of two runs, of which the second is stopped in its update 15.
    with stopped(40 + 15):
        assert call("study", "run", "study.yaml", "--out", "study-begun", "--stack_size", 2) == 128 + signal.SIGINT
    Path("flags.json").write_text(json.dumps(all_flags(), indent=0) + "\n")
    for file in Path().rglob(".lock*"):
        file.unlink()


@contextlib.contextmanager
def stopped(updates):
    """This process gets SIGINT in the given update of its stacks."""
    done, do_update = 0, Stack.do_update

    def counted(*inputs):
        nonlocal done
        done += 1
        if done == updates:
            os.kill(os.getpid(), signal.SIGINT)
        return do_update(*inputs)

    Stack.do_update = counted
    try:
        yield
    finally:
        Stack.do_update = do_update


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
    """From each command of a parser to its flags: default, choices, and how many values they take."""
    flags, more = {}, {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, subparser in action.choices.items():
                more |= flags_of(f"{name} {command}", subparser)
        elif action.dest != "help":
            default = action.default if isinstance(action.default, (bool, int, float, type(None))) else str(action.default)
            choices = None if action.choices is None else list(map(str, action.choices))
            flags |= dict.fromkeys(action.option_strings or [action.dest], [default, action.nargs, choices])
    return {name: flags, **more}


def all_flags():
    """From the names of commands to their flags."""
    flags = {}
    for name, arguments in (("lrlab", ["list"]), ("train", ["train"]), ("find-lr", ["find-lr"]), ("launch", [])):
        with captured_parser() as parsers:
            lrlab(arguments) if arguments else importlib.import_module("diffusers_lrlab.launch").main()
        flags |= flags_of(name, parsers[-1])
    return flags


def check_names_nothing_of_here(folder):
    names = {os.uname().nodename, str(Path.home()), str(folder), str(Path(diffusers_lrlab.__file__).parents[1])}
    for file in (path for path in folder.rglob("*") if path.is_file()):
        if found := [name for name in names if len(name) > 5 and name.encode() in file.read_bytes()]:
            raise SystemExit(f"{file} names {found}.")


if __name__ == "__main__":
    leave_pictures_blank()
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        make()
        check_names_nothing_of_here(Path(temporary))
        shutil.rmtree(FIXTURE, ignore_errors=True)
        shutil.copytree(temporary, FIXTURE)
