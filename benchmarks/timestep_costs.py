"""The cost of an update of each arm of the study `timesteps-digits`, over one with uniform timesteps.

    python benchmarks/timestep_costs.py          some minutes on 2 cores

Where it is above 1, equal updates are not equal time.
"""

import statistics
import tempfile
from pathlib import Path

from common import machine, make_parser, make_trainer, parse, updates_in_turns

from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.study.spec.spec import ARM_NOTES


def flags_of(fields):
    """An arm as options of train_ddpm.py."""
    return [f"--{name}={value}" for name, value in fields.items() if name not in ARM_NOTES]


def measure_costs(arms, rounds):
    """Medians of ratios to the first arm, the arms taking turns in one process."""
    with tempfile.TemporaryDirectory() as base:
        loops = {}
        for name, flags in arms.items():
            arguments = [*flags, f"--max_train_steps={rounds + 20}", "--num_validation_images=0"]
            arguments += ["--distance_samples=0"]  # which needs held-out images
            loops[name] = make_trainer(Path(base) / name, arguments).updates()
        times = updates_in_turns(loops, rounds)
    first = times[next(iter(arms))]
    return {
        name: statistics.median(own / base for own, base in zip(of_arm, first, strict=True))
        for name, of_arm in times.items()
    }


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="updates that are timed")
    options = parse(parser, rounds=2)
    arms = {name: flags_of(fields) for name, fields in load_spec("timesteps-digits").arms.items()}
    if options.tiny:
        arms = dict(list(arms.items())[:2])
    print(machine())
    print("\n| arm | an update, over one with uniform timesteps |\n|---|---|")
    for name, cost in measure_costs(arms, options.rounds).items():
        print(f"| `{name}` | {cost:.3f} |")


if __name__ == "__main__":
    main()
