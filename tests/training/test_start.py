"""What a run imports before its first update: on points, little more than torch, accelerate and diffusers' base classes."""

import subprocess
import sys

import pytest

HEAVY = {
    "datasets",
    "diffusers.hooks",
    "diffusers.models.unets",
    "diffusers.pipelines.pipeline_utils",
    "diffusers.training_utils",
    "diffusers_lrlab.evaluation.metrics",
    "diffusers_lrlab.hub",
    "diffusers_lrlab.training.plots",
    "jsonschema",
    "matplotlib",
    "pandas",
    "peft",
    "pyarrow",
    "scipy",
    "sklearn",
    "tensorboard",
    "transformers.modeling_utils",
    "wandb",
}
CODE = f"""
import sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
seen = []
register_optimizer_step_pre_hook(lambda *_: seen.append(sorted({HEAVY!r} & set(sys.modules))))
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.training.checkpoints import CheckpointWriter
write, before = CheckpointWriter._write, []
def written(*args):
    before.append("diffusers.hooks" in sys.modules)
    write(*args)
CheckpointWriter._write = written
status = main(["train", "--dataset_name=dino", "--max_train_steps=1", "--ddpm_num_steps=2", "--distance_samples=0",
               "--logger=none", "--output_dir=run"])
print(status, seen, before, "pandas" in sys.modules)
"""


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_the_first_update_on_points(tmp_path):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # What the thread that writes a checkpoint needs is imported before it starts.
    assert done.stdout.splitlines()[-1] == "0 [[]] [True] False"  # nothing in the run needs pandas
