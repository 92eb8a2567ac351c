"""How far to trust the learning-rate finder: the spread of its suggestions, and losses of training with them.

    python benchmarks/lr_finder.py --out lr-finder
    python benchmarks/lr_finder.py --out lr-finder --part spread

`spread`: one test for each of five seeds (weights, batches, timesteps and noise), on digits and four sets of points; spread
is the ratio of the 90 % to the 10 % quantile of the suggested rates. OUT/spread.png shows all curves.
`training`: held-out loss (EMA weights) after training at the suggestion (median over these seeds), at a third and three
times of it, and at a grid of rates, by a study in OUT/training-DATASET that goes on where it was stopped.
`cost`: updates of the finder beside as many plain ones, in turns.
"""

import json
import statistics
import time
from pathlib import Path

import numpy as np
from common import make_parser, parse

from diffusers_lrlab.core.plotting import GREY, ORANGE, new_figure, save_figure
from diffusers_lrlab.finder.find import find_lr, resolve_settings
from diffusers_lrlab.finder.on_trainer import range_test_of
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.training.config import TrainingConfig

GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def suggestions_of(out, options):
    """By data set: rates by seed (`None` without one), and curves; those of OUT/spread.json, too."""
    file = out / "spread.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for dataset in options.datasets:
        if dataset in found:
            continue
        rates = {"curves": [], "rates": []}
        for seed in range(options.finder_seeds):
            config = TrainingConfig(dataset_name=dataset, seed=seed, max_train_steps=1000)
            result = find_lr(config, FinderConfig(repeats=1, num_updates=options.finder_updates))
            rates["rates"].append(result.suggestion.lr)
            rates["curves"].append([result.sweeps[0].lrs.tolist(), result.sweeps[0].losses.tolist()])
        found[dataset] = rates
        file.write_text(json.dumps(found, indent=1))
    return found


def spread(rates):
    """Ratio of the 90 % to the 10 % quantile, the median, and the number of seeds without a rate."""
    named = [rate for rate in rates if rate is not None]
    if len(named) < 2:
        return None, None, len(rates) - len(named)
    low, middle, high = 10 ** np.quantile(np.log10(named), [0.1, 0.5, 0.9])
    return high / low, middle, len(rates) - len(named)


def print_spread(found):
    print("| data | median (spread) |\n|---|---|")
    for dataset, about in found.items():
        ratio, median, none = spread(about["rates"])
        without = f", none from {none} of {len(about['rates'])}" if none else ""
        print(f"| {dataset} | {'none' + without if ratio is None else f'{median:.2g} ({ratio:.2f}{without})'} |")


def plot_spread(found, path):
    """A line for each seed, and below them a mark for each suggested rate."""
    figure = new_figure(13, 3.2, dpi=110)
    for axes, (dataset, rates) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        losses = np.concatenate([losses for _, losses in rates["curves"]])
        low, start = np.nanmin(losses), np.nanmedian([losses[0] for _, losses in rates["curves"]])
        for lrs, losses in rates["curves"]:
            axes.plot(lrs, losses, color=GREY, linewidth=0.7)
        named = [rate for rate in rates["rates"] if rate is not None]
        axes.scatter(named, [low - 0.1 * (start - low)] * len(named), marker="|", s=50, color=ORANGE)
        axes.set(xscale="log", ylim=(low - 0.35 * (start - low), start + 0.5 * (start - low)), yticks=[], title=dataset)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.supylabel("loss")
    figure.supxlabel("learning rate")
    save_figure(figure, path)


def train(out, found, options):
    """By data set and rate, mean and standard deviation of the held-out loss over seeds, `None` where one diverged."""
    from diffusers_lrlab.study.run import run_study
    from diffusers_lrlab.study.spec.reading import read_spec

    losses = {}
    for dataset in options.datasets:
        _, suggested, _ = spread(found[dataset]["rates"])
        if suggested is None:
            print(f"{dataset}: no rate from more than one seed, so nothing is trained.")
            continue
        rates = sorted({*options.grid, *(float(f"{suggested * factor:.2g}") for factor in (1 / 3, 1, 3))})
        updates = options.image_updates if dataset == "digits" else options.point_updates
        spec = read_spec(
            {
                "title": f"Learning rates on {dataset}",
                "base": {"lr_scheduler": "cosine", "max_train_steps": updates},
                "arms": {"cosine": {"learning_rates": rates}},
                "datasets": [dataset],
                "seeds": options.seeds,
                "metrics": ["validation_loss_ema"],
            },
            f"training-{dataset}",
        )
        run_study(spec, out / f"training-{dataset}")
        rows = json.loads((out / f"training-{dataset}" / "summary.json").read_text())["rows"]
        losses[dataset] = (
            float(f"{suggested:.2g}"),
            {
                float(row["arm"].partition("@")[2]): None if row["diverged"] else (row["mean"], row["std"] or 0.0)
                for row in rows
            },
        )
    return losses


