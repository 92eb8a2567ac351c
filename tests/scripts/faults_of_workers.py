"""A plug-in: what goes wrong in a worker, as files in a folder say, and a line there for every update that is computed."""

import os
import signal
from pathlib import Path

import diffusers_lrlab.study.stacked.stacks as stacks
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.training.trainer import Trainer

FOLDER = Path(os.environ["LRLAB_FAULTS"])
stacks._SAVE_SECONDS = 0.0  # after every update


def happens_once(name):
    try:
        os.rename(FOLDER / name, FOLDER / f"{name}-done")
    except FileNotFoundError:
        return False
    return True


def disturbed(do_update):
    def do_update_unless(self, *inputs):
        size = len(getattr(self, "members", [self]))
        with open(FOLDER / "updates", "a") as file:
            file.write(f"{size}\n" * size)
        update = getattr(self, "run", self).update  # of a trainer, or of a stack
        if update == 15 and happens_once("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return do_update(self, *inputs)

    return do_update_unless


for kind in (Stack, Trainer):
    kind.do_update = disturbed(kind.do_update)
