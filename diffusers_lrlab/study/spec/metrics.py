"""What can be compared in a study, by name, and what of it the data of a run can give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import LabError, did_you_mean
from ...training.config import ResolvedConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

_LABELS = {
    "validation_loss": "Loss of the raw weights on held-out data",
    "validation_loss_ema": "Loss of the EMA weights on held-out data",
    "training_set_loss": 'Loss of the raw weights on all training points (the paper\'s "evaluation loss")',
    "exact_kl": "KL(data ‖ model) by the known density, bits",
    "sharpness": "Largest eigenvalue of the Hessian of the held-out loss at the averaged weights",
    "frechet_distance": "Fréchet distance to held-out images",
}


# Sample quality first.
DEFAULT_METRICS = (
    *("kl", "frechet_distance", "validation_loss_ema", "validation_loss", "energy_distance", "training_set_loss"),
)


def metric_labels() -> dict[str, str]:
    """From the name of each metric to what it is, for people."""
    from ...evaluation.points import POINT_METRICS

    return _LABELS | {name: metric.label for name, metric in POINT_METRICS.items()}


def metric_label(name: str) -> str:
    """A metric for people."""
    return metric_labels().get(name, name.replace("_", " "))


def sample_metrics() -> set[str]:
    """Those that compare samples with data."""
    from ...evaluation.points import POINT_METRICS

    return {*POINT_METRICS, "frechet_distance"}


def _absence(name: str, config: ResolvedConfig) -> str | None:
    """Why the data or the options of a run cannot give a metric, `None` if they can."""
    from ...data.toy2d_entries import LOG_PROBS
    from ...evaluation.points import POINT_METRICS

    of_points = config.point_column is not None
    if name in ("validation_loss", "validation_loss_ema", "sharpness") and not config.num_validation_images:
        return "needs held-out data: give num_validation_images above 0"
    if name == "validation_loss_ema" and not config.use_ema:
        return "needs an EMA: leave use_ema at true, or use validation_loss"
    if name in POINT_METRICS or name in ("training_set_loss", "exact_kl"):
        if not of_points:
            return "is for points"
        if name != "training_set_loss" and config.distance_samples == 0:
            return "needs samples: give distance_samples above 0"
        if name == "exact_kl" and config.num_validation_images < 2:
            return "is measured at held-out points: give num_validation_images of 2 or more"
        if name == "exact_kl" and (config.dataset_name not in LOG_PROBS or config.ddpm_num_steps < 2):
            return "needs data whose density is known in closed form: " + ", ".join(LOG_PROBS)
    if name == "frechet_distance" and not config.frechet_samples:
        return "needs features that suit the data, which exist for digits, and frechet_samples above 0"
    if name == "sharpness" and not of_points:
        return "is measured on points"
    return None


def check_metrics(names: Iterable[str], config: ResolvedConfig, where: str) -> None:
    """
    Raises a `LabError` for the first metric that is not known, or that a run cannot give.

    Args:
        names: Of metrics.
        config ([`ResolvedConfig`]): Of the run, resolved.
        where (`str`): Where they were asked for.
    """
    known = metric_labels()
    for name in names:
        if name not in known:
            raise LabError(f"{where}: there is no metric {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")
        if reason := _absence(name, config):
            raise LabError(f"{where}: {name!r} {reason}.")


def default_metrics(config: ResolvedConfig) -> tuple[str, ...]:
    """What a run is measured by if nobody says: sample quality first."""
    return tuple(name for name in DEFAULT_METRICS if _absence(name, config) is None)
