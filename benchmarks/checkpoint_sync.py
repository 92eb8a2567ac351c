"""What it costs that checkpoints are hashed and are on the disk when training goes on.

    python benchmarks/checkpoint_sync.py
    python benchmarks/checkpoint_sync.py --rounds 20 --folder /mnt/disk

Writes checkpoints of a run on digits and of one on points as they are, without the hashes, and without hashes and syncs, in
turn. Prints medians, ratios to the last, and what the difference is of the training between two checkpoints.
"""

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from common import machine, make_parser, make_trainer, parse

JOBS = {"digits": [], "points": ["--dataset_name=dino"]}
WAYS = {"as it is": (), "no hashes": ("hashes",), "no hashes, no syncs": ("hashes", "syncs")}
LEFT_OUT = {
    "hashes": ("diffusers_lrlab.training.checkpoints.write_manifest", lambda folder: None),
    "syncs": ("os.fsync", lambda descriptor: None),
}
UPDATES = 20  # that are timed, after a first


def seconds_of_checkpoint(trainer, way):
    """One checkpoint, with nothing of other files waiting to be written."""
    os.sync()
    trainer.update += 1
    with ExitStack() as stack:
        for part in WAYS[way]:
            stack.enter_context(mock.patch(*LEFT_OUT[part]))
        started = time.perf_counter()
        trainer.save()
        return time.perf_counter() - started


def seconds_of_update(trainer):
    updates = trainer.updates(show_progress=False)
    next(updates)
    started = time.perf_counter()
    for _ in range(UPDATES):
        next(updates)
    return (time.perf_counter() - started) / UPDATES


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="checkpoints of each way")
    parser.add_argument("--folder", help="where to write, to measure another disk")
    options = parse(parser, rounds=1)
    print(machine())
    print("\n| run | checkpoint | ms | ratio | % of training |\n|---|---|---|---|---|")
    for job, arguments in JOBS.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            trainer = make_trainer(
                Path(folder) / "run", [*arguments, "--max_train_steps=1000000", "--validation_steps=1000000"]
            )
            between = seconds_of_update(trainer) * trainer.config.checkpointing_steps
            seconds_of_checkpoint(trainer, "as it is")  # the first one imports
            times = {way: [] for way in WAYS}
            for number in range(options.rounds):
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    times[way].append(seconds_of_checkpoint(trainer, way))
        medians = {way: statistics.median(seconds) for way, seconds in times.items()}
        plain = medians["no hashes, no syncs"]
        for way, seconds in medians.items():
            share = 100 * (seconds - plain) / between
            print(f"| {job} | {way} | {1000 * seconds:.1f} | {seconds / plain:.2f} | {share:.2f} |")


if __name__ == "__main__":
    main()
