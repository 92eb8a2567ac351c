"""How many runs of the study's setting an hour holds: a plain loop, the trainer, and stacks of several sizes, side by side.

    python benchmarks/study_throughput.py
    python benchmarks/study_throughput.py --rounds 10 --sizes 1,20 --precision bf16

The setting is that of `training_scripts/recipes/lr_study_2d.yaml`: 10,000 updates of 256 points, 296,450 parameters. All
take turns in one process, so that what else the machine does falls on all of them. Beside them stands what the matrix
products of an update take alone, computed in the same way. Evaluation is measured apart, on one run.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import make_parser, parse
from toy2d import RECIPE, make_point_trainer, plain_updates

from diffusers_lrlab.core.environment import describe_environment
from diffusers_lrlab.evaluation.kl import knn_kl
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.precision import PRECISIONS, products_in
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import read_spec
from diffusers_lrlab.study.stacked.matmul_backends import BACKENDS, CANDIDATES, STOCK
from diffusers_lrlab.study.stacked.member import Member
from diffusers_lrlab.study.stacked.worker_threads import ParallelStacks, worker_threads
from diffusers_lrlab.training.arguments import read_yaml
from diffusers_lrlab.training.prepare import keep_freed_memory
from diffusers_lrlab.training.samples import draw_samples

NUM_UPDATES = 10_000
ARMS = ("constant", "cosine", "step", "exponential", "linear")
BATCH, LAYERS = 256, ((384, 256), (256, 256), (256, 256), (256, 256), (256, 2))
# Forward, gradients of weights and of inputs; the first layer needs none of the last.
GEMM_FLOP = 2 * BATCH * sum((2 if index == 0 else 3) * a * b for index, (a, b) in enumerate(LAYERS))


def make_stacks(study, size, num_updates, threads, backends=None):
    """Members of five schedules, on four data sets, with as many seeds as it takes, shared out among the cores."""
    base = {
        key: value
        for key, value in read_yaml(str(RECIPE), "the recipe").items()
        if key not in ("dataset_name", "lr_scheduler")
    }
    spec = read_spec(
        {
            "base": {**base, "max_train_steps": num_updates, "num_validation_images": 0},
            "arms": {arm: {"lr_scheduler": arm} for arm in ARMS},
            "datasets": ["circle", "dino", "line", "moons"],
            "seeds": -(-size // 20),
            "metrics": ["kl"],
        },
        "throughput",
    )
    runs = sorted(expand(spec), key=lambda run: (run.seed, run.dataset))[:size]
    members = [Member(*study.plan(run), study.device) for run in runs]
    return ParallelStacks(members, study.device, backends, threads if size > 1 else None)


def products_alone(stacks, threads, repeats=3):
    """Milliseconds of the matrix products of an update of one member, as its stack computes them."""
    calls = [products_of(stack) for stack in stacks.stacks]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        threads.map(lambda some: [call() for call in some], calls)
        times.append(1e3 * (time.perf_counter() - start) / sum(len(stack.members) for stack in stacks.stacks))
    return statistics.median(times)


def products_of(stack):
    """All of them of an update, as functions."""
    size, calls = len(stack.members), []
    for index, (inputs, outputs) in enumerate(LAYERS):
        is_output = index == len(LAYERS) - 1
        product = {kind: BACKENDS["stock" if is_output else way](kind) for kind, way in (stack.backends or STOCK).items()}
        x, g = torch.randn(size, BATCH, inputs), torch.randn(size, BATCH, outputs)
        weight = torch.randn(size, outputs, inputs)
        calls.append(partial(product["forward"], x, weight, torch.empty_like(g), False))
        calls.append(partial(product["weight_gradient"], g, x, torch.empty_like(weight), False))
        if index:  # the embedding of points needs no gradient
            calls.append(partial(product["input_gradient"], g, weight, torch.empty_like(x), False))
    return calls


def turns(loops, stacks, threads, options):
    """Milliseconds per update of a run, and of the products of stacks alone, in turns: name -> one number a round."""
    times, alone = {name: [] for name in loops}, {name: [] for name in stacks}
    members = {name: sum(len(s.members) for s in stacks[name].stacks) if name in stacks else 1 for name in loops}
    for turn in range(options.rounds + 1):
        for name in loops if turn % 2 else reversed(loops):
            torch.set_num_threads(1 if members[name] > 1 else options.threads)  # one for each worker thread
            steps = max(2, options.updates // members[name])
            start = time.perf_counter()
            for _ in range(steps):
                next(loops[name])
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start) / steps / members[name])
                if name in stacks:
                    alone[name].append(products_alone(stacks[name], threads))
    return times, {name: statistics.median(values) for name, values in alone.items()}


def evaluation_seconds(stacks, threads, num_samples):
    """Seconds per run of samples in 100 steps and of their KL: as a study does it after training, a run to a core."""
    members = [stack.members[0] for stack in stacks.stacks]
    real = members[0].data.all_in_memory().numpy()
    start = time.perf_counter()
    samples = threads.map(lambda member: draw_samples(member, num_samples, "distances"), members)
    sampled = time.perf_counter()
    threads.map(lambda points: knn_kl(real, points), samples)
    return (sampled - start) / len(members), (time.perf_counter() - sampled) / len(members)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each")
    parser.add_argument("--updates", type=int, default=160, help="updates of runs in a turn")
    parser.add_argument("--sizes", default="1,5,20,80", help="of stacks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=list(PRECISIONS))
    parser.set_defaults(samples=10_000)
    options = parse(parser, rounds=2, updates=2, sizes="1,2", threads=1, samples=100)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    meta = describe_environment()
    print(f"{meta['processor']}, {options.threads} threads, torch {meta['versions']['torch']}, {options.precision}\n")

    sizes = [int(size) for size in options.sizes.split(",")]
    total = (options.rounds + 2) * options.updates + 10
    with tempfile.TemporaryDirectory() as folder:
        study = StudyContext(StudyFolder(Path(folder)), quiet=True, precision=options.precision)
        trainer = make_point_trainer(Path(folder) / "local", total)
        loops = {"plain loop": plain_updates(trainer.data.in_memory, total), "local": trainer.updates(show_progress=False)}
        torch.set_num_threads(options.threads)
        with products_in(options.precision, study.device), worker_threads(study.device, max(sizes)) as threads:
            stacks = {f"stacked, R = {size}": make_stacks(study, size, total, threads) for size in sizes}
            for name, backends in CANDIDATES.items():
                stacks[f"stacked, R = 20, {name}"] = make_stacks(study, 20, total, threads, backends)
            loops |= {name: stack.updates() for name, stack in stacks.items()}
            times, limits = turns(loops, stacks, threads, options)
            torch.set_num_threads(1)
            sampling, kl = evaluation_seconds(stacks["stacked, R = 20, stock"], threads, options.samples)
    # The plain loop and the trainer have the products of a stack of one.
    single = limits[f"stacked, R = {min(sizes)}"]
    limits |= {"plain loop": single, "local": single}

    print("| | ms per update of a run | runs an hour | plain loop over this | products alone, ms (GFLOP/s) | their share |")
    print("|---|---|---|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        ratios = [plain / value for plain, value in zip(times["plain loop"], values, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        limit = limits[name]
        alone = f"{limit:.2f} ({GEMM_FLOP / limit / 1e6:.0f}) | {100 * limit / median:.0f} %"
        an_hour = 3.6e6 / median / NUM_UPDATES
        print(f"| {name} | {median:.2f} | {an_hour:.0f} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {alone} |")
    training = statistics.median(times["stacked, R = 20, stock"]) * NUM_UPDATES / 1e3
    print(
        f"\nOf a run in a stack of 20: training {training:.1f} s, {options.samples:,} samples in 100 steps "
        f"{sampling:.1f} s, KL {kl:.2f} s."
    )
    print(f"Samples and KL take {100 * (sampling + kl) / training:.0f} % of training.")


if __name__ == "__main__":
    main()
