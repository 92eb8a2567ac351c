"""Laws of the loss, fitted to three schedules, beside the losses that five others really reached.

    python benchmarks/loss_laws.py --out loss-laws
    python benchmarks/loss_laws.py --out loss-laws --metric validation_loss_ema
    python benchmarks/loss_laws.py --out loss-laws --best

Runs a study on points with `lrlab study run` (runs that are finished in DIR are not done again). Fits each law to a
constant rate, a cosine and a WSD, as they are and above the floor of the loss, and predicts the final held-out loss of other
schedules, of twice the length and of a lower peak. Prints the errors beside those of naive forecasts, and the check of
`lrlab predict`. --best trains the schedule that `lrlab predict --best` finds, too, in DIR-best.
"""

from pathlib import Path

import numpy as np
from common import machine, make_parser, parse

from diffusers_lrlab import run_study
from diffusers_lrlab.forecast.law_check import LAST_VALUE, nearest
from diffusers_lrlab.forecast.law_fits import Model
from diffusers_lrlab.forecast.loss_forecast import mean_curve
from diffusers_lrlab.forecast.loss_laws import LAWS, POWER_OF_UPDATES
from diffusers_lrlab.run.loss_curves import METRICS, by_schedule, read_runs
from diffusers_lrlab.run.predict import forecast_loss

FITTED = {
    "constant": {"lr_scheduler": "constant_with_warmup"},
    "cosine": {"lr_scheduler": "cosine"},
    "wsd": {"lr_scheduler": "warmup_stable_decay:num_decay_steps=0.3"},
}


def targets(updates):
    """The arms to predict."""
    return {
        "step": {"lr_scheduler": f"step:step_size={updates // 4},gamma=0.5"},
        "exponential": {"lr_scheduler": "exponential"},
        "rex": {"lr_scheduler": "rex"},
        "cosine_long": {"lr_scheduler": "cosine", "max_train_steps": 2 * updates},
        "cosine_low": {"lr_scheduler": "cosine", "learning_rate": 3e-4},
    }


def study(options, arms, **base):
    return {
        "title": "Laws of the loss",
        "base": {"learning_rate": 1e-3, "max_train_steps": options.updates, **base},
        "arms": arms,
        "datasets": [options.dataset],
        "seeds": options.seeds,
        "metrics": [*METRICS],
        "evaluation_points": 40,
    }


def error(predicted, curve):
    """Of the final loss, in %, with its sign."""
    return f"{100 * (predicted / curve.losses[-1] - 1):+.3f}"


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dataset", default="dino")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--metric", choices=METRICS, default=METRICS[0])
    parser.add_argument("--best", action="store_true", help="train the schedule with the lowest predicted loss, too")
    parser.add_argument("--floor", type=float, help="the lowest possible loss (default: computed from the data)")
    options = parse(parser, updates=40, seeds=1, floor=0.01)
    predicted, small = targets(options.updates), {}
    if options.tiny:
        predicted = {"rex": predicted["rex"]}
        small = {"num_validation_images": 200, "distance_samples": 100, "ddpm_num_steps": 10}
    run_study(study(options, FITTED | predicted, **small), options.out)

    forecast = forecast_loss([options.out], options.metric, options.floor, arms=[*FITTED])
    floor, curves = forecast.forecaster.floor, forecast.forecaster.curves
    arms, seeds = {}, {}
    for arm in (*FITTED, *predicted):
        arms[arm], seeds[arm] = reached(options.out, options.metric, arm)
    print(
        f"\n{machine()}\n\nFitted to {', '.join(FITTED)} ({options.updates} updates, {options.dataset}); floor {floor:.5f}\n"
    )
    print("| arm | final loss | standard deviation over seeds, % |\n|---|---|---|")
    for arm, curve in arms.items():
        spread = f"{100 * np.std(seeds[arm], ddof=1) / curve.losses[-1]:.3f}" if len(seeds[arm]) > 1 else "-"
        print(f"| {arm} | {curve.losses[-1]:.5f} | {spread} |")

    titles = [*predicted, "mean size", "limit"]
    print(f"\n| error of the final loss, % | {' | '.join(titles)} |\n|---{'|---' * len(titles)}|")
    models = [Model(law, above) for law in LAWS.values() for above in (False, True)] + [Model(POWER_OF_UPDATES)]
    is_below = all(curve.losses.min() > floor for curve in curves)
    for model in (model for model in models if is_below or not model.with_floor):
        fitted = model.fit(curves, floor)
        finals = [fitted.predict(arms[arm].lrs, arms[arm].warmup_updates, arms[arm].updates[-1:])[0] for arm in predicted]
        limit = fitted.fits[0].floor + fitted.fits[0].coefficients["L0"]
        show(model.name, finals, [arms[arm] for arm in predicted], f"{limit:.4f}")
    show(LAST_VALUE, [nearest(arms[arm], curves).losses[-1] for arm in predicted], [arms[arm] for arm in predicted])
    print(f"\n{forecast.forecaster.check.describe()}")
    if options.best and forecast.forecaster.check.is_passed:
        found = forecast.search(None, None, None)
        best, folder = found[0].candidate.label, options.out.with_name(options.out.name + "-best")
        run_study(study(options, {"best": {"lr_scheduler": best}}, **small), folder)
        _, finals = reached(folder, options.metric, "best")
        interval = "" if found[0].interval is None else " ({:.5f} to {:.5f})".format(*found[0].interval)
        equal = forecast.equally_good(found)
        print(f"\nThe best of {len(found)} schedules, {equal} of which are as good within the error of the law: {best}")
        print(f"Predicted {found[0].final:.5f}{interval}, reached {np.mean(finals):.5f} by {', '.join(map(five, finals))};")
        print(f"the WSD that was fitted reached {arms['wsd'].losses[-1]:.5f} by {', '.join(map(five, seeds['wsd']))}.")


def reached(folder, metric, arm):
    """The mean curve of an arm, and the final loss of each seed."""
    (of_seeds,) = by_schedule(read_runs([folder], metric, [arm]))
    return mean_curve([*of_seeds.values()]), [curve.losses[-1] for curve in of_seeds.values()]


def five(loss):
    return f"{loss:.5f}"


def show(name, finals, curves, limit="-"):
    """A row: errors, their mean size, and the loss that a law falls to."""
    cells = [error(final, curve) for final, curve in zip(finals, curves, strict=True)]
    print(f"| {name} | {' | '.join(cells)} | {np.mean([abs(float(cell)) for cell in cells]):.3f} | {limit} |", flush=True)


if __name__ == "__main__":
    main()
