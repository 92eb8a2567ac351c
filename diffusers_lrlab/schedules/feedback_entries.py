"""Entries of the schedules that follow a metric. Their classes, in `feedback.py` and `greedy_lr.py`, need torch."""

from ..core.registry import Parameter
from .host_curves import TRANSFORMERS
from .registries import SCHEDULERS
from .torch_curves import TORCH

# Common parameters that do not apply to them.
_NO_SHAPE = ("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio")
_MODE = Parameter("mode", str, "min", "whether the metric should fall or rise", choices=("min", "max"))
_THRESHOLD_MODES = ("rel", "abs")

SCHEDULERS.register(
    "reduce_lr_on_plateau",
    description="multiplied by `factor` when the validation loss has stopped improving",
    source=f"{TORCH}.ReduceLROnPlateau",
    parameters=(
        _MODE,
        Parameter("factor", float, 0.1, "factor at each reduction", "(0, 1)"),
        Parameter("patience", int, 10, "validations without improvement before a reduction", "[0, inf)"),
        Parameter("threshold", float, 1e-4, "smallest change that counts as improvement", "[0, inf)"),
        Parameter("threshold_mode", str, "rel", "whether `threshold` is relative", choices=_THRESHOLD_MODES),
        Parameter("cooldown", int, 0, "validations ignored after a reduction", "[0, inf)"),
        Parameter("min_lr", float, 0.0, "floor of the learning rate", "[0, inf)"),
        Parameter("eps", float, 1e-8, "smaller changes of the learning rate are ignored", "[0, inf)"),
    ),
    without=_NO_SHAPE,
    traits=("feedback",),
)("diffusers_lrlab.schedules.feedback:PlateauWithWarmup")

SCHEDULERS.register(
    "greedy",
    description="divided by `factor` while the validation loss keeps improving, multiplied by it when it does not",
    source=f"{TRANSFORMERS}.GreedyLR; arXiv 2512.14527",
    parameters=(
        _MODE,
        Parameter("factor", float, 0.95, "factor of a step down; a step up divides by it", "(0, 1)"),
        Parameter("patience", int, 10, "consecutive validations of one kind before a step", "[0, inf)"),
        Parameter("threshold", float, 1e-6, "smallest change that counts as improvement", "[0, inf)"),
        Parameter("threshold_mode", str, "abs", "whether `threshold` is relative", choices=_THRESHOLD_MODES),
        Parameter("cooldown", int, 0, "validations ignored after a step down", "[0, inf)"),
        Parameter("warmup", int, 0, "validations ignored after a step up", "[0, inf)"),
        Parameter(
            "min_lr", float, None, "floor; derived: transformers' 1e-3, or a hundredth of the peak if that is lower",
            "[0, inf)",
        ),
        Parameter("max_lr", float, 1.0, "ceiling of the learning rate", "(0, inf)"),
        Parameter("eps", float, 1e-8, "smaller changes of the learning rate are ignored", "[0, inf)"),
        Parameter("smooth", bool, False, "judge the mean of the last `window_size` values instead of the last one"),
        Parameter("window_size", int, 50, "values in that mean", "[1, inf)"),
        Parameter("reset_start", int, 500, "steps down at the floor before it restarts at the peak", "[1, inf)"),
    ),
    without=_NO_SHAPE,
    traits=("feedback",),
)("diffusers_lrlab.schedules.greedy_lr:GreedyWithWarmup")  # fmt: skip

SCHEDULERS.register(
    "adaptive",
    description="raised slightly after each validation that improved, lowered strongly after one that worsened",
    source="the bold driver: Vogl et al., Biological Cybernetics 59 (1988); Battiti, Complex Systems 3 (1989)",
    parameters=(
        _MODE,
        Parameter("increase", float, 1.05, "factor after an improvement", "[1, inf)"),
        Parameter("decrease", float, 0.5, "factor after a deterioration", "(0, 1)"),
        Parameter("threshold", float, 0.01, "smaller relative changes are ignored as noise", "[0, 1)"),
        Parameter("min_lr_ratio", float, 0.01, "floor, relative to the optimizer's learning rate", "[0, 1]"),
        Parameter("max_lr_ratio", float, 4.0, "ceiling, relative to it", "[1, inf)"),
    ),
    without=_NO_SHAPE,
    traits=("feedback",),
)("diffusers_lrlab.schedules.feedback:BoldDriver")
