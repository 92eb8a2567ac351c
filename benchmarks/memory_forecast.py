"""The forecast of memory beside the peak of a real process, or CUDA's own count on a GPU.

    python benchmarks/memory_forecast.py
    python benchmarks/memory_forecast.py --quick
    python benchmarks/memory_forecast.py --guide

Each case is a process of its own that loads data, makes the trainer and does a few updates. What is forecast is the growth
from just before the model is made. On a CPU a case is measured twice: with an allocator that gives every large tensor its
own pages and takes them back, which shows what tensors take, and with glibc's as it is, whose heap keeps gaps between them.
`--guide` forecasts an example of which people pass round rough figures, and measures nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import make_parser

CASES = {
    "UNet 8x8, adamw": [],
    "sgd": ["--optimizer=sgd"],
    "rmsprop": ["--optimizer=rmsprop"],
    "adafactor": ["--optimizer=adafactor"],
    "no EMA": ["--no_use_ema"],
    "accumulation of 2": ["--gradient_accumulation_steps=2"],
    "gradient checkpointing": ["--gradient_checkpointing"],
    "bf16": ["--mixed_precision=bf16"],
    "UNet 32x32": ["--train_data_dir={images}", "--resolution=32", "--train_batch_size=32"],
    "UNet 32x32, sgd": ["--train_data_dir={images}", "--resolution=32", "--train_batch_size=32", "--optimizer=sgd"],
    "UNet 32x32, checkpointing": [
        *("--train_data_dir={images}", "--resolution=32", "--train_batch_size=32", "--gradient_checkpointing"),
    ],
    "UNet 32x32, channels last": [
        *("--train_data_dir={images}", "--resolution=32", "--train_batch_size=32", "--channels_last"),
    ],
    "another UNet, 32x32": [
        *(
            "--train_data_dir={images}",
            "--resolution=32",
            "--train_batch_size=32",
            "--model_config_name_or_path={images}/wide",
        ),
    ],
    "UNet 64x64": ["--train_data_dir={images}", "--resolution=64", "--train_batch_size=8"],
    "points": ["--dataset_name=dino", "--train_batch_size=20000"],
}
LARGE = ["--train_batch_size=512"]  # of digits: small batches drown in what a process takes anyway
_UPDATES = 4
WIDE = {"sample_size": 32, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": [64, 128, 192]}
WIDE |= {"down_block_types": ["DownBlock2D"] * 3, "up_block_types": ["UpBlock2D"] * 3}
# 35.7 M parameters, batch 64, and a rule of thumb for such a model, in MB, whose source nobody names.
EXAMPLE = WIDE | {"sample_size": 64, "layers_per_block": 2, "block_out_channels": [128, 256, 256, 256]}
EXAMPLE |= {"down_block_types": ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"]}
EXAMPLE |= {"up_block_types": ["UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"]}
SAID = {
    "parameters": "140",
    "gradients": "140",
    "optimizer": "280",
    "activations": "2,000 to 4,000",
    "total": "3,000 to 5,000",
}


def memory_now(peak):
    """Bytes in RAM of this process, now or at their peak since [`forget_peak`]."""
    with open("/proc/self/status", encoding="ascii") as file:
        key = "VmHWM" if peak else "VmRSS"
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(key))


def forget_peak():
    """Resets the peak."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def warm_up(device):
    """Does an update of a small run, as libraries load and set up parts at their first use."""
    import torch
    from diffusers.training_utils import EMAModel

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.SiLU()).to(device)
    optimizer, ema = torch.optim.AdamW(model.parameters(), fused=True), EMAModel(model.parameters(), foreach=True)
    for kind in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, kind, enabled=kind != torch.float32):
            model(torch.randn(2, 1, 8, 8, device=device)).float().square().mean().backward()
        optimizer.step()
        ema.step(model.parameters())


