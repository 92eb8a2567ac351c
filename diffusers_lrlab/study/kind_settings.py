"""How studies treat each kind of data: what they measure, compare and stack, and which metrics a run can have."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..core.errors import LabError, did_you_mean
from ..data.image_sets import IMAGE_DATASETS
from ..data.latents import image_set_of
from ..data.toy2d import LOG_PROBS
from ..evaluation.metrics import METRICS
from ..training.config import ResolvedConfig, TrainingConfig
from ..training.kinds import kind_of, row_for


@dataclass(frozen=True)
class KindSettings:
    """The settings of a kind of data. A kind of another package puts its own under its name into [`KIND_SETTINGS`]."""

    # Metrics of a study that names none, the primary one first.
    default_metrics: tuple[str, ...] = ("validation_loss_ema", "validation_loss")
    compares_held_out: bool = False  # compares as many samples as are held out, if their number is not given
    is_stackable: bool = False  # points of an [`MLPDenoiser`] in a [`PointDDPMPipeline`], which stacks compute
    shares_data: bool = False  # data in memory do not depend on the seed, so that all seeds share them


KIND_SETTINGS: dict[str, KindSettings] = {
    "images": KindSettings(
        default_metrics=("frechet_distance", "validation_loss_ema", "validation_loss", "class_accuracy"),
    ),
    "points": KindSettings(
        default_metrics=("kl", "validation_loss_ema", "validation_loss", "energy_distance", "training_set_loss"),
        compares_held_out=True,
        is_stackable=True,
        shares_data=True,
    ),
}


def settings_of(config: TrainingConfig | dict[str, Any]) -> KindSettings:
    """The settings of the kind of data of a run."""
    return row_for(kind_of(config), KIND_SETTINGS, KindSettings())


def num_compared_samples(config: ResolvedConfig) -> int:
    """The number of samples compared with data."""
    return config.num_validation_images if config.distance_samples is None else config.distance_samples


# --- metrics of a run ------------------------------------------------------------------------------------------------

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


def data_lacking(name: str, config: ResolvedConfig) -> str | None:
    """The part of the data that a metric needs and a run lacks; `None` if it lacks none."""
    needs = METRICS[name].needs
    if "features" in needs and image_set_of(config) is None:
        sets = ", ".join(IMAGE_DATASETS)
        return f"needs features that suit the data, which exist for {sets}: register_features gives others, as frechet_NAME"
    if "density" in needs and (config.dataset_name not in LOG_PROBS or config.num_train_timesteps < 2):
        return "needs data whose density is known in closed form: " + ", ".join(LOG_PROBS)
    return None


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
