"""Waits for data workers that are held up for good, as by a source that hangs; a later fork of this process lives on."""

import multiprocessing
import threading
import time
from types import SimpleNamespace

import torch

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.loading import TrainingData
from diffusers_lrlab.data.options import BatchLayout

WORKERS = 2


class HeldUp:
    """Rows that say that they are read, and never come."""

    def __len__(self):
        return 1000

    def __getitem__(self, row):
        print("reads", flush=True)
        time.sleep(1000)


class Train(HeldUp):
    def __getitem__(self, column):
        return HeldUp()


def fork():
    """When the workers are there, so that the process has what they have of this one."""
    while len(multiprocessing.active_children()) < WORKERS:
        time.sleep(0.01)
    multiprocessing.Process(target=time.sleep, args=(60,)).start()


multiprocessing.set_start_method("fork", force=True)  # as on Linux, which a process of the tests' server does not say
threading.Thread(target=fork, daemon=True).start()
data = TrainingData("held up", Train(), Batch(torch.empty(0)), "image", "", SimpleNamespace(augment=None))
next(iter(iterate_batches(data, BatchLayout(4), 0, range(2), num_workers=WORKERS, compact=True)))
