"""Runs per hour in the setting of the study: a plain loop, the trainer, and stacks of several sizes.

    python benchmarks/study_throughput.py
    python benchmarks/study_throughput.py --rounds 10 --sizes 1,20

The setting is that of `training_scripts/recipes/lr_study_2d.yaml`: 10,000 updates of 256 points, 296,450 parameters. All
take turns in one process, so that what else the machine does falls on all of them. Beside them stands what the matrix
products of an update take alone, computed in the same way. Samples are drawn of a stack of 20, by each run's own pipeline
and by all together in turns.

What a stack costs beside its products is measured on networks so small that little else is left: time of an update over
the number of members, and its operators (views left out); both also with the batched steps of a GPU.
"""

import dataclasses
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from common import make_parser, parse
from template import plain_updates
from torch.utils._python_dispatch import TorchDispatchMode
from toy2d import RECIPE, make_point_trainer

from diffusers_lrlab.core.environment import describe_environment
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.evaluation.distances import knn_kl
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.measure import draw, drawing_of
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import read_spec
from diffusers_lrlab.study.stacked.member import Member
from diffusers_lrlab.study.stacked.networks import draw_together
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.study.stacked.stacks import ParallelStacks, worker_threads
from diffusers_lrlab.training.arguments import read_yaml
from diffusers_lrlab.training.prepare import keep_freed_memory

NUM_UPDATES = 10_000
ARMS = ("constant", "cosine", "step", "exponential", "linear")
BATCH, LAYERS = 256, ((384, 256), (256, 256), (256, 256), (256, 256), (256, 2))
# Forward, gradients of weights and of inputs; the first layer needs none of the last.
GEMM_FLOP = 2 * BATCH * sum((2 if index == 0 else 3) * a * b for index, (a, b) in enumerate(LAYERS))


SMALL = {"hidden_size": 4, "num_layers": 1, "embedding_size": 4}
SMALL_SIZES = (2, 8, 32)
SAMPLING_STEPS, FULL_STEPS = 5, 100


def make_runs(num_updates, datasets, seeds):
    """Five schedules on some data sets, with this many seeds."""
    base = {
        key: value
        for key, value in read_yaml(str(RECIPE), "the recipe").items()
        if key not in ("dataset_name", "lr_scheduler")
    }
    spec = read_spec(
        {
            "base": {**base, "max_train_steps": num_updates, "num_validation_images": 0},
            "arms": {arm: {"lr_scheduler": arm} for arm in ARMS},
            "datasets": datasets,
            "seeds": seeds,
            "metrics": ["kl"],
        },
        "throughput",
    )
    return sorted(expand(spec), key=lambda run: (run.seed, run.dataset))


