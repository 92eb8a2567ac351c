"""Real training runs, small enough for a test: a UNet of 20,000 parameters with dropout on the embedded digits."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import started

SCRIPT = Path(__file__).parents[1] / "training_scripts" / "train_ddpm.py"

TINY_UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "dropout": 0.0,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}


# Sampler, weighting and noise that have a state or look at the whole batch; with 8 timesteps the sampler is warm at once.
FOLLOWING = (
    *("--timestep_sampler=loss_second_moment:history=1", "--loss_weighting=learned_log_variance", "--noise=immiscible"),
    *("--ddpm_num_steps=8", "--log_timestep_bins=4"),
)


def tiny_arguments(folder, dropout=0.0, preflight=False, **options):
    """Arguments that make a run small, and those of these options; `folder` gets the model's configuration."""
    config = Path(folder) / f"tiny-unet-{dropout}.json"
    config.write_text(json.dumps({**TINY_UNET, "dropout": dropout}))
    return [
        f"--model_config_name_or_path={config}",
        "--distance_samples=0",
        "--eval_batch_size=2",
        "--num_inference_steps=2",
        "--num_validation_images=16",
        "--logging_steps=1",
        *(() if preflight else ("--no_preflight",)),
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def launch(*arguments, processes=2, expect=0):
    """The run by a real `accelerate launch` on the CPU, whose processes import everything themselves; returns stderr."""
    # --multi_gpu is accelerate's word for "several processes"; with --cpu it would start only one.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}"]
    command = [*launcher, "--main_process_port", str(started.free_port()), str(SCRIPT), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert result.returncode == expect, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stderr


def start_and_wait_for(happened, *arguments):
    """A run that is still going on when something `happened()`."""
    process = started.Started(SCRIPT, *arguments, env=environment())
    wait_for(happened, process)
    return process


def wait_for(happened, *processes):
    """Until it `happened()`, while these processes go on, and for two minutes at most."""
    deadline = time.monotonic() + 120
    while not happened():
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def run(*arguments, processes=1, expect=0, **how):
    """Runs to the end and returns stderr; another exit status than `expect` fails the test."""
    how = {"env": environment(), **how}
    if processes == 1:
        status, stdout, stderr = started.run(SCRIPT, *arguments, **how)
    else:
        status, stdout, stderr = started.run_ranks(SCRIPT, *arguments, processes=processes, **how)
    assert status == expect, stdout[-2000:] + stderr[-4000:]
    return stderr


def environment():
    """The environment of a run: nothing of the machine's own configuration."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_CONFIG_FILE": os.devnull}


def read_metrics(folder):
    """The rows of a run's log: those of updates, and those of validations."""
    rows = [json.loads(line) for line in (Path(folder) / "lrlab" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row], [row for row in rows if "validation_loss" in row]


def read_weights(folder):
    """The weights of a model that was saved into a folder."""
    from safetensors.torch import load_file

    return load_file(folder / "diffusion_pytorch_model.safetensors")


def read_record(folder):
    """A run's `run.json`."""
    return json.loads((Path(folder) / "lrlab" / "run.json").read_text())
