"""Which metrics can be measured in the runs of a study."""

from collections.abc import Iterable

from ...core.errors import LabError, did_you_mean
from ...data.image_sets import IMAGE_DATASETS
from ...data.latents import image_set_of
from ...data.toy2d import LOG_PROBS
from ...evaluation.metrics import METRICS
from ...training.config import ResolvedConfig
from ...training.kinds import kind_of
from ..kind_settings import settings_of


def _absence(name: str, config: ResolvedConfig) -> str | None:
    """Why a metric cannot be measured with the data or the options of a run; `None` if it can."""
    metric = METRICS[name]
    if metric.form not in (None, kind_of(config).form):
        return f"is for {metric.form}"
    if "held_out" in metric.needs and not config.num_validation_images:
        return "needs held-out data: give num_validation_images above 0"
    if "ema" in metric.needs and not config.use_ema:
        return "needs an EMA: leave use_ema at true, or use validation_loss"
    if reason := data_lacking(name, config):
        return reason
    if "labels" in metric.needs and config.label_column is None:
        return "needs class labels: give label_column"
    if "samples" in metric.needs and config.distance_samples == 0:
        return "needs samples: give distance_samples above 0"
    if "density" in metric.needs and config.num_validation_images < 2:
        return "is measured at held-out points: give num_validation_images of 2 or more"
    return None


def data_lacking(name: str, config: ResolvedConfig) -> str | None:
    """What the data of a run lack for a metric, whatever its options; `None` if nothing."""
    needs = METRICS[name].needs
    if "features" in needs and image_set_of(config) is None:
        sets = ", ".join(IMAGE_DATASETS)
        return f"needs features that suit the data, which exist for {sets}: register_features gives others, as frechet_NAME"
    if "density" in needs and (config.dataset_name not in LOG_PROBS or config.num_train_timesteps < 2):
        return "needs data whose density is known in closed form: " + ", ".join(LOG_PROBS)
    return None


# What papers call a metric, where the name here is too different to be guessed.
_NAMES_ELSEWHERE = {"fid": "frechet_distance"}


def check_metrics(names: Iterable[str], config: ResolvedConfig, where: str) -> None:
    """Raises a `LabError` for the first metric that is unknown or cannot be measured."""
    for name in names:
        if name not in METRICS:
            hint = did_you_mean(_NAMES_ELSEWHERE.get(name.lower(), name), METRICS)
            raise LabError(f"{where}: there is no metric {name!r}.{hint} Known: {', '.join(METRICS)}.")
        if reason := _absence(name, config):
            raise LabError(f"{where}: {name!r} {reason}.")


def default_metrics(config: ResolvedConfig) -> tuple[str, ...]:
    """The default metrics of a run, sample quality first."""
    return tuple(name for name in settings_of(config).default_metrics if _absence(name, config) is None)
