"""The loss of a perfect model on a data set, by bin of timesteps, and what it says about the losses of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.errors import LabError
from ..core.listing import aligned
from ..core.plotting import BLUE, DARK, GREEN, GREY, ORANGE, new_figure, plain_axes, plain_log_scale, save_figure
from ..core.words import counted
from ..data.labels import KEYWORD
from ..data.toy2d import toy_log_prob
from ..data.toy2d_entries import TOY_DATASETS
from . import loss_floor as floors

if TYPE_CHECKING:
    from ..data.loading import TrainingData
    from ..objective.process import NoiseProcess

MOST_IMAGES = 10_000  # whose floor is computed, unless another number is asked for
_LEVELS_PER_BIN, _QUERIES = 4, 2000
Groups = dict[int, torch.Tensor]  # images by class: float64 `(size, values)`
_NEAR = 0.25  # of the way from the floor of the training set to the upper bound of the distribution's
_APART = 0.1  # the smallest such distance that memorisation can be told by, as a share of the upper bound


@dataclass(frozen=True)
class Floor:
    """Unweighted losses by bin of timesteps, float64 `(bins,)` each; NaN where a loss is unknown."""

    name: str  # of the data
    num_images: int  # whose floor it is
    num_in_set: int | None  # of all training images; `None` for a stream
    starts: np.ndarray  # first timestep of each bin, and T
    of_set: np.ndarray  # the lowest possible loss on these training images
    errors: np.ndarray  # standard errors of `of_set`
    of_half: np.ndarray  # the same of half as many images
    upper_bound: np.ndarray  # of the lowest possible loss on the distribution
    exact: np.ndarray | None  # that loss itself, if the density is known
    training: np.ndarray | None = None  # losses of a run
    validation: np.ndarray | None = None

    def memorised(self) -> np.ndarray:
        """Bins whose training loss is near the floor of the training set, far below what a new image can have: bool."""
        if self.training is None:
            return np.zeros(len(self.of_set), bool)
        gap = self.upper_bound - self.of_set
        return (gap > _APART * self.upper_bound) & (self.training - self.of_set < _NEAR * gap)

    def best_known(self) -> np.ndarray:
        """The floor of the distribution where it is known, else that of the training set, which is lower."""
        return self.of_set if self.exact is None else np.where(np.isnan(self.exact), self.of_set, self.exact)

    def describe(self) -> str:
        """A table, and what follows from it."""
        columns = {"training set": self.of_set, "upper bound": self.upper_bound}
        columns |= {} if self.exact is None else {"distribution": self.exact}
        columns |= {} if self.training is None else {"training loss": self.training}
        columns |= {} if self.validation is None else {"validation loss": self.validation}
        rows = [["timesteps", *columns]]
        for index in range(len(self.of_set)):
            numbers = [values[index] for values in columns.values()]
            label = f"{self.starts[index]} to {self.starts[index + 1] - 1}"
            rows.append([label, *("-" if np.isnan(number) else f"{number:.4g}" for number in numbers)])
        means = [values.mean() for values in columns.values()]
        rows.append(["mean", *("-" if np.isnan(mean) else f"{mean:.4g}" for mean in means)])
        return "\n".join(
            [f"Lowest possible loss on {self.name!r}, by timesteps (noise grows):", aligned(rows), *self._notes()]
        )

    def _notes(self) -> list[str]:
        of = "" if self.num_in_set in (None, self.num_images) else f" of {self.num_in_set:,}"
        error, less = np.sqrt((self.errors**2).mean()), self.of_set.mean() - self.of_half.mean()
        notes = [
            f"Training set: lowest loss on {self.num_images:,}{of} training examples, known to {error:.2g}; only a model "
            f"that memorises reaches it. Half as many examples lower the mean by {less:.2g}.",
            "Upper bound: held-out error of the training set's posterior mean or of a linear prediction, whichever is "
            "lower. The best loss on new examples lies between the two columns.",
        ]
        best = self.upper_bound if self.exact is None or np.isnan(self.exact).any() else self.exact
        loss = self.training if self.validation is None else self.validation
        if loss is not None and not np.isnan(loss).any():
            at_least = min(self.of_set.mean(), best.mean())
            notes.append(f"Of the loss of {loss.mean():.4g}, at least {at_least:.4g} is noise that no model predicts.")
        for index in np.flatnonzero(self.memorised()):
            notes.append(
                f"Memorisation at timesteps {self.starts[index]} to {self.starts[index + 1] - 1}: the training loss, "
                f"{self.training[index]:.4g}, is near the lowest on the {self.num_images:,} training examples, "  # type: ignore[index]
                f"{self.of_set[index]:.4g}; new ones may need up to {self.upper_bound[index]:.4g}."
            )
        return notes

    def as_data(self) -> dict[str, Any]:
        """The numbers, for JSON; `null` where a loss is unknown."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("starts", "name")
        }
        lists = {
            key: [None if np.isnan(one) else float(one) for one in value] if isinstance(value, np.ndarray) else value
            for key, value in values.items()
        }
        memorised = np.flatnonzero(self.memorised()).tolist()
        return {"name": self.name, "first_timesteps": self.starts[:-1].tolist(), **lists, "memorised_bins": memorised}

    def plot(self, path: Path) -> None:
        """Draws floors and losses over the timesteps."""
        middles = (self.starts[:-1] + self.starts[1:] - 1) / 2
        figure = new_figure(7, 4, dpi=130)
        axes = figure.subplots()
        axes.fill_between(
            middles, self.of_set, self.upper_bound, color=GREY, alpha=0.3, label="the best loss on new examples lies here"
        )
        axes.plot(middles, self.of_set, color=DARK, label=f"lowest on the {self.num_images:,} training examples")
        for values, color, label in (
            (self.exact, GREEN, "lowest on the distribution"),
            (self.training, ORANGE, "training loss"),
            (self.validation, BLUE, "validation loss"),
        ):
            if values is not None:
                axes.plot(middles, values, "o-", markersize=3, color=color, label=label)
        axes.set(xlabel="timestep (noise)", ylabel="unweighted loss", title=self.name)
        plain_axes(axes)
        plain_log_scale(axes)
        axes.legend(fontsize=8, frameon=False)
        save_figure(figure, path)


