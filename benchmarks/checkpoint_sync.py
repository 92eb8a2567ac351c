"""The cost of safety: checkpoints that are checked, hashed and synced to disk, and updates that may be skipped.

Checkpoints are written by a thread while training goes on: how long one takes is not how long it stops the training.

    python benchmarks/checkpoint_sync.py
    python benchmarks/checkpoint_sync.py --rounds 20 --folder /mnt/disk

Writes checkpoints of a run on digits and of one on points as they are, without each of these parts and without all of
them, in turn. Does the same with updates, with and without the look at gradients that --skip_bad_updates takes. Prints
medians, ratios to the plain form, and what the difference is of the training between two checkpoints.

Then the disk is slow: it takes 5 ms for each file that is synced, and a second for 10 MB. What a checkpoint adds to the
time of the updates is measured where training waits until it is written, and where a thread writes it, in turn.
"""

import math
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from common import machine, make_parser, make_trainer, parse

JOBS = {"digits": [], "points": ["--dataset_name=dino"]}
PARTS = {
    "hashes": [("diffusers_lrlab.training.checkpoints.write_manifest", lambda folder: None)],
    "syncs": [("os.fsync", lambda descriptor: None)],
    "look for what is not finite": [("diffusers_lrlab.training.trainer.find_nonfinite", lambda run, **more: None)],
}
PLAIN = "none of them"
WAYS = {"as it is": (), **{f"no {part}": (part,) for part in PARTS}, PLAIN: tuple(PARTS)}
UPDATES = 10  # that are timed at once
SECONDS_A_FILE, BYTES_A_SECOND = 0.005, 10e6  # of the slow disk
WAITED, THREAD = "waited for", "by a thread"


def seconds_of_checkpoint(trainer, way):
    """One checkpoint, with no other writes pending."""
    os.sync()
    trainer.run.update += 1
    with ExitStack() as stack:
        for part in WAYS[way]:
            for where, instead in PARTS[part]:
                stack.enter_context(mock.patch(where, instead))
        started = time.perf_counter()
        trainer.save()
        return time.perf_counter() - started


def seconds_of_updates(trainer, rounds):
    """Medians of an update with and without --skip_bad_updates."""
    updates = trainer.updates(show_progress=False)
    next(updates)
    times = {False: [], True: []}
    for number in range(2 * rounds):
        trainer.stepper.skips_bad = might_be = bool((number + number // 2) % 2)
        started = time.perf_counter()
        for _ in range(UPDATES):
            next(updates)
        times[might_be].append((time.perf_counter() - started) / UPDATES)
    updates.close()
    return statistics.median(times[False]), statistics.median(times[True])


def seconds_of_checkpoints(trainer, rounds):
    """Medians by variant."""
    seconds_of_checkpoint(trainer, "as it is")  # the first one imports
    times = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            times[way].append(seconds_of_checkpoint(trainer, way))
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def slow_sync(descriptor, sync=os.fsync):
    """`os.fsync` of a disk to which what was written has to go first."""
    sync(descriptor)
    time.sleep(SECONDS_A_FILE + os.fstat(descriptor).st_size / BYTES_A_SECOND)


def seconds_lost(trainer, rounds):
    """Median time that a checkpoint on a slow disk adds to the updates until it is written, by variant."""
    updates = trainer.updates(show_progress=False)
    next(updates)

    def timed(number):
        started = time.perf_counter()
        for _ in range(number):
            next(updates)
        return time.perf_counter() - started

    lost = {WAITED: [], THREAD: []}
    with mock.patch("os.fsync", slow_sync):
        for _ in range(rounds):
            usual = timed(UPDATES) / UPDATES
            started = time.perf_counter()
            trainer.save()
            lost[WAITED].append(time.perf_counter() - started)
            meanwhile = math.ceil(lost[WAITED][-1] / usual)
            before = timed(meanwhile)
            started = time.perf_counter()
            trainer.save(waits=False)
            timed(meanwhile)
            trainer.checkpoints.finish()
            took = time.perf_counter() - started
            lost[THREAD].append(took - (before + timed(meanwhile)) / 2)
    updates.close()
    return {way: statistics.median(seconds) for way, seconds in lost.items()}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each way")
    parser.add_argument("--folder", help="where to write, to measure another disk")
    options = parse(parser, rounds=1)
    print(machine())
    print("\n| run | what | way | ms | ratio | % of training |\n|---|---|---|---|---|---|")
    for job, arguments in JOBS.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            trainer = make_trainer(
                Path(folder) / "run", [*arguments, "--max_train_steps=1000000", "--validation_steps=1000000"]
            )
            update, skippable = seconds_of_updates(trainer, options.rounds)
            between = update * trainer.run.config.checkpointing_steps
            medians = seconds_of_checkpoints(trainer, options.rounds)
            lost = seconds_lost(trainer, options.rounds)
        for way, seconds in medians.items():
            ratio, share = seconds / medians[PLAIN], 100 * (seconds - medians[PLAIN]) / between
            print(f"| {job} | checkpoint | {way} | {1000 * seconds:.1f} | {ratio:.2f} | {share:.2f} |")
        for way, seconds in lost.items():
            ratio, share = seconds / lost[WAITED], 100 * seconds / between
            print(f"| {job} | checkpoint, slow disk | {way} | {1000 * seconds:.1f} | {ratio:.3f} | {share:.2f} |")
        for way, seconds in (("--skip_bad_updates", skippable), ("as it is", update)):
            ratio = seconds / update
            print(f"| {job} | update | {way} | {1000 * seconds:.2f} | {ratio:.3f} | {100 * ratio - 100:.2f} |")


if __name__ == "__main__":
    main()
