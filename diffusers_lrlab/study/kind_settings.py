"""How studies treat each kind of data: what they measure, compare and stack, and which metrics a run can have."""

from collections.abc import Callable, Iterable
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


# --- metrics of a run ------------------------------------------------------------------------------------------------


def check_metrics(names: Iterable[str], config: ResolvedConfig, where: str) -> None:
    """Raises a `LabError` for the first metric that is unknown or cannot be measured."""
    for name in names:
        if name not in METRICS:
            hint = did_you_mean(name, METRICS)
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
        return f"needs features that suit the data, which exist for {sets}; register a metric of your own images"
    if "density" in needs and (config.dataset_name not in LOG_PROBS or config.num_train_timesteps < 2):
        return "needs data whose density is known in closed form: " + ", ".join(LOG_PROBS)
    return None


# Of what a metric needs: whether a run has it, and what it is called, with a remedy.
_NEEDS: dict[str, tuple[Callable[[ResolvedConfig], Any], str]] = {
    "held_out": (lambda config: config.num_validation_images, "held-out data: give num_validation_images above 0"),
    "ema": (lambda config: config.use_ema, "an EMA: leave use_ema at true, or use validation_loss"),
    "labels": (lambda config: config.label_column is not None, "class labels: give label_column"),
    "samples": (lambda config: config.distance_samples != 0, "samples: give distance_samples above 0"),
    "density": (lambda config: config.num_validation_images > 1, "held-out points: give num_validation_images of 2 or more"),
}


def _absence(name: str, config: ResolvedConfig) -> str | None:
    """Why a metric cannot be measured with the data or the options of a run; `None` if it can."""
    metric = METRICS[name]
    if metric.form not in (None, kind_of(config).form):
        return f"is for {metric.form}"
    lacking = (f"needs {what}" for need, (has, what) in _NEEDS.items() if need in metric.needs and not has(config))
    return data_lacking(name, config) or next(lacking, None)
