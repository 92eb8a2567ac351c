"""Options of optimizer, gradient clipping and EMA."""

from dataclasses import dataclass

from ..core.options import UPDATE, WHOLE_RUN, Need, option
from .learning_options import Kwargs, parameters_of

EMA = Need("--use_ema", lambda config: config.use_ema)
NO_EMA_SPEC = Need("--ema", lambda config: config.ema is None, is_absence=True)
EMA_PARAMETER = (EMA, NO_EMA_SPEC)
EMA_OPTIONS = ("inv_gamma", "power", "max_decay")  # --ema_*, parameters of warmup_power


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Parameters that control the optimizer, gradient clipping and EMA."""

    _argument_group_name = "optimizer, clipping and EMA"

    optimizer: str = option(
        "adamw", "Optimizer, as a name or spec string. Names: {names}.", UPDATE, registry="optimizers.entries:OPTIMIZERS"
    )
    optimizer_kwargs: Kwargs = parameters_of(
        "optimizer", UPDATE, ", such as '{\"momentum\": 0.95}'; `lrlab list optimizers` shows them"
    )
    adam_beta1: float = option(0.95, "beta1 of adamw, adam and adamw_8bit.", UPDATE, range="[0, 1)")
    adam_beta2: float = option(0.999, "beta2 of Adam and its relatives.", UPDATE, range="[0, 1)")
    adam_weight_decay: float = option(1e-6, "Weight decay of Adam and its relatives.", UPDATE, range="[0, 1e6]")
    adam_epsilon: float = option(1e-8, "Epsilon of Adam and its relatives.", UPDATE, range="(0, 1]")
    max_grad_norm: float = option(1.0, "Norm to which gradients are clipped; 0 for no clipping.", UPDATE, range="[0, 1e9]")
    skip_bad_updates: int | None = option(
        None,
        "Skip updates with non-finite gradients, at most this many in a row: weights, optimizer and EMA stay unchanged, "
        "while clock and data advance. Synchronizes the device at every update (default: off).",
        WHOLE_RUN,
        study="no",
        range="[1, 1e9]",
    )
    use_ema: bool = option(
        True,
        "Average the weights (exponential moving average) for samples and the saved model: raw weights sample worse. "
        "Off upstream.",
        WHOLE_RUN,
    )
    ema: str | None = option(
        None,
        "Decay of the EMA, as a name or spec string, instead of the --ema_* options (default: warmup_power with those "
        "options). Names: {names}.",
        WHOLE_RUN,
        registry="averaging.forms:EMA_FORMS",
        needs=(EMA,),
    )
    ema_inv_gamma: float = option(
        1.0, "Inverse gamma of the EMA's warm-up.", WHOLE_RUN, range="(0, 1e9]", needs=EMA_PARAMETER
    )
    ema_power: float = option(3 / 4, "Power of the EMA's warm-up.", WHOLE_RUN, range="[0, 1e9]", needs=EMA_PARAMETER)
    ema_max_decay: float = option(0.9999, "Largest decay of the EMA.", WHOLE_RUN, range="[0, 1)", needs=EMA_PARAMETER)
