"""The registry of metrics: what each is called, how to read it, what it needs, and the function that computes it.

Runs, studies, cards and the README take all they know about a metric from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import LabError
from ..core.registered import Unusable, call_registered, note_registered, python_number
from ..core.registry import markdown_table
from ..core.signatures import checked

Of = Literal["samples", "run", "log"]
Better = Literal["smaller", "larger", "neither"]
ALL = 10**12


@dataclass(frozen=True)
class Metric:
    """
    A figure for a run at its end.

    Args:
        name (`str`): Its name in files and options.
        title (`str`): What it is, for people.
        function (`Callable` or `None`): For `of="samples"`, from real and generated samples to a number: both points
            `(num, dimension)`, or images `(num, height, width, channels)` in [0, 1].
            For `of="run"`, from an [`Evaluation`] to a number, or to several by name. `None` for `of="log"`. A number may
            be one of numpy's, or an array or a tensor of one.
        of (`str`): "samples" for a comparison of samples with data, which is made for held-out data in their place too;
            "run" for what needs the model, or more of the data; "log" for what validation logs over training.
        unit (`str`): Empty for none, or that of the data.
        better (`str`): "smaller", "larger", or "neither" where a difference is no merit.
        form (`str`, *optional*): The form of data that has it (`form` of a kind); any form if not given.
        needs (`tuple` of `str`): Some of "samples", "held_out", "ema", "density", "features", "factors",
            "labels".
        is_loss (`bool`): It depends on target, noise schedule and data: runs that differ in these cannot be compared by it.
        on_request (`bool`): Computed only for those who name it, as it takes long.
        fewest_samples (`int`): For those who name no metrics, it is computed only where at least so many samples are
            measured: after a long run.
        on_hub (`bool`): Part of the results that a model card declares to the Hub.
        card_title (`str`, *optional*): What cards call it, if not by its label.
        source (`str`): The paper or formula that it comes from.
        besides (`dict`): Other figures that the function gives, by the end of their name, and what cards call them.
        notes (`tuple` of `str`): Names of texts that the function gives beside its figures.
        num_real (`int`, *optional*): Real samples that the function gets at most; as many as generated ones if not given.
        num_generated (`int`, *optional*): Generated samples likewise; all if not given.
        equal_sizes (`bool`): The function gets equally many of both.
        most_dimensions (`int`, *optional*): Of samples, if the function is for few.
        part (`Callable`, *optional*): For `of="run"`, what forecasts of time measure in the function's place: it computes
            a small part of the metric from an [`Evaluation`] without samples, and returns how many times as long all takes.
    """

    name: str
    title: str
    function: Callable[..., Any] | None
    of: Of = "samples"
    unit: str = ""
    better: Better = "smaller"
    form: str | None = None
    needs: tuple[str, ...] = ()
    is_loss: bool = False
    on_request: bool = False
    fewest_samples: int = 0
    on_hub: bool = False
    card_title: str | None = None
    source: str = ""
    besides: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_real: int | None = None
    num_generated: int | None = None
    equal_sizes: bool = False
    most_dimensions: int | None = None
    part: Callable[..., float] | None = None

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
        traits (`tuple` of `str`): Fields of [`Metric`] that are true: "on_hub", "is_loss", "on_request", "equal_sizes".
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
    needing = (
        metric
        for metric in METRICS.values()
        if {"samples", "features", "factors", "labels"} & {*metric.needs} == {"samples"}
    )
    return any(metric.form in (None, form) and not metric.on_request for metric in needing)


def metric_label(name: str) -> str:
    """A metric for people."""
    return METRICS[name].label if name in METRICS else name.replace("_", " ")


def better_of(name: str) -> Better:
    """Which values of a metric are better; smaller ones unless it is registered otherwise."""
    return METRICS[name].better if name in METRICS else "smaller"


def word_for(diff: float, metric: str) -> str:
    """A difference in a word: "better" or "worse", "higher" or "lower" where it is no merit."""
    better = better_of(metric)
    if better == "neither":
        return "higher" if diff > 0 else "lower"
    return "better" if (diff > 0) == (better == "larger") else "worse"


def metrics_table() -> str:
    """All metrics as a markdown table."""
    rows = [(f"`{m.name}`", m.label, m.better, m.form or "all data") for m in METRICS.values()]
    return markdown_table(("metric", "what it is", "better", "of"), rows)