def measure(arguments):
    """Forecast and measured bytes of one case, in this process."""
    import torch

    from diffusers_lrlab.data.batches import iterate_batches
    from diffusers_lrlab.forecast.memory import forecast_memory
    from diffusers_lrlab.training import prepare as preparing
    from diffusers_lrlab.training.arguments import parse_arguments
    from diffusers_lrlab.training.run_folder import RunFolder
    from diffusers_lrlab.training.trainer import Trainer

    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        preparing.keep_freed_memory = lambda: None  # it would set the threshold anew
    plan, data, accelerator = preparing.prepare(parse_arguments(arguments, ""))
    on_gpu = accelerator.device.type == "cuda"
    warm_up(accelerator.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
    before = torch.cuda.memory_allocated() if on_gpu else memory_now(peak=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder)))
        batches = iterate_batches(data, plan.layout, 0, range(_UPDATES))
        trainer.stepper.model.train()
        for images in batches:
            trainer.do_update(images)
            trainer.run.advance()
    after = torch.cuda.max_memory_allocated() if on_gpu else memory_now(peak=True)
    forecast = forecast_memory(plan, device=accelerator.device.type)._replace(checkpoint=0)  # none is written here
    return {"before": before, "measured": after - before, "forecast": forecast.total, **forecast._asdict()}


def print_example(images):
    """The example beside its forecast."""
    from diffusers_lrlab.forecast.memory import forecast_memory
    from diffusers_lrlab.training.arguments import parse_arguments
    from diffusers_lrlab.training.prepare import prepare

    arguments = [f"--train_data_dir={images}", "--resolution=64", "--train_batch_size=64", "--num_validation_images=0"]
    arguments += [f"--model_config_name_or_path={images}/example", f"--output_dir={images}/run"]
    plan, *_ = prepare(parse_arguments(arguments, ""))
    whole = forecast_memory(plan)
    checkpointed = forecast_memory(plan, gradient_checkpointing=True)
    print(f"64x64, batch 64, {plan.num_parameters:,} parameters, MiB\n")
    print("| part | forecast | with gradient checkpointing | rule of thumb, MB |")
    print("|---|---|---|---|")
    for part in (*whole._fields, "total"):
        sizes = (f"{getattr(forecast, part) / 2**20:,.0f}" for forecast in (whole, checkpointed))
        print(f"| {part} | {' | '.join(sizes)} | {SAID.get(part, '–')} |")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the first five cases")
    parser.add_argument(
        "--guide", action="store_true", help="only the example that has been talked about, without measuring"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.case:
        print(json.dumps(measure(rest)))
        return
    import numpy as np
    from PIL import Image

    with tempfile.TemporaryDirectory() as images:
        rng = np.random.default_rng(0)
        for number in range(80):
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(f"{images}/{number}.png")
        for name, config in (("wide", WIDE), ("example", EXAMPLE)):
            (Path(images) / name).mkdir()
            (Path(images) / name / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", **config}))
        if options.guide:
            print_example(images)
            return
        print("| case | forecast, MiB | tensors, MiB | forecast is off by | with glibc's heap, MiB | forecast is off by |")
        print("|---|---|---|---|---|---|")
        cases = [("points", CASES["points"])] if options.tiny else list(CASES.items())
        for name, arguments in cases[: 5 if options.quick else None]:
            given = [argument.format(images=images) for argument in arguments]
            if not any("batch_size" in argument for argument in given):
                given += LARGE if "accumulation" not in name else ["--train_batch_size=256"]
            command = [sys.executable, __file__, "--case", name, *given, f"--output_dir={images}/run"]
            exact, usual = (run_case(command, allocator) for allocator in ({"MALLOC_MMAP_THRESHOLD_": "65536"}, {}))
            cells = [f"{exact['forecast'] / 2**20:.1f}"]
            for case in (exact, usual):
                cells += [f"{case['measured'] / 2**20:.1f}", f"{case['forecast'] / case['measured'] - 1:+.1%}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def run_case(command, allocator):
    """The output of a process that measures a case."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **allocator})
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
