"""The registry of metrics: what each is called, how to read it, what it needs, the function that computes it, its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.errors import LabError
from ..core.plugins import Unusable, call_registered, note_registered, python_number
from ..core.values import checked

if TYPE_CHECKING:  # a typing error does not wait for torch
    import torch

    from ..data.batch import Batch

Of = Literal["samples", "run", "log"]
Better = Literal["smaller", "larger", "neither"]
ALL = 10**12
MOST_REAL = 100_000  # samples of a stream, or of data that are not in memory, to compare with
NEIGHBOUR = 5  # k of the nearest-neighbour estimates, as in the study
FEATURES_OF_DECODED = "features of decoded latents"  # key of `TrainingData.known`, provided by results of latents


@dataclass(frozen=True)
class Metric:
    """A figure for a run at its end."""

    name: str  # in files and options
    title: str  # for people
    # For "samples", from real and generated samples to a number: both points `(num, dimension)`, or images `(num, height,
    # width, channels)` in [0, 1]. For "run", from an [`Evaluation`] to a number, or to several by name. `None` for "log".
    function: Callable[..., Any] | None
    # "samples" compares samples with data, and held-out data in their place too; "run" needs the model, or more of the data;
    # "log" is what validation logs over training.
    of: Of = "samples"
    unit: str = ""  # empty for none, or that of the data
    better: Better = "smaller"  # "neither" where a difference is no merit
    form: str | None = None  # of the data that have it (`form` of a kind); any form if `None`
    needs: tuple[str, ...] = ()  # some of "samples", "held_out", "ema", "density", "features", "labels"
    is_loss: bool = False  # runs that differ in target, noise schedule or data cannot be compared by it
    fewest_samples: int = 0  # unless it is named, it is computed only if this many samples are measured: after a long run
    on_hub: bool = False  # part of the results that a model card declares to the Hub
    hub_type: str = ""  # its name at huggingface.co/metrics, if it has one there; the Hub can only compare those
    card_title: str | None = None  # in cards, if not the label
    source: str = ""  # the paper or formula
    besides: Mapping[str, str] = field(default_factory=dict)  # other figures of the function: end of the name, name in cards
    notes: tuple[str, ...] = ()  # names of texts that the function returns beside its figures
    num_real: int | None = None  # most real samples for the function; as many as generated ones if `None`
    num_generated: int | None = None  # most generated samples; all if `None`

    def __call__(self, *args: Any) -> dict[str, Any]:
        """Its figures by name, as Python's own numbers, and its notes; a `LabError` that names a function with others."""
        return call_registered("metric", self.name, self.function, self._figures, "", args, {})

    def _figures(self, value: Any, *_: Any) -> dict[str, Any]:
        if self.of == "samples" or not isinstance(value, Mapping):
            return {self.name: python_number(value, "a number" + (" or a dict of numbers" if self.of == "run" else ""))}
        figures = {}
        for name, figure in value.items():
            if not isinstance(name, str) or (name != self.name and name in METRICS):
                raise Unusable(f"must return figures under names of its own, not under {name!r}")
            is_note = name in self.notes and isinstance(figure, str)
            figures[name] = figure if is_note else python_number(figure, f"a number as {name!r}")
        return figures

    def sizes(self, num_real: int, num_generated: int) -> tuple[int, int]:
        """How many of these real and generated samples it compares."""
        num_generated = min(num_generated, self.num_generated or num_generated)
        return min(num_real, self.num_real or num_generated), num_generated

    @property
    def label(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def card_label(self) -> str:
        return self.card_title or self.label


METRICS: dict[str, Metric] = {}


@checked
def register_metric(
    name: str, *, description: str, source: str, traits: tuple[str, ...] = (), facts: Mapping[str, Any] | None = None
) -> Callable[[Any], Any]:
    """
    A decorator that registers a function as a metric, with the arguments of [`Registry.register`].

    ```python
    facts = {"form": "points", "better": "neither"}

    @register_metric("spread", description="Largest standard deviation of a coordinate", source="own", facts=facts)
    def spread(real, generated):
        return float(generated.std(axis=0).max())
    ```

    Args:
        name (`str`): Its name in files and options.
        description (`str`): Its title.
        source (`str`): The paper or formula that it comes from.
        traits (`tuple` of `str`): Fields of [`Metric`] that are true: "on_hub", "is_loss".
        facts (`dict`, *optional*): Its other fields, with their values.
    """
    about = dict.fromkeys(traits, True) | dict(facts or {})
    if unknown := sorted(about.keys() - Metric.__dataclass_fields__.keys()):
        raise LabError(f"The metric {name!r} got {unknown[0]!r}, which is no trait or fact of a metric. Leave it out.")
    if about.get("of", "samples") == "samples":
        about["needs"] = tuple(dict.fromkeys(("samples", *about.get("needs", ()))))

    def decorator(function: Any) -> Any:
        if name in METRICS:
            raise LabError(f"The metric {name!r} is already registered; choose another name.")
        note_registered("metric", name, function)
        METRICS[name] = Metric(name, description, function, source=source, **about)
        return function

    return decorator


def measures_samples(form: str) -> bool:
    """Whether some metric is computed from samples of such data at the end of every run, wherever the data are from."""
    needing = (metric for metric in METRICS.values() if {"samples", "features", "labels"} & {*metric.needs} == {"samples"})
    return any(metric.form in (None, form) for metric in needing)


def metric_label(name: str) -> str:
    """A metric for people."""
    return METRICS[name].label if name in METRICS else name.replace("_", " ")


def better_of(name: str) -> Better:
    """Which values of a metric are better; smaller ones unless it is registered otherwise."""
    return METRICS[name].better if name in METRICS else "smaller"


def word_for(diff: float, metric: str) -> str:
    """A difference in a word: "better" or "worse", "higher" or "lower" where neither is better."""
    better = better_of(metric)
    if better == "neither":
        return "higher" if diff > 0 else "lower"
    return "better" if (diff > 0) == (better == "larger") else "worse"


class Evaluation:
    """Input of metrics of a run: the trained [`RunState`], and samples of its averaged weights if any were drawn."""

    def __init__(self, run: Any, samples: np.ndarray | None):
        self.run = run
        self.samples = np.empty(0) if samples is None else samples  # metrics that need some are not asked without

    def some_real(self, num: int) -> Batch:
        """The first of these images with their conditions; no others are decoded."""
        data = self.run.data
        return data.random_sample(len(data.in_memory) if data.in_memory is not None else num, MOST_REAL)

    @property
    def samples_as_data(self) -> torch.Tensor:
        """Images `(num, height, width, channels)` in [0, 1] as the tensors of training."""
        import torch

        return torch.from_numpy(self.samples).permute(0, 3, 1, 2) * 2 - 1

    @property
    def held_out(self) -> np.ndarray:
        return self.run.data.held_out.data.numpy()


# --- what validation logs, and no function computes ---------------------------------------------------------------------

for _name, _weights, _where, _needs in (
    ("validation_loss_ema", "EMA weights", " (the ones saved)", ("held_out", "ema")),
    ("validation_loss", "raw weights", "", ("held_out",)),
):
    register_metric(
        _name,
        description=f"Loss of the {_weights} on held-out data",
        source="the objective of the run",
        traits=("is_loss", "on_hub"),
        facts={"of": "log", "hub_type": "mse", "card_title": f"Validation loss, {_weights}{_where}", "needs": _needs},
    )(None)
