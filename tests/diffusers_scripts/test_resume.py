"""
Diffusers' own scripts, killed at random instants and started again, end with the bits of one that was never killed.

    DIFFUSERS_CHECKOUT=path/to/diffusers RESUME_KILLS=10 python -m pytest -m slow tests/diffusers_scripts/test_resume.py
"""

import os
import random
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from .cases import CASES, command, run
from .test_scripts import CHECKOUT, EXAMPLES, inputs  # noqa: F401

UPDATES, KILLS = 12, int(os.environ.get("RESUME_KILLS", "1"))
SCRIPTS = (
    *("text_to_image", "unconditional", "dreambooth_lora_sd3"),
    *("text_to_image_lora", "text_to_image_lora_sdxl", "dreambooth_lora_lumina2"),
)
# Of one script of each objective: settings that count images, of optimizer and average.
IN_IMAGES = ("--optimizer=adamw:beta2_half_life=500,tau=2000,cautious=true", "--ema=half_life:images=20")
WITH_IMAGES = ("unconditional", "dreambooth_lora_sd3")
KILLED = (-14, 1)  # by the alarm; torch.distributed.run says 1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="DIFFUSERS_CHECKOUT does not name a checkout of diffusers"),
]


def losses(folder):
    """Everything that was logged, by update: what comes last, since an update may be done again."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    events = [event for path in files for event in EventFileLoader(str(path)).Load()]
    return {
        (value.tag, event.step): list(value.tensor.float_val)
        for event in events
        for value in event.summary.value
        if event.step
    }


def end_of(folder):
    """The weights that were saved, and the state of the last checkpoint with its optimizer."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        found |= {f"{path.relative_to(folder)}:{name}": value for name, value in load_file(path).items()}
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    states = torch.load(last / "optimizer.bin")["state"]
    found |= {f"{key}:{name}": value for key, state in states.items() for name, value in state.items()}
    assert len(found) > 10
    return found


def last_start(start, folder):
    """To the end; from the checkpoint before, where the script was killed after its last one and has no epoch left."""
    done = start(folder)
    if "remove this checkpoint and resume" in done.stderr:
        last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        shutil.rmtree(last)
        done = start(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "It resumed after update" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("accumulation", "processes"), [(1, 1), (4, 1), (1, 2)])
def test_killed_at_random_instants(tmp_path, inputs, name, accumulation, processes):  # noqa: F811
    if "lora" in name and find_spec("peft") is None:
        pytest.skip("peft is not installed")
    case = CASES[name]
    options = ["--exact_resume", "--strict", *(["--fix_lr_clock"] if processes > 1 else [])]
    options += IN_IMAGES if name in WITH_IMAGES else ()

    def start(folder, **changed):
        batch_size = 1 if accumulation * processes > 1 else 2
        own = command(case, EXAMPLES, inputs, folder, UPDATES, accumulation, batch_size)
        own[own.index("--checkpointing_steps") + 1] = "1"
        return run([*own, "--resume_from_checkpoint=latest"], options, processes, **changed)

    for folder in (tmp_path / "whole", tmp_path / "killed"):
        folder.mkdir()
    done = start(tmp_path / "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    instants = random.Random(f"{name} {accumulation} {processes}")
    for _ in range(KILLS):
        done = start(tmp_path / "killed", KILL_AFTER_SECONDS=str(instants.uniform(0.05, 1.5)))
        assert done.returncode in (0, *KILLED), done.stderr[-3000:]
    last_start(start, tmp_path / "killed")
    if name in WITH_IMAGES:
        (group, *_) = torch.load(tmp_path / "killed" / f"checkpoint-{UPDATES}" / "optimizer.bin")["param_groups"]
        images = accumulation * processes * (1 if accumulation * processes > 1 else 2)
        assert group["betas"][1] == 0.5 ** (images / 500)
    whole, killed = (end_of(tmp_path / folder) for folder in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert [key for key, value in whole.items() if not torch.equal(value, killed[key])] == []
    # Trackers lose what they have not written when they are killed.
    logged, all_logged = losses(tmp_path / "killed"), losses(tmp_path / "whole")
    assert logged
    assert logged == {key: all_logged[key] for key in logged}
