"""Waits for data workers that are held up for good, as by a source that hangs; the argument says whose loader it is."""

import multiprocessing
import sys
import threading
import time
from types import SimpleNamespace

import torch

WORKERS = 2


class HeldUp:
    """Rows that say that they are read, and never come."""

    def __len__(self):
        return 1000

    def __getitem__(self, row):
        print("reads", flush=True)
        time.sleep(1000)


def of_a_run():
    from diffusers_lrlab.data.batch import Batch
    from diffusers_lrlab.data.batches import iterate_batches
    from diffusers_lrlab.data.loading import TrainingData
    from diffusers_lrlab.data.options import BatchLayout

    class Train(HeldUp):
        def __getitem__(self, column):
            return HeldUp()

    data = TrainingData("held up", Train(), Batch(torch.empty(0)), "image", "", SimpleNamespace(augment=None))
    return iterate_batches(data, BatchLayout(4), 0, range(2), num_workers=WORKERS, compact=True)


def beside_a_later_process():
    """It is forked when the workers are there, so that it has what they have of this process, and lives on."""

    def fork():
        while len(multiprocessing.active_children()) < WORKERS:
            time.sleep(0.01)
        multiprocessing.Process(target=time.sleep, args=(60,)).start()

    threading.Thread(target=fork, daemon=True).start()
    return of_a_run()


multiprocessing.set_start_method("fork", force=True)  # as on Linux, which a process of the tests' server does not say
LOADERS = {"run": of_a_run, "run beside a later process": beside_a_later_process}
next(iter(LOADERS[sys.argv[1]]()))
