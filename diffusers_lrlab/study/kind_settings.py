"""How studies treat each kind of data: what they measure, compare and stack."""

from dataclasses import dataclass
from typing import Any

from ..training.config import ResolvedConfig, TrainingConfig
from ..training.kinds import kind_of
from ..training.kinds.base import row_for


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
