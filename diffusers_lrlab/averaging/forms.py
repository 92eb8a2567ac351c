"""How fast an exponential moving average forgets: its decay as a function of the updates done, by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import Self

from ..core.errors import LabError, must_be
from ..core.plugins import Unusable, real_values
from ..core.registry import Parameter, Registry
from ..core.spec import format_spec, resolve_spec


def _check_decay(value: Any, since: Any, *_: Any) -> Any:
    if type(value) in (float, np.float64) and 0 <= value <= 1:
        return value
    wanted = "decays in [0, 1], one for each update" if np.ndim(since) else "a decay in [0, 1]"
    decay = real_values(value, wanted, (), np.shape(since))
    if not np.all((0 <= decay) & (decay <= 1)):
        raise Unusable(f"must return {wanted}, not {np.array2string(np.asarray(decay), threshold=5)}")
    return decay


EMA_FORMS = Registry(
    "EMA form",
    returns=_check_decay,
    common=(
        Parameter("start_update", int, 0, "optimizer updates during which the average is a copy of the weights", "[0, 1e9]"),
        Parameter("update_every", int, 1, "optimizer updates from one update of the average to the next", "[1, 1e9]"),
    ),
)
"""
Entries are functions `f(since, every, **parameters) -> decay`. `since` counts the updates since the average began, without
the one that was just done; `every` is the number of updates from one update of the average to the next. Both may be arrays.
"""


@EMA_FORMS.register(
    "warmup_power",
    description="1 - (1 + n / inv_gamma)^-power after n updates, as diffusers' EMAModel",
    source="diffusers.training_utils.EMAModel",
    parameters=(
        Parameter("inv_gamma", float, 1.0, "time scale of the warm-up, in updates", "(0, 1e9]"),
        Parameter("power", float, 3 / 4, "power of the warm-up", "[0, 1e9]"),
        Parameter("max_decay", float, 0.9999, "the decay does not rise above this", "[0, 1)"),
        Parameter("min_decay", float, 0.0, "the decay does not fall below this, after the first update", "[0, 1)"),
        Parameter("update_after_step", int, None, "diffusers' name of start_update", "[0, 1e9]", same_as="start_update"),
    ),
)
def warmup_power(
    since: Any, every: int, inv_gamma: float, power: float, max_decay: float, min_decay: float
) -> np.ndarray | float:
    r"""\(d_n = 1 - (1 + n / g)^{-k}\), \(g\) being `inv_gamma` and \(k\) `power`."""
    if min_decay > max_decay:
        raise LabError(f"min_decay={min_decay:g} of 'warmup_power' is above max_decay={max_decay:g}. Lower it.")
    return np.clip(1 - (1 + since / inv_gamma) ** -power, min_decay, max_decay)


@EMA_FORMS.register(
    "constant",
    description="the same decay at every update",
    source="–",
    parameters=(Parameter("decay", float, 0.999, "decay at each update of the average", "[0, 1)"),),
)
def constant(since: Any, every: int, decay: float) -> np.ndarray | float:
    r"""\(d_n = d\), \(d\) being `decay`."""
    return decay + 0.0 * since


@EMA_FORMS.register(
    "half_life",
    description="a half-life in images, independent of the batch size; early in the run, a share of the images so far",
    source="EDM, training_loop.py of github.com/NVlabs/edm; arXiv 2206.00364",
    parameters=(
        Parameter(
            "images", float, 500_000.0, "images after which the contribution of earlier weights is halved", "(0, 1e15]"
        ),
        Parameter("rampup", float, 0.05, "largest half-life as a share of the images so far; 1e9 for no limit", "(0, 1e9]"),
        Parameter(
            "images_per_update",
            int,
            None,
            "effective batch size; known in `lrlab train`, elsewhere required",
            "[1, 1e9]",
        ),
    ),
)
def half_life(since: Any, every: int, images: float, rampup: float, images_per_update: int | None) -> np.ndarray | float:
    r"""\(d_n = 2^{-B / \min(h, r n B)}\) with \(B\) images in an update, \(h\) being `images` and \(r\) `rampup`."""
    if images_per_update is None:
        raise LabError(
            f"'half_life' got images={images:g} without images_per_update. Add images_per_update=N (batch size x "
            "accumulation x processes)."
        )
    so_far = np.maximum(since, 0) * float(images_per_update)
    return 0.5 ** (every * images_per_update / np.maximum(np.minimum(images, rampup * so_far), 1e-8))


@EMA_FORMS.register(
    "power_function",
    description=(
        "(1 - 1/n)^(gamma + 1) at update n: update t has a weight of t^gamma, so the average widens as the run goes on"
    ),
    source="EDM2, arXiv 2312.02696, eqs. 123, 126 and 127",
    parameters=(
        Parameter("gamma", float, None, "power of the profile; in place of sigma_rel", "[0, 1e6]"),
        Parameter(
            "sigma_rel", float, None, "width of the profile as a share of the run; 0.1 if neither is given", "[1e-5, 0.2886]"
        ),
    ),
)
def power_function(since: Any, every: int, gamma: float | None, sigma_rel: float | None) -> np.ndarray | float:
    r"""\(d_n = (1 - 1 / (n + 1))^{\gamma + 1}\)."""
    if gamma is not None and sigma_rel is not None:
        raise LabError(
            f"'power_function' got gamma={gamma:g} and sigma_rel={sigma_rel:g}, two ways to set the same thing. Drop one."
        )
    power = gamma_of_width(0.1 if sigma_rel is None else sigma_rel) if gamma is None else gamma
    return (1 - np.minimum(every / (since + 1), 1.0)) ** (power + 1)


@EMA_FORMS.register(
    "posthoc",
    description="power_function averages and snapshots, from which `lrlab ema` makes an average of any width after the run",
    source="EDM2, arXiv 2312.02696, section 3",
    parameters=(
        Parameter(
            "sigma_rels",
            list,
            (0.05, 0.1),
            "widths of the profiles as shares of the run; the first one is used in the run",
            "[1e-5, 0.2886]",
        ),
        Parameter(
            "snapshots", int, 16, "number of snapshots, equally spaced over the run, each with all widths", "[1, 1e4]"
        ),
        Parameter("dtype", str, "float32", "precision of the snapshots", choices=("float32", "bf16")),
    ),
)
def posthoc(since: Any, every: int, sigma_rels: list[float], snapshots: int, dtype: str) -> np.ndarray | float:
    if not sigma_rels or len({*sigma_rels}) < len(sigma_rels):
        raise must_be("sigma_rels", sigma_rels, "one or more different widths", "[0.05|0.10] is usual", of="'posthoc'")
    return power_function(since, every, None, sigma_rels[0])


def gamma_of_width(sigma_rel: float) -> float:
    """The power of a profile t^gamma whose standard deviation is this share of the run: alg. 2 of EDM2."""
    inverse = sigma_rel**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return max(float(np.real(root)) for root in roots if abs(root.imag) < 1e-6)


@dataclass(frozen=True)
class EMAForm:
    """A form of EMA with all its parameters: the decay at each update of a run."""

    name: str
    kwargs: dict[str, Any]  # all of the entry's, the common ones among them

    @classmethod
    def of(cls, spec: str, **kwargs: Any) -> Self:
        """The form of a spec string, checked."""
        form = cls(*resolve_spec(spec, kwargs, EMA_FORMS))
        form.with_images(1)._of(1)  # what only its function can refuse
        return form

    def __str__(self) -> str:
        return format_spec(self.name, self.kwargs)

    @property
    def is_posthoc(self) -> bool:
        """Whether snapshots of it are taken."""
        return self.name == "posthoc"

    @property
    def tracks(self) -> list["EMAForm"]:
        """The averages that are run: one of each width for post-hoc averages, otherwise itself."""
        if not self.is_posthoc:
            return [self]
        common = {"start_update": self.kwargs["start_update"], "update_every": self.kwargs["update_every"]}
        return [EMAForm.of("power_function", sigma_rel=width, **common) for width in self.kwargs["sigma_rels"]]

    @property
    def update_every(self) -> int:
        return int(self.kwargs["update_every"])

    def without_snapshots(self, name: str, spec: str | None) -> "EMAForm":
        """Itself; a `LabError` for the option `name` if it needs snapshots."""
        if self.is_posthoc:
            hint = "power_function:sigma_rel=0.1 is an average of this kind; `lrlab train` takes snapshots"
            raise must_be(name, spec, "an average that needs no snapshots", hint)
        return self

    def with_images(self, images_per_update: int) -> "EMAForm":
        """The form with the number of images per update filled in, if it counts images and lacks that number."""
        if not self.lacks_images:
            return self
        return EMAForm(self.name, {**self.kwargs, "images_per_update": images_per_update})

    @property
    def lacks_images(self) -> bool:
        """Whether it counts images but lacks the number of images per update."""
        return self.kwargs.get("images_per_update", 1) is None

    def decay(self, update: int) -> float:
        """
        The decay at the average's update after this many updates of the weights: 0 at the first, which makes it a copy.
        """
        since = update - 1 - self.kwargs["start_update"]
        return float(self._of(since)) if since > 0 else 0.0

    def decays(self, num_updates: int) -> np.ndarray:
        """The decay after each update of a run, 1 where the average is not updated: float64 `(num_updates,)`."""
        update = np.arange(num_updates)
        since = np.maximum(update - self.kwargs["start_update"], 0)
        decays = np.where(since == 0, 0.0, self._of(since))
        return np.where((update + 1) % self.update_every == 0, decays, 1.0)

    def _of(self, since: Any) -> Any:
        own = {key: value for key, value in self.kwargs.items() if key not in ("start_update", "update_every")}
        return EMA_FORMS[self.name](since, self.update_every, **own)