def floor_of_data(data: TrainingData, process: NoiseProcess, starts: np.ndarray, max_images: int = MOST_IMAGES) -> Floor:
    """
    The lowest possible loss on a data set.

    Args:
        data ([`TrainingData`]): At most `max_images` of its training images are used, and all that are held out.
        process ([`NoiseProcess`]): Its noise levels, and what a model predicts.
        starts (`numpy.ndarray`): The first timestep of each bin, and T: int64 `(bins + 1,)`.
        max_images (`int`, *optional*, defaults to 10000): A floor of fewer images is lower.

    Raises:
        LabError: for fewer than 4 training images, or fewer than 2 that are held out.
    """
    images = data.random_sample(max_images, max_images)
    if len(images) < 4 or len(data.held_out) < 2:
        raise LabError(
            f"{data.name!r} has {counted(len(images), 'training image')}, and {len(data.held_out)} held out; the bounds "
            "need 4 and 2. Hint: set --num_validation_images."
        )
    bins = [
        np.unique(np.linspace(first, last - 1, min(_LEVELS_PER_BIN, last - first)).round().astype(int))
        for first, last in zip(starts[:-1], starts[1:], strict=True)
    ]
    timesteps = np.concatenate(bins)
    sigmas = floors.sigmas_of(process, timesteps)

    def by_bin(errors: np.ndarray) -> np.ndarray:
        losses = floors.in_loss_units(errors, process, timesteps)
        return np.array([part.mean() for part in np.split(losses, np.cumsum([len(one) for one in bins])[:-1])])

    groups, held_out = _by_class(images, data), _by_class(data.held_out, data, with_mirrored=False)
    half = {label: group[::2] for label, group in groups.items()}
    with tqdm(total=4, desc="floor", unit="part", leave=False) as bar:
        of_set, errors = _over_classes(groups, groups, sigmas)
        bar.update()
        of_half, _ = _over_classes(half, half, sigmas)
        bar.update()
        bound = np.minimum(_over_classes(groups, held_out, sigmas)[0], _linear(groups, held_out, sigmas))
        bar.update()
        exact = _of_density(data, sigmas, is_labelled=len(groups) > 1)
        bar.update()
    return Floor(
        name=data.name,
        num_images=len(images),
        num_in_set=data.num_images,
        starts=starts,
        of_set=by_bin(of_set),
        errors=by_bin(errors),
        of_half=by_bin(of_half),
        upper_bound=by_bin(bound),
        exact=None if exact is None else by_bin(exact),
    )


def _by_class(batch: Any, data: TrainingData, with_mirrored: bool = True) -> dict[int, torch.Tensor]:
    """The images of each class as float64 rows, mirrored ones too where training mirrors; one class without labels."""
    labels = batch.conditions.get(KEYWORD, torch.zeros(len(batch), dtype=torch.int64))
    images = batch.data.double()
    if with_mirrored and getattr(data.transform, "random_flip", False):
        images, labels = torch.cat([images, images.flip(-1)]), labels.repeat(2)
    return {int(label): images[labels == label].flatten(1) for label in labels.unique()}


def _shares(groups: Groups, queries: Groups) -> dict[int, float]:
    """The share of each class among the queries."""
    total = sum(len(own) for label, own in queries.items() if label in groups)
    return {label: len(own) / total for label, own in queries.items() if label in groups}


def _over_classes(groups: Groups, queries: Groups, sigmas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors of the posterior mean for queries of all classes, each over the images of its class; standard errors."""
    means, variances, shares = np.zeros(len(sigmas)), np.zeros(len(sigmas)), _shares(groups, queries)
    for label, share in shares.items():
        mean, error = floors.set_errors(groups[label], queries[label], sigmas, max(2, round(_QUERIES * share)))
        means += share * mean
        variances += (share * np.nan_to_num(error)) ** 2
    return means, np.sqrt(variances)


def _linear(groups: Groups, queries: Groups, sigmas: np.ndarray) -> np.ndarray:
    """The same of the linear prediction."""
    shares = _shares(groups, queries)
    parts = [share * floors.linear_errors(groups[label], queries[label], sigmas) for label, share in shares.items()]
    return np.sum(parts, axis=0)


def _of_density(data: TrainingData, sigmas: np.ndarray, is_labelled: bool) -> np.ndarray | None:
    log_prob = toy_log_prob(data.name) if data.name in TOY_DATASETS else None
    if log_prob is None or is_labelled:
        return None
    points = data.all_in_memory().data.double().numpy()
    low, high = points.min(axis=0), points.max(axis=0)
    return floors.density_errors(log_prob, low - 0.1 * (high - low), high + 0.1 * (high - low), sigmas)
