"""Helpers of all benchmarks."""

import argparse
import platform
import time
from functools import partial
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "training_scripts" / "train_ddpm.py"

# 35.75 M parameters, for images of 32x32.
UNET = {"sample_size": 32, "in_channels": 3, "out_channels": 3, "layers_per_block": 2}
UNET |= {"block_out_channels": (128, 256, 256, 256), "norm_num_groups": 32, "dropout": 0.0}
UNET |= {"down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D")}
UNET |= {"up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D")}


def make_parser(text):
    """A parser with a module's docstring as its help and with `--tiny`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, only to see that it runs")
    return parser


def parse(parser, **tiny):
    """The options; with `--tiny`, those in `tiny`."""
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(tiny)
    return options


def machine():
    """The machine and the versions, in one line."""
    import diffusers
    import torch

    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    return (
        f"{cpu}, {torch.get_num_threads()} threads; Python {platform.python_version()}, torch {torch.__version__}, "
        f"diffusers {diffusers.__version__}"
    )


def milliseconds(call, *arguments):
    """Milliseconds of a call."""
    started = time.perf_counter()
    call(*arguments)
    return 1e3 * (time.perf_counter() - started)


def in_turns(calls, rounds, warm_up=1):
    """Milliseconds of each call in each round, by name: alternating, after rounds that do not count."""
    times = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name in calls if turn % 2 else reversed(calls):
            spent = milliseconds(calls[name])
            if turn >= warm_up:
                times[name].append(spent)
    return times


def updates_in_turns(loops, rounds, warm_up=10):
    """The same of the updates of training loops, which are iterators."""
    return in_turns({name: partial(next, loop) for name, loop in loops.items()}, rounds, warm_up)


def make_trainer(folder, arguments):
    """A `Trainer` on the CPU with options of train_ddpm.py, ready to run updates one by one."""
    from accelerate import Accelerator

    from diffusers_lrlab.training.arguments import parse_arguments
    from diffusers_lrlab.training.kinds import kind_of
    from diffusers_lrlab.training.plan import make_plan
    from diffusers_lrlab.training.resolve import resolve_config
    from diffusers_lrlab.training.run_folder import RunFolder
    from diffusers_lrlab.training.trainer import Trainer

    config = resolve_config(parse_arguments([*arguments, f"--output_dir={folder}"], ""))
    data = kind_of(config).load_data(config, 1)
    return Trainer(make_plan(config, data, None), data, Accelerator(cpu=True), RunFolder(Path(folder)))
