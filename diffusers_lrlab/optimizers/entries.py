"""The registry of optimizers. An optional package is required only if one of its optimizers is chosen."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.plugins import unusable
from ..core.registry import Parameter, Registry
from .timescales import BETA2_HALF_LIFE, IMAGES, TAU

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _check_optimizer(value: Any, *_: Any) -> Any:
    from torch.optim import Optimizer

    if not isinstance(value, Optimizer):
        raise unusable("a torch.optim.Optimizer", value)
    return value


OPTIMIZERS = Registry(
    "optimizer",
    traits={
        "adam": "takes the options for Adam, such as `--adam_beta1`",
        "sgd": "takes steps in proportion to the gradient",
        "decoupled": "shrinks weights by the learning rate times `weight_decay` at each update, apart from the gradient",
        "averages": "averages the weights itself, and has `train()` and `eval()`",
        "named": "is given its parameters as pairs `(name, parameter)` where their names are known",
        "width_rule": "takes `--width_base`: its step size does not depend on that of gradients; weight decay is decoupled",
    },
    shown_facts={"state_bytes": "state, bytes per parameter"},
    returns=_check_optimizer,
)
"""
Entries are functions `f(params, lr, **parameters) -> Optimizer`.

Facts: `state_bytes`, per parameter in float32; `package`, which must be installed; `torch`, its oldest version;
`learning_rate`, the default, or `learning_rate_factor`, a factor on the default for AdamW.
"""

register_optimizer = OPTIMIZERS.register
"""Registers such a function, with the arguments of [`Registry.register`]."""

_BETA2 = Parameter("beta2", float, 0.999, "decay of the mean of squared gradients", "[0, 1)")
_EPS = Parameter("eps", float, 1e-8, "added to the root of that mean", "(0, inf)")
_SQUARES_IN_IMAGES = (BETA2_HALF_LIFE, IMAGES)
_ALL_IN_IMAGES = (BETA2_HALF_LIFE, TAU, IMAGES)
_TORCH = "torch.optim"


def _beta1(default: float | None = 0.9, help: str = "decay of the mean of gradients") -> Parameter:
    return Parameter("beta1", float, default, help, "[0, 1)")


def _weight_decay(default: float = 0.0, decoupled: bool = True) -> Parameter:
    help = "weight decay, decoupled from the gradient" if decoupled else "L2 penalty, added to the gradient"
    return Parameter("weight_decay", float, default, help, "[0, inf)")


def _made_by(path: str, can_fuse: bool = False, **fixed: Any) -> Callable[..., Optimizer]:
    """A factory for a class "module:Class", imported on use, with these further arguments."""

    def make(params: list[Any], lr: float, **kwargs: Any) -> Optimizer:
        if "beta2" in kwargs:
            kwargs["betas"] = (kwargs.pop("beta1"), kwargs.pop("beta2"))
        if can_fuse:
            groups = (each["params"] if isinstance(each, dict) else [each] for each in params)
            kwargs["fused"] = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group)
        return pkgutil.resolve_name(path)(params, lr=lr, **fixed, **kwargs)

    return make


OPTIMIZERS.register(
    "adamw",
    description="Adam with decoupled weight decay",
    source=f"{_TORCH}.AdamW; arXiv 1711.05101",
    parameters=(_beta1(), _BETA2, _EPS, _weight_decay(0.01), *_ALL_IN_IMAGES),
    traits=("adam", "decoupled", "width_rule"),
    facts={"state_bytes": 8},
)(_made_by("torch.optim:AdamW", can_fuse=True))

OPTIMIZERS.register(
    "adam",
    description="Adam",
    source=f"{_TORCH}.Adam; arXiv 1412.6980",
    parameters=(_beta1(), _BETA2, _EPS, _weight_decay(decoupled=False), *_SQUARES_IN_IMAGES),
    traits=("adam",),
    facts={"state_bytes": 8},
)(_made_by("torch.optim:Adam", can_fuse=True))

_MOMENTUM = Parameter("momentum", float, 0.9, "decay of the sum of gradients", "[0, 1)")

OPTIMIZERS.register(
    "sgd",
    description="SGD with momentum; needs a schedule and a much larger rate than Adam",
    source=f"{_TORCH}.SGD",
    parameters=(_MOMENTUM, _weight_decay(decoupled=False)),
    traits=("sgd",),
    facts={"state_bytes": 4, "learning_rate_factor": 100},
)(_made_by("torch.optim:SGD", can_fuse=True))

OPTIMIZERS.register(
    "nesterov",
    description="SGD with Nesterov's momentum",
    source=f"{_TORCH}.SGD",
    parameters=(replace(_MOMENTUM, range="(0, 1)"), _weight_decay(decoupled=False)),
    traits=("sgd",),
    facts={"state_bytes": 4, "learning_rate_factor": 100},
)(_made_by("torch.optim:SGD", can_fuse=True, nesterov=True))

OPTIMIZERS.register(
    "rmsprop",
    description="gradients divided by their root mean square; half of Adam's memory",
    source=f"{_TORCH}.RMSprop",
    parameters=(
        Parameter("alpha", float, 0.99, "decay of the mean of squared gradients", "[0, 1)"),
        _EPS,
        Parameter("momentum", float, 0.0, "decay of the sum of scaled gradients; doubles the memory", "[0, 1)"),
        _weight_decay(decoupled=False),
    ),
    facts={"state_bytes": 4},
)(_made_by("torch.optim:RMSprop"))

OPTIMIZERS.register(
    "adafactor",
    description=(
        "Adam with mean squared gradients kept by row and column; 2.7 bytes per parameter of 3x3 kernels, almost none for "
        "matrices"
    ),
    source="transformers.optimization.Adafactor; arXiv 1804.04235",
    parameters=(
        _beta1(None, "decay of the mean of gradients; none, and no memory for it, if not given"),
        Parameter("clip_threshold", float, 1.0, "largest root mean square of an update", "(0, inf)"),
        Parameter("decay_rate", float, -0.8, "exponent of the decay of the mean of squares", "(-1, 0)"),
        Parameter("scale_parameter", bool, False, "scale the rate by the size of the weights"),
        _weight_decay(),
    ),
    facts={"state_bytes": 0, "package": "transformers"},
)(_made_by("transformers.optimization:Adafactor", relative_step=False, warmup_init=False))

OPTIMIZERS.register(
    "lion",
    description="the sign of a mean of gradients; half of Adam's memory, a tenth to a third of its rate",
    source="lion-pytorch; arXiv 2302.06675",
    parameters=(
        _beta1(0.9, "weight of the mean of gradients against the newest gradient"),
        Parameter("beta2", float, 0.99, "decay of the mean of gradients", "[0, 1)"),
        _weight_decay(),
        TAU,
        IMAGES,
    ),
    traits=("decoupled", "width_rule"),
    facts={"state_bytes": 4, "package": "lion-pytorch", "learning_rate_factor": 0.2},
)(_made_by("lion_pytorch:Lion"))

OPTIMIZERS.register(
    "muon",
    description="orthogonalised momentum for matrices and convolutions of hidden layers, AdamW for the rest",
    source=f"{_TORCH}.Muon; arXiv 2502.16982 for the common rate, 2608.02502 for the blocks",
    parameters=(
        Parameter("momentum", float, 0.95, "decay of the mean of gradients of matrices", "(0, 1)"),
        _beta1(0.9, "AdamW's"),
        Parameter("beta2", float, 0.999, "AdamW's", "[0, 1)"),
        _weight_decay(0.01),
        Parameter("chunks", bool, True, "orthogonalise each block of a fused projection separately"),
        Parameter("hidden", list, (), "patterns of names to orthogonalise, in any layer", items=str),
        Parameter("adamw", list, (), "patterns of names for AdamW to train", items=str),
        *_ALL_IN_IMAGES,
    ),
    traits=("decoupled", "named"),
    facts={"state_bytes": 4, "torch": "2.9"},
)(_made_by("diffusers_lrlab.optimizers.muon:MuonWithAdamW"))


@OPTIMIZERS.register(
    "schedulefree_adamw",
    description="AdamW that averages the weights instead of lowering the rate; takes no schedule but warm-up, and no EMA",
    source="schedulefree; arXiv 2405.15682",
    parameters=(
        _beta1(0.9, "weight of the averaged weights in the point where gradients are taken"),
        _BETA2,
        _EPS,
        _weight_decay(),
        *_SQUARES_IN_IMAGES,
    ),
    traits=("averages",),
    facts={"state_bytes": 8, "package": "schedulefree"},
)
def schedulefree_adamw(params: list[Any], lr: float, **kwargs: Any) -> Optimizer:
    """In train mode; call `eval()` before the weights are evaluated."""
    optimizer: Any = _made_by("schedulefree:AdamWScheduleFree")(params, lr, **kwargs)
    optimizer.train()
    return optimizer


OPTIMIZERS.register(
    "prodigy",
    description="Adam that finds its rate by itself; the learning rate multiplies it and stays at 1",
    source="prodigyopt; arXiv 2306.06101",
    parameters=(
        _beta1(),
        _BETA2,
        _EPS,
        _weight_decay(),
        Parameter("d_coef", float, 1.0, "factor on the rate that it finds", "(0, inf)"),
        Parameter("safeguard_warmup", bool, True, "do not mistake the low rate of warm-up for a small distance"),
        *_SQUARES_IN_IMAGES,
    ),
    facts={"state_bytes": 16, "package": "prodigyopt", "learning_rate": 1.0},
)(_made_by("prodigyopt:Prodigy"))

OPTIMIZERS.register(
    "adamw_8bit",
    description="AdamW with its state in 8 bits",
    source="bitsandbytes; arXiv 2110.02861",
    parameters=(_beta1(), _BETA2, _EPS, _weight_decay(0.01), *_ALL_IN_IMAGES),
    traits=("adam", "decoupled", "width_rule"),
    facts={"state_bytes": 2, "package": "bitsandbytes"},
)(_made_by("bitsandbytes.optim:AdamW8bit"))  # tensors of fewer than 4096 numbers stay in 32 bits
