"""Schedules as values: `rex(d=0.9)` is its spec string, `"rex:d=0.9"`, and a function of the clock."""

import inspect
from collections.abc import Callable
from typing import Any

from typing_extensions import Self
from yaml.representer import SafeRepresenter

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.signatures import checked, refusal
from ..core.spec import format_spec
from .functions import own_parameters
from .joined import parts_of_join
from .registries import SCHEDULERS
from .resolve import resolve_schedule
from .schedule import Schedule


class Curve(str):
    """
    A learning-rate schedule as a value: a spec string that is also a function of the clock.

    It can be used wherever a spec string can, such as in [`get_scheduler`], [`lr_curve`] and [`TrainingConfig`], with the
    same curve and the same record. `diffusers_lrlab.schedules` has a function of the same name for each schedule;
    `Curve("rex:d=0.9")` takes a spec string.

    ```python
    >>> import numpy as np
    >>> from diffusers_lrlab import Curve, Progress
    >>> from diffusers_lrlab.schedules import constant, join, rex
    >>> rex(d=0.9)
    'rex:d=0.9'
    >>> rex(d=0.9) == Curve("rex:d=0.9")
    True
    >>> schedule = join([constant(), rex(d=0.9)], boundaries=[0.5])
    >>> schedule
    'join:{"schedules": ["constant", "rex:d=0.9"], "boundaries": [0.5]}'
    >>> schedule(Progress(np.array([0, 50, 75, 90, 99]), total_updates=100)).round(4).tolist()
    [1.0, 1.0, 0.9091, 0.7143, 0.1695]
    >>> rex(d=0.9)(Progress(5, total_updates=100, warmup_updates=10), lr=1e-3)
    0.0005

    ```

    Raises:
        LabError: for an unknown name or parameter, a value out of range, or a schedule that follows a metric or also sets
            the momentum.
    """

    schedule: Schedule  # with all its parameters

    def __new__(cls, spec: str) -> Self:
        if not isinstance(spec, str):
            raise refusal("Curve()", "spec", spec, str, "give a name or a spec string, such as 'rex:d=0.9'")
        curve = super().__new__(cls, spec)
        curve.schedule = resolve_schedule(spec)
        if why := curve.schedule.more_than_a_curve:
            raise LabError(
                f"{spec!r} is not a function of the clock alone: it {why}. Give its spec string to get_scheduler."
            )
        if curve.schedule.name == "join":
            parts_of_join(**{name: curve.schedule.kwargs[name] for name in ("schedules", "boundaries", "scales")})
        return curve

    @checked
    def __call__(self, progress: Progress, lr: float = 1.0) -> Any:
        """
        The learning rate at a reading of the clock, float64.

        Args:
            progress ([`Progress`]): The clock; the result is an array if its update is one.
            lr (`float`, *optional*, defaults to 1.0): The learning rate of the optimizer; 1 gives the factor on it.
        """
        return self.schedule.at(progress, lr)[0]


SafeRepresenter.add_representer(Curve, SafeRepresenter.represent_str)  # specifications of studies are saved as YAML


def maker(name: str) -> Callable[..., Curve]:
    """The function that makes values of a schedule from its parameters; an `AttributeError` for an unknown name."""
    try:
        entry = SCHEDULERS[name]
    except LabError as error:
        raise AttributeError(str(error)) from None
    signature = inspect.Signature(own_parameters(entry), return_annotation=Curve)

    def make(*args: Any, **kwargs: Any) -> Curve:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise LabError(f"{name}(): {error}. Known: {', '.join(signature.parameters)}.") from None
        return Curve(format_spec(name, given))

    make.__name__, make.__module__ = name, "diffusers_lrlab.schedules"
    make.__doc__ = f"A [`Curve`]: {entry.description}. The parameters are those of `get_{name}_schedule`."
    make.__signature__ = signature  # type: ignore[attr-defined]
    return checked(make)
