"""A test of learning rates in the middle of a run, in each of its processes: nothing may differ afterwards.

    accelerate launch finder_driver.py FOLDER [OPTIONS of train_ddpm.py]

The main process writes what was read to FOLDER/losses.json.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer_states import QUICK, assert_same, state_of

from diffusers_lrlab.finder.find import find_lr_of
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.prepare import prepare
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

folder = Path(sys.argv[1])
plan, data, accelerator = prepare(parse_arguments(sys.argv[2:], ""))
trainer = Trainer(plan, data, accelerator, RunFolder(folder, accelerator.is_main_process))
for update in trainer.updates(show_progress=False):
    if update == 3:
        break
before = state_of(trainer)
result = find_lr_of(trainer, FinderConfig(**QUICK))
assert_same(state_of(trainer), before)
if accelerator.is_main_process:
    (folder / "losses.json").write_text(json.dumps([sweep.losses.tolist() for sweep in result.sweeps]))
accelerator.wait_for_everyone()
