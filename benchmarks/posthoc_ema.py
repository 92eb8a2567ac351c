"""Averages of the weights after the run, from snapshots, beside averages of the same widths that were really run.

    python benchmarks/posthoc_ema.py
    python benchmarks/posthoc_ema.py --jobs points --updates 6000

Trains on points and on digits at a constant rate, with snapshots of widths 0.05 and 0.10 and with 12 power-function averages
beside them. Prints for each width how far the combination of the snapshots is from the average that was run: of the profile
(residual), of the weights (norm of the difference over the norm of the weights), and of the held-out loss; the weights also
from snapshots in bf16. Then the largest error by number of snapshots, and what they cost: the time to write 16 snapshots,
and the time of an update with the second average over that with one.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import machine, make_parser, make_trainer, parse, updates_in_turns

from diffusers_lrlab.averaging.averages import EMA
from diffusers_lrlab.averaging.forms import EMAForm
from diffusers_lrlab.averaging.posthoc import Profiles, combine, profiles_of, read_snapshots
from diffusers_lrlab.training.run_folder import SNAPSHOTS

STORED = "posthoc:sigma_rels=[0.05|0.10],snapshots={}"
WIDTHS = (0.05, 0.06, 0.07, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.225, 0.25)
DEFAULT = 16  # snapshots of --ema posthoc
JOBS = {"points": ("--dataset_name=dino", 3000), "digits": ("--dataset_name=digits", 600)}
USUAL = ["--lr_scheduler=constant", "--validation_steps=1000000", "--save_images_epochs=1000000"]


def train(folder, job, updates, most):
    """The trainer of a finished run, and averages of all widths that were run beside its own."""
    length = [f"--max_train_steps={updates}", f"--checkpointing_steps={updates}"]
    trainer = make_trainer(folder, [JOBS[job][0], *length, *USUAL, f"--ema={STORED.format(most)}"])
    beside = [EMA(trainer.run.trained, EMAForm.of(f"power_function:sigma_rel={width}")) for width in WIDTHS]
    for update in trainer.updates(show_progress=False):
        for average in beside:
            average.advance(update)
    return trainer, beside


def flat(values):
    return torch.cat([value.flatten() for value in values])


class Rebuilt:
    """Averages from the snapshots of a run, or from every n-th of them, perhaps rounded to bf16."""

    def __init__(self, trainer):
        self.names = [name for name, _ in trainer.run.model.named_parameters()]
        snapshots = read_snapshots(trainer.folder.path / SNAPSHOTS)
        self.profiles, self.end = profiles_of(snapshots), snapshots[-1].end
        shapes = snapshots[-1].shapes()
        self.stored = []
        for snapshot in snapshots:
            for track in np.eye(len(snapshot.sigma_rels)):
                into = {name: torch.zeros(shapes[name]) for name in self.names}
                snapshot.read(track.tolist(), into)
                self.stored.append([into[name] for name in self.names])

    def combination(self, width, every=1):
        """The coefficients from every n-th snapshot, for all that are stored."""
        update = self.profiles.ends.reshape(-1, 2)
        used = np.repeat(np.arange(len(update), 0, -1) % every == 1 % every, 2)
        known = Profiles(self.profiles.ends[used], self.profiles.gammas[used])
        found = combine(known, Profiles.of_widths([self.end], [width]))
        coefficients = np.zeros(len(used))
        coefficients[used] = found.coefficients
        return found, coefficients.tolist()

    def weights(self, coefficients, dtype=torch.float32):
        total = [torch.zeros_like(value) for value in self.stored[0]]
        for coefficient, values in zip(coefficients, self.stored, strict=True):
            for into, value in zip(total, values, strict=True):
                into.add_(value.to(dtype).float(), alpha=coefficient)
        return total


def held_out_loss(run, values):
    torch._foreach_copy_(run.average.shadow_params, values)
    return float(run.validation_losses()["validation_loss_ema"].mean())


def error_of(values, really_run):
    return float((flat(values) - flat(really_run)).norm() / flat(really_run).norm())


def compare(trainer, beside, most):
    """The rows by width, and the largest error of the weights by number of snapshots."""
    rebuilt, run = Rebuilt(trainer), trainer.run
    really_run = {width: average.shadow_params for width, average in zip(WIDTHS, beside, strict=True)}
    rows, worst = [], {}
    for width, expected in really_run.items():
        found, coefficients = rebuilt.combination(width, max(1, most // DEFAULT))
        values = rebuilt.weights(coefficients)
        loss, own = held_out_loss(run, expected), held_out_loss(run, values)
        errors = error_of(values, expected), error_of(rebuilt.weights(coefficients, torch.bfloat16), expected)
        rows.append((width, found.residual, found.largest, *errors, loss, abs(own - loss) / loss))
        every = 1
        while every <= most:
            if most // every >= 2:
                error = error_of(rebuilt.weights(rebuilt.combination(width, every)[1]), expected)
                worst[most // every] = max(worst.get(most // every, 0.0), error)
            every *= 2
    return rows, worst


def seconds_of(folder, job, rounds):
    """Medians of an update with one average and with the two of posthoc, and of a snapshot."""
    trainers, length = {}, ["--max_train_steps=1000000", "--checkpointing_steps=1000000"]
    for name, spec in (("one", "power_function"), ("two", STORED.format(1))):
        trainers[name] = make_trainer(folder / name, [JOBS[job][0], *length, *USUAL, f"--ema={spec}"])
    loops = {name: trainer.updates(show_progress=False) for name, trainer in trainers.items()}
    times = updates_in_turns(loops, rounds)
    seconds = {name: statistics.median(spent) / 1e3 for name, spent in times.items()}
    lost = []
    for _ in range(max(2, rounds // 10)):
        started = time.perf_counter()
        trainers["two"].run.write_snapshot(trainers["two"].folder.path / SNAPSHOTS)
        lost.append(time.perf_counter() - started)
    for loop in loops.values():
        loop.close()
    return seconds | {"snapshot": statistics.median(lost)}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS], help="what is trained on (default: all)")
    parser.add_argument("--updates", type=int, help="of each run")
    parser.add_argument("--snapshots", type=int, default=64, help="of which every n-th is used (default: 64)")
    parser.add_argument("--rounds", type=int, default=200, help="updates to time")
    options = parse(parser, jobs=["points"], updates=32, snapshots=16, rounds=3)
    print(machine())
    costs = []
    for job in options.jobs:
        updates = options.updates or JOBS[job][1]
        with tempfile.TemporaryDirectory() as folder:
            rows, worst = compare(*train(Path(folder) / "run", job, updates, options.snapshots), options.snapshots)
            seconds = seconds_of(Path(folder), job, options.rounds)
        print(f"\n{job}, {updates} updates, {min(DEFAULT, options.snapshots)} snapshots\n")
        print("| sigma_rel | residual | largest coefficient | weights | weights, bf16 | held-out loss | its error |")
        print("|---|---|---|---|---|---|---|")
        for width, residual, largest, error, of_bf16, loss, of_loss in rows:
            print(
                f"| {width:g} | {residual:.2%} | {largest:.2f} | {error:.1e} | {of_bf16:.1e} | {loss:.5f} | {of_loss:.1e} |"
            )
        print("\n| snapshots | largest error of the weights |\n|---|---|")
        for number, error in sorted(worst.items()):
            print(f"| {number} | {error:.1e} |")
        training, snapshots = updates * seconds["two"], DEFAULT * seconds["snapshot"]
        costs.append((job, updates, training, snapshots, snapshots / training, seconds["two"] / seconds["one"]))
    print("\n| run | updates | training, s | 16 snapshots, s | share | update with two averages over one |")
    print("|---|---|---|---|---|---|")
    for job, updates, training, snapshots, share, ratio in costs:
        print(f"| {job} | {updates} | {training:.1f} | {snapshots:.2f} | {share:.2%} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