def make_stacks(study, size, num_updates, threads):
    """Members of five schedules on four data sets, with as many seeds as needed, divided among the cores."""
    runs = make_runs(num_updates, ["circle", "dino", "line", "moons"], -(-size // 20))[:size]
    members = [Member(*study.plan(run), study.device) for run in runs]
    return ParallelStacks(members, study.device, threads if size > 1 else None)


class CountedOperators(TorchDispatchMode):
    """Counts launched operators."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def make_small_stack(study, size, num_updates, fuse=None):
    """Tiny networks of five schedules on one data set with one seed."""
    runs, members = make_runs(num_updates, ["line"], 1), []
    for place in range(size):
        plan, data = study.plan(runs[place % len(runs)])
        plan = dataclasses.replace(plan, model_config={**plan.model_config, **SMALL}, layout=BatchLayout(4))
        members.append(Member(plan, data, study.device))
    return Stack(members, study.device, fuse)


def host_costs(study, rounds, updates):
    """
    Rows of a table, with a column for each of `SMALL_SIZES`: the processor's microseconds for an update, in one thread, and
    its operators.
    """
    stacks = {}
    for size in SMALL_SIZES:
        length = (rounds + 1) * updates + 10
        stacks["here", size] = make_small_stack(study, size, length)
        stacks["with batched steps", size] = make_small_stack(study, size, length, fuse=False)
    loops, times, operators = {key: stack.updates() for key, stack in stacks.items()}, {key: [] for key in stacks}, {}
    for key, loop in loops.items():
        next(loop), next(loop)
        with CountedOperators() as counted:
            next(loop)
        operators[key] = counted.count
    for turn in range(rounds + 1):
        for key, loop in loops.items():
            start = time.thread_time()
            for _ in range(updates):
                next(loop)
            if turn:
                times[key].append(1e6 * (time.thread_time() - start) / updates)
    medians = {key: statistics.median(values) for key, values in times.items()}
    rows, first, last = {}, SMALL_SIZES[0], SMALL_SIZES[-1]
    for name in dict.fromkeys(name for name, _ in stacks):
        each = (medians[name, last] - medians[name, first]) / (last - first)
        rows[f"operators {name}"] = [*(str(operators[name, size]) for size in SMALL_SIZES), ""]
        rows[f"µs {name}"] = [*(f"{medians[name, size]:.0f}" for size in SMALL_SIZES), f"{each:.1f}"]
    return rows


def products_alone(stacks, threads, repeats=3):
    """Milliseconds of the matrix products of an update of one member, as its stack computes them."""
    calls = [products_of(stack) for stack in stacks.stacks]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        threads.map(lambda some: [call() for call in some], calls)
        times.append(1e3 * (time.perf_counter() - start) / sum(len(stack.members) for stack in stacks.stacks))
    return statistics.median(times)


def multiply(kind, first, second, out):
    """One of the three products of a linear layer, x W^T, g^T x and g W, as stacks compute it."""
    left = first.transpose(1, 2) if kind == "weight_gradient" else first
    torch.bmm(left, second.transpose(1, 2) if kind == "forward" else second, out=out)


def products_of(stack):
    """The products of an update, as functions."""
    size, calls = len(stack.members), []
    for index, (inputs, outputs) in enumerate(LAYERS):
        x, g = torch.randn(size, BATCH, inputs), torch.randn(size, BATCH, outputs)
        weight = torch.randn(size, outputs, inputs)
        calls.append(partial(multiply, "forward", x, weight, torch.empty_like(g)))
        calls.append(partial(multiply, "weight_gradient", g, x, torch.empty_like(weight)))
        if index:  # the embedding of points needs no gradient
            calls.append(partial(multiply, "input_gradient", g, weight, torch.empty_like(x)))
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


def evaluation_seconds(stacks, threads, num_samples, rounds):
    """
    Seconds per run of samples, of all members by themselves and together in turns, whether these are the same bits, and
    seconds of the KL of a run: as a study does it after training, on all cores.
    """
    groups = [[(member, _to_sample(member, num_samples)) for member in stack.members] for stack in stacks.stacks]
    size, times, drawn = sum(map(len, groups)), {"alone": [], "together": []}, {}
    runs = {spec.id: (member.run, drawing_of(member.run, spec)) for group in groups for member, spec in group}
    for _ in range(rounds):
        start = time.perf_counter()
        alone = dict(
            zip(
                runs,
                threads.map(lambda pair: draw(*pair), runs.values()),
                strict=True,
            )
        )
        middle = time.perf_counter()
        steps = [draw_together(group, drawn) for group in groups]
        while any(threads.map(lambda step: next(step, False), steps)):
            pass
        times["alone"].append((middle - start) / size)
        times["together"].append((time.perf_counter() - middle) / size)
    same = all((drawn[run_id] == samples).all() for run_id, samples in alone.items())
    real = groups[0][0][0].run.data.all_in_memory().data.numpy()
    start = time.perf_counter()
    threads.map(lambda samples: knn_kl(real, samples), list(alone.values())[: len(groups)])
    return times, same, (time.perf_counter() - start) / len(groups)


def _to_sample(member, num_samples):
    """A member's share of a study that compares this many samples, in `SAMPLING_STEPS`."""
    few = {"distance_samples": num_samples, "num_inference_steps": SAMPLING_STEPS}
    member.run.config = dataclasses.replace(member.run.config, **few)
    return SimpleNamespace(id=id(member), metrics=("kl",), stage="tune")


def sampling_operators(study, size):
    """Operators of a sampling step for this many members, alone and together."""
    runs = [(member, _to_sample(member, 20)) for member in make_small_stack(study, size, 10).members]
    steps = draw_together(runs, {})
    next(steps)
    with CountedOperators() as together:
        next(steps)
    with CountedOperators() as one_step, torch.no_grad():
        draw(runs[0][0].run, drawing_of(runs[0][0].run, runs[0][1]))
    return one_step.count * size // SAMPLING_STEPS, together.count


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each")
    parser.add_argument("--updates", type=int, default=160, help="updates of runs in a turn")
    parser.add_argument("--sizes", default="1,8,20,64", help="of stacks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sampling_rounds", type=int, default=3, help="turns of sampling")
    parser.set_defaults(samples=10_000)
    options = parse(parser, rounds=2, updates=2, sizes="1,2", threads=1, samples=100, sampling_rounds=1)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    meta = describe_environment()
    print(f"{meta['processor']}, {options.threads} threads, torch {meta['versions']['torch']}\n")

    with tempfile.TemporaryDirectory() as folder:
        study = StudyContext(StudyFolder(Path(folder)), quiet=True)
        times, limits, evaluated = measure_loops(study, Path(folder), options)
        torch.set_num_threads(1)
        host = host_costs(study, options.rounds, options.updates)
        operators = [sampling_operators(study, size) for size in SMALL_SIZES]
    print_loops(times, limits)
    training = statistics.median(times["stacked, R = 20"]) * NUM_UPDATES / 1e3
    print_sampling(*evaluated, operators, training, options.samples)
    print(f"\n| an update of small networks | {' | '.join(f'R = {size}' for size in SMALL_SIZES)} | a member more |")
    print("|---|---|---|---|---|")
    for name, values in host.items():
        print(f"| {name} | {' | '.join(values)} |")


def measure_loops(study, folder, options):
    """Times of an update and of its products alone, by trainer or stack, and the evaluation of a stack of 20."""
    sizes = sorted({20, *map(int, options.sizes.split(","))})  # samples are drawn of a stack of 20
    total = (options.rounds + 2) * options.updates + 10
    trainer = make_point_trainer(folder / "local", total)
    loops = {
        "plain loop": plain_updates(trainer.run.data.in_memory.data, total),
        "local": trainer.updates(show_progress=False),
    }
    torch.set_num_threads(options.threads)
    with worker_threads(study.device, max(sizes)) as threads:
        stacks = {f"stacked, R = {size}": make_stacks(study, size, total, threads) for size in sizes}
        loops |= {name: stack.updates() for name, stack in stacks.items()}
        times, limits = turns(loops, stacks, threads, options)
        torch.set_num_threads(1)
        evaluated = evaluation_seconds(stacks["stacked, R = 20"], threads, options.samples, options.sampling_rounds)
    # The plain loop and the trainer have the products of a stack of one.
    single = limits[f"stacked, R = {min(sizes)}"]
    return times, limits | {"plain loop": single, "local": single}, evaluated


def print_loops(times, limits):
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


def print_sampling(sampling, same, kl, operators, training, num_samples):
    """`training` is the seconds that a run of the stack is trained for."""
    seconds = {name: statistics.median(values) * FULL_STEPS / SAMPLING_STEPS for name, values in sampling.items()}
    ratios = [alone / together for alone, together in zip(*sampling.values(), strict=True)]
    print(f"\n| {num_samples:,} samples of 20 runs | s of a run, {FULL_STEPS} steps | operators of a step, R = 2, 8, 32 |")
    print("|---|---|---|")
    for place, (name, value) in enumerate(seconds.items()):
        print(f"| {name} | {value:.2f} | {', '.join(str(counts[place]) for counts in operators)} |")
    bits = "the same bits" if same else "not the same bits"
    print(
        f"\nTogether they are drawn {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"and are {bits}. Of a run in a stack of 20: training {training:.1f} s, samples {seconds['together']:.1f} s, KL "
        f"{kl:.2f} s: {100 * (seconds['together'] + kl) / training:.0f} % of training."
    )


if __name__ == "__main__":
    main()
