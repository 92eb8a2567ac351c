"""`lrlab predict`: the loss that schedules would reach, before they are run."""

import argparse
import shlex
from pathlib import Path

from ..core.errors import must_be
from ..core.extras import require_extra
from .output import say, say_json
from .preview import number, plot_path

PREDICT_HELP = "Predict, from runs, the validation loss that other schedules, lengths and peaks would reach"
_SHOWN = 5  # of the schedules of --best


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    runs = "Folders of runs, or of a study, with three schedules or more: laws are checked by leaving one out."
    add("--from", dest="folders", type=Path, nargs="+", action="extend", required=True, metavar="RUN_OR_STUDY", help=runs)
    add(
        "--lr_scheduler",
        action="append",
        metavar="NAME",
        help="Schedule to predict, repeatable (default: those of the runs).",
    )
    length = "Length to predict, in updates (default: that of the longest run)."
    add("--max_train_steps", type=int, metavar="N", help=length)
    add("--learning_rate", type=number, metavar="LR", help="Peak to predict (default: that of the first run).")
    add(
        "--lr_warmup_steps",
        type=number,
        metavar="W",
        help="Warm-up to predict, or its share of a run (default: as in the runs).",
    )
    add("--best", action="store_true", help="Search cool-downs and joined schedules for the lowest predicted loss.")
    add("--metric", default="validation_loss", metavar="NAME", help="Or validation_loss_ema (default: %(default)s).")
    floor = "Loss that no model goes below, or 0 for none (default: computed from the data, as by lrlab floor)."
    add("--floor", type=number, metavar="X", help=floor)
    add("--law", metavar="NAME", help="Try one law alone: annealing, multi-power or bound.")
    add("--arm", action="append", default=[], metavar="NAME", help="Use this arm of a study; repeat it for several.")
    add("--dataset", metavar="NAME", help="Use the runs of a study on this data set.")
    add("--out", metavar="FILE", help="Plot measured and predicted losses, as .png, .svg or .pdf.")
    add("--json", action="store_true", help="Print the check and the predictions as JSON.")


def predict(options: argparse.Namespace) -> int:
    out = plot_path(options.out)
    if options.lr_scheduler and options.best:
        raise must_be("--best", True, "left out beside --lr_scheduler", "it searches schedules of its own", got="both")
    require_extra("train", "`lrlab predict`")
    from ..run.predict import forecast_loss, predictable

    for spec in options.lr_scheduler or ():
        predictable(spec)
    of_study = options.arm, options.dataset
    forecast = forecast_loss(options.folders, options.metric, options.floor, options.law, *of_study)
    given = options.max_train_steps, options.learning_rate, options.lr_warmup_steps
    candidates = [forecast.candidate(spec, *given) for spec in options.lr_scheduler or forecast.specs]
    if not forecast.forecaster.check.is_passed:
        # Nothing that looks like a forecast: no number, no plot.
        if options.json:
            say_json(forecast.as_data([]), indent=2)
        else:
            say(forecast.describe_runs())
        return 1
    if options.best:
        found = forecast.search(*given)
        predicted = found[:_SHOWN]
        usual = [one for one in found if one.candidate.label in ("cosine", "constant_with_warmup")]
        predicted += [one for one in usual if one not in predicted]
    else:
        predicted = [forecast.forecaster.predict(candidate) for candidate in candidates]
    if out is not None:
        forecast.plot(predicted, out)
    if options.json:
        say_json(forecast.as_data(predicted), indent=2)
        return 0
    say(f"{forecast.describe_runs()}\n\n{forecast.describe(predicted)}")
    if options.best:
        equal = forecast.equally_good(found)
        if equal > 1:
            outcome = (
                f"{equal} of {len(found)} schedules are predicted within the law's error of the lowest loss, so the law "
            )
            outcome += "cannot tell which of them is best."
        else:
            outcome = f"No other of the {len(found)} schedules is predicted within the law's error of the lowest loss."
        if edge := forecast.edge_in_words(predicted[0]):
            outcome += f"\n{edge}"
        say(f"\n{outcome} To train with the first one, give the run these options:")
        say("  " + shlex.join(forecast.flags_of(predicted[0].candidate)))
    if out is not None:
        say(f"Wrote {out}.")
    return 0