def print_training(losses, grid):
    print("| data | suggested | loss there | at a third | at three times | best of the grid | loss there | off by |")
    print("|---|---|---|---|---|---|---|---|")
    for dataset, (suggested, found) in losses.items():
        best = min((rate for rate in grid if found[rate]), key=lambda rate: found[rate][0], default=grid[0])
        near = [min(found, key=lambda rate: abs(np.log(rate / suggested / factor))) for factor in (1, 1 / 3, 3)]
        cells = ["{:.4f} ± {:.4f}".format(*found[rate]) if found[rate] else "diverged" for rate in (*near, best)]
        off = f"{found[near[0]][0] / found[best][0] - 1:+.1%}" if found[near[0]] and found[best] else ""
        print(f"| {dataset} | {suggested:.2g} | {' | '.join(cells[:3])} | {best:g} | {cells[3]} | {off} |")


def print_cost(rounds, num_updates):
    """The finder's updates beside as many plain ones, in turns, on digits and on points."""
    import tempfile

    from diffusers_lrlab.data.batches import iterate_batches
    from diffusers_lrlab.training.prepare import prepare
    from diffusers_lrlab.training.run_folder import RunFolder
    from diffusers_lrlab.training.trainer import Trainer

    print("| data | a plain update, ms | of the finder, ms | ratio (quartiles) |")
    print("|---|---|---|---|")
    for dataset in ("digits", "dino"):
        plan, data, accelerator = prepare(TrainingConfig(dataset_name=dataset, max_train_steps=1000))
        # At rates so low, none diverges.
        settings = resolve_settings(FinderConfig(num_updates=num_updates, end_lr=1e-4), "adamw")
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder)))
            trainer.stepper.model.train()
            trainer.log.observer = None  # the finder has none
            times = {"plain": [], "finder": []}
            for turn in range(rounds + 1):
                started = time.perf_counter()
                for images in iterate_batches(data, plan.layout, 0, range(num_updates)):
                    trainer.do_update(images)
                middle = time.perf_counter()
                sweep = range_test_of(trainer, settings)
                if turn:
                    times["plain"].append(1000 * (middle - started) / num_updates)
                    times["finder"].append(1000 * (time.perf_counter() - middle) / sweep.num_updates)
        ratios = [test / plain for test, plain in zip(times["finder"], times["plain"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        plain, finder = (statistics.median(values) for values in times.values())
        print(f"| {dataset} | {plain:.2f} | {finder:.2f} | {median:.2f} ({low:.2f} to {high:.2f}) |", flush=True)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of results; what is there is not done again")
    parser.add_argument("--part", choices=("spread", "training", "cost"), help="all of them if not given")
    parser.add_argument("--seeds", type=int, default=5, help="of training")
    parser.add_argument("--image_updates", type=int, default=1000)
    parser.add_argument("--point_updates", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=8, help="of the cost")
    parser.set_defaults(
        datasets=["digits", "circle", "dino", "line", "moons"], grid=GRID, finder_seeds=5, finder_updates=200
    )
    tiny = {"datasets": ["line"], "grid": [1e-3], "finder_seeds": 2, "finder_updates": 10, "rounds": 2}
    options = parse(parser, **tiny, seeds=1, image_updates=2, point_updates=2)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part in (None, "cost"):
        print_cost(options.rounds, options.finder_updates)
    if options.part == "cost":
        return
    found = suggestions_of(options.out, options)
    print_spread(found)
    plot_spread(found, options.out / "spread.png")
    if options.part in (None, "training"):
        print_training(train(options.out, found, options), options.grid)


if __name__ == "__main__":
    main()
