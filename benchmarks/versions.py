"""The numbers of every schedule, timestep sampler and weighting, to compare between versions of the libraries below them.

    python benchmarks/versions.py --write pinned.json        in one environment
    python benchmarks/versions.py --compare pinned.json      in another

Learning rates and momenta are read from torch's optimizers at every update, by this package's `get_scheduler` and by those
of diffusers and transformers. Densities, draws and weights are of diffusers' noise schedulers. A difference is relative to
the largest value of its row; above 1e-12 it ends the comparison with status 1. The package need not be installed.
"""

import functools
import importlib
import importlib.util
import json
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

import torch
from common import make_parser, parse
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from diffusers_lrlab import (
    LabError,
    get_loss_weighting,
    get_momentum_scheduler,
    get_scheduler,
    get_timestep_sampler,
    lr_curve,
)
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.timesteps.bands import TimestepLR
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

TOLERANCE = 1e-12
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "huggingface-hub", "numpy", "scipy")


def versions():
    """Python's and the packages' versions, in one line."""
    found = {"Python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return ", ".join(f"{name} {number}" for name, number in found.items())


def make_optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def applied(make, num_updates):
    """beta1 and then the learning rate in the optimizer at every update of a schedule, which may follow falling losses."""
    optimizer = make_optimizer()
    scheduler = make(optimizer=optimizer)
    rates, momenta = [], []
    for update in range(num_updates):
        group = optimizer.param_groups[0]
        rates.append(float(group["lr"]))
        momenta.append(group["betas"][0])
        optimizer.step()
        if not hasattr(scheduler, "advance"):
            scheduler.step()
            continue
        scheduler.advance()
        if update % 5 == 4:
            scheduler.step(1 / (1 + update) + 0.01 * (update * 7919 % 13))
    return momenta + rates


def schedule_rows(num_updates):
    """Schedules by name, as this package, diffusers and transformers make them, and without an optimizer."""
    makers = {"get_scheduler": (get_scheduler, ())}
    for host in filter(importlib.util.find_spec, ("diffusers", "transformers")):
        module = importlib.import_module(f"{host}.optimization")
        functions = module.TYPE_TO_SCHEDULER_FUNCTION.items()
        # Their own names run their own functions, which may differ between their versions.
        own = {member.value for member, function in functions if function.__module__ == module.__name__}
        makers[f"{host}.get_scheduler"] = module.get_scheduler, own
    for name, entry in SCHEDULERS.items():
        warmup = 0 if entry.traits & {"no_warmup", "rises"} else num_updates // 10
        length = {"num_warmup_steps": warmup, "num_training_steps": num_updates}
        for title, (maker, own) in makers.items():
            compute = f"{title} has a function of its own"
            if name not in own:
                make = functools.partial(maker, name, **length)
                compute = functools.partial(applied, make, num_updates)
            yield f"schedule by {title}", name, compute
        yield "lr_curve", name, functools.partial(lr_curve, name, 1.0, warmup, num_updates)
    for name in MOMENTUM_SCHEDULERS:
        make = functools.partial(get_momentum_scheduler, name, num_training_steps=num_updates)
        yield "momentum", name, functools.partial(applied, make, num_updates)


def make_sampler(name, scheduler, num_updates):
    """A timestep sampler that has seen losses, if it follows them."""
    sampler = get_timestep_sampler(name, num_training_steps=num_updates, noise_scheduler=scheduler)
    timesteps = torch.arange(sampler.num_train_timesteps)
    for update in range(20):
        sampler.observe(timesteps, 1 / (1.0 + timesteps + update))
    return sampler


def density(*arguments):
    """Probabilities at the start, in the middle and at the end of a run."""
    sampler, num_updates = make_sampler(*arguments), arguments[-1]
    return torch.cat([sampler.probabilities(update) for update in (0, num_updates // 2, num_updates)])


def draws(*arguments):
    """Timesteps that are drawn at the start, in the middle and at the end of a run."""
    sampler, num_updates = make_sampler(*arguments), arguments[-1]
    generator = torch.Generator().manual_seed(0)
    return torch.cat([sampler.sample(64, update, generator) for update in (0, num_updates // 2, num_updates)])


def weights(name, scheduler, prediction_type):
    weighting = get_loss_weighting(name, scheduler, prediction_type)
    timesteps = torch.arange(len(weighting.table))
    for _ in range(20):
        weighting.observe(timesteps, 1 / (1.0 + timesteps))
    return weighting.table


def timestep_rows(num_updates, num_timesteps):
    """Samplers, weightings and learning rates per noise level, for noise schedules of diffusers."""
    processes = {
        "linear": DDPMScheduler(num_timesteps),
        "scaled linear": DDPMScheduler(num_timesteps, 0.00085, 0.012, "scaled_linear"),
        "flow": FlowMatchEulerDiscreteScheduler(num_timesteps, shift=3.0),
    }
    for process, scheduler in processes.items():
        for name in TIMESTEP_SAMPLERS:
            for compute in (density, draws):
                yield f"{compute.__name__}, {process}", name, functools.partial(compute, name, scheduler, num_updates)
        for prediction in ("flow_velocity",) if process == "flow" else ("epsilon", "v_prediction", "sample"):
            for name in LOSS_WEIGHTINGS:
                yield f"weights, {process}, {prediction}", name, functools.partial(weights, name, scheduler, prediction)
    weight, banded = (TimestepLR(form, [0.5, 1.0, 2.0]) for form in ("weight", "banded"))
    yield "timestep_lr", "weight", functools.partial(weight.weights, num_timesteps)
    yield "timestep_lr", "banded", functools.partial(banded.lr_factors, np.arange(num_updates), num_timesteps)


def measure(rows):
    """From "what: name" to its values, or to the reason why there are none."""
    found = {}
    for what, name, compute in rows:
        if not isinstance(compute, str):
            try:
                compute = np.asarray(compute(), np.float64).tolist()
            except LabError as error:
                compute = str(error)
        found[f"{what}: {name}"] = compute
    return found


def difference(old, new):
    """The largest difference of two rows, relative to their largest value."""
    if len(old) != len(new):
        return np.inf
    return float(np.abs(np.subtract(old, new)).max() / np.abs([old, new]).max(initial=1e-300))


def print_values(found):
    print("| what | values | smallest | largest | last | sum |\n|---|---|---|---|---|---|")
    for name, row in found.items():
        if isinstance(row, str):
            print(f"| {name} | {row} |||||")
        else:
            print(f"| {name} | {len(row)} | {min(row):.6g} | {max(row):.6g} | {row[-1]:.6g} | {sum(row)!r} |")


def print_comparison(old, new):
    """A row for each kind, and a line for each name that differs or is in one environment only. Returns what differs."""
    kinds, notes, differing = {}, [], []
    for name in dict.fromkeys([*old, *new]):
        rows = [each.get(name, "missing") for each in (old, new)]
        reasons = [row for row in rows if isinstance(row, str)]
        if len(reasons) == 1:
            notes.append(f"only {'there' if rows[1] is reasons[0] else 'here'}: {name} ({reasons[0]})")
        if reasons:
            continue
        found = difference(*rows)
        kinds.setdefault(name.partition(": ")[0], []).append(found)
        if not found <= TOLERANCE:
            differing.append(f"{name} differs by {found:.3g}")
    print("| what | names | equal in every bit | largest difference |\n|---|---|---|---|")
    for kind, found in kinds.items():
        print(f"| {kind} | {len(found)} | {found.count(0.0)} | {max(found):.1e} |")
    print("\n".join(["", *notes, *differing]))
    return differing


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--num_updates", type=int, default=1000)
    parser.add_argument("--num_timesteps", type=int, default=1000)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all values as JSON")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare all values with those of a file")
    options = parse(parser, num_updates=40, num_timesteps=40)
    warnings.simplefilter("ignore")  # such as torch's, of schedules that are stepped without an optimizer's step
    found = measure([*schedule_rows(options.num_updates), *timestep_rows(options.num_updates, options.num_timesteps)])
    print(versions())
    if options.write:
        options.write.write_text(json.dumps({"versions": versions(), "values": found}))
    if not options.compare:
        print_values(found)
        return 0
    written = json.loads(options.compare.read_text())
    print(f"compared with {written['versions']}\n")
    return 1 if print_comparison(written["values"], found) else 0


if __name__ == "__main__":
    sys.exit(main())
