"""The hand-written part of each schedule's function for diffusers; its signature and docstring are generated.

The code computes `decay`, which is 1 when warmup ends, from `math` and the function's arguments, in 119 columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import Any


@dataclass(frozen=True)
class FunctionBody:
    """The statements of a schedule's function in diffusers."""

    rate: str  # the learning rate after warmup: "Create a schedule with a learning rate that ..."
    decay: str  # statements of `lr_lambda` that set `decay` from `current_step`
    setup: str = ""  # statements before `lr_lambda`: derived arguments and checks
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields of a [`Parameter`] that differ, by name
    examples: tuple[Mapping[str, Any], ...] = ()  # arguments for the generated tests, besides the defaults
    refused: Mapping[str, Any] = field(default_factory=dict)  # arguments that raise a `ValueError`, one test for each


def block(text: str, depth: int) -> str:
    """Code indented by `depth` levels, without blank lines around it."""
    return indent(dedent(text).strip("\n"), "    " * depth)


BODIES = {
    "warmup_stable_decay": FunctionBody(
        rate="stays at the initial lr set in the optimizer and then decreases to `min_lr_ratio` times it",
        setup="""
            decay_types = ("linear", "cosine", "exponential", "1-sqrt", "square", "mirror_cosine")
            if decay_type not in decay_types:
                raise ValueError(f"decay_type ({decay_type}) must be one of {decay_types}")

            num_steps = num_training_steps - num_warmup_steps
            if num_decay_steps is None and num_stable_steps is None:
                num_decay_steps = min(num_steps, max(1, round(0.2 * num_training_steps)))
            if num_decay_steps is None:
                num_decay_steps = num_steps - num_stable_steps
            if num_stable_steps is None:
                num_stable_steps = num_steps - num_decay_steps
            if min(num_stable_steps, num_decay_steps) < 0 or num_stable_steps + num_decay_steps > num_steps:
                raise ValueError(
                    f"num_stable_steps ({num_stable_steps}) and num_decay_steps ({num_decay_steps}) must fit in the "
                    f"{num_steps} steps after warmup"
                )
        """,
        decay="""
            progress = float(current_step - num_warmup_steps - num_stable_steps) / float(max(1, num_decay_steps))
            progress = max(0.0, progress)
            if progress >= 1.0:
                return min_lr_ratio
            if decay_type == "linear":
                decay = 1.0 - progress
            elif decay_type == "cosine":
                decay = 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress))
            elif decay_type == "exponential":
                decay = (0.01**progress - 0.01) / 0.99
            elif decay_type == "1-sqrt":
                decay = 1.0 - math.sqrt(progress)
            elif decay_type == "square":
                decay = 1.0 - progress**2
            else:
                decay = 2.0 * (1.0 - progress) - 0.5 * (1.0 + math.cos(math.pi * progress))
        """,
        # diffusers counts in steps everywhere; fractions of a run are the lab's.
        changes={
            "num_decay_steps": {
                "kind": int,
                "help": "updates of the cool-down; derived: what `num_stable_steps` leaves, or a fifth of the run",
            },
            "num_stable_steps": {"kind": int, "help": "updates at the peak; derived: what `num_decay_steps` leaves"},
        },
        examples=(
            *(
                {"decay_type": decay, "num_decay_steps": 6}
                for decay in ("linear", "exponential", "1-sqrt", "square", "mirror_cosine")
            ),
            {"num_stable_steps": 2, "num_decay_steps": 5, "num_cycles": 1.0, "min_lr_ratio": 0.1},
        ),
        refused={"decay_type": "cubic", "num_decay_steps": 9},
    ),
    "rex": FunctionBody(
        rate="decreases slowly at first and ever more steeply towards the end of training, from the initial lr set in the "
        "optimizer to `min_lr_ratio` times it",
        setup="""
            if not 0.0 <= d < 1.0:
                raise ValueError(f"d ({d}) must be at least 0 and smaller than 1")
        """,
        decay="""
            progress = float(current_step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
            remaining = max(0.0, 1.0 - progress)
            decay = remaining / ((1.0 - d) + d * remaining)
        """,
        changes={"d": {"help": "shape of the decay: 0 is linear, towards 1 the lr stays up longer and falls later"}},
        examples=({"d": 0.9, "min_lr_ratio": 0.1}, {"d": 0.0}),
        refused={"d": 1.0},
    ),
    "inverse_sqrt": FunctionBody(
        rate="decreases with the inverse square root of the number of steps, from the initial lr set in the optimizer "
        "towards `min_lr_ratio` times it",
        setup="""
            if timescale is None:
                timescale = num_warmup_steps or 10000
        """,
        decay="""
            steps_after_warmup = min(current_step, num_training_steps) - num_warmup_steps
            decay = math.sqrt(timescale / (timescale + steps_after_warmup))
        """,
        changes={
            "timescale": {
                "help": "time scale of the decay, in updates; derived: `num_warmup_steps`, or 10000 without warm-up"
            }
        },
        examples=({"timescale": 4, "min_lr_ratio": 0.1},),
    ),
    "cosine_with_min_lr": FunctionBody(
        rate="decreases following the values of the cosine function from the initial lr set in the optimizer to "
        "`min_lr_ratio` times it",
        decay="""
            progress = float(current_step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
            decay = 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * min(1.0, progress)))
        """,
        examples=({"min_lr_ratio": 0.0}, {"num_cycles": 1.5, "min_lr_ratio": 0.2}),
    ),
    "step": FunctionBody(
        rate="decreases from the initial lr set in the optimizer towards `min_lr_ratio` times it, by a factor of `gamma` "
        "every `step_size` steps",
        setup="""
            if step_size is None:
                step_size = max(1, math.ceil((num_training_steps - num_warmup_steps) / 3))
        """,
        decay="""
            steps_after_warmup = min(current_step, num_training_steps) - num_warmup_steps
            decay = gamma ** (steps_after_warmup // step_size)
        """,
        examples=({"step_size": 2, "gamma": 0.5, "min_lr_ratio": 0.1},),
    ),
    "exponential": FunctionBody(
        rate="decreases from the initial lr set in the optimizer towards `min_lr_ratio` times it, by a factor of `gamma` "
        "at every step",
        setup="""
            if gamma is None:
                gamma = 0.01 ** (1 / max(1, num_training_steps - num_warmup_steps))
        """,
        decay="""
            steps_after_warmup = min(current_step, num_training_steps) - num_warmup_steps
            decay = gamma**steps_after_warmup
        """,
        examples=({"gamma": 0.5, "min_lr_ratio": 0.1},),
    ),
    "trapezoid": FunctionBody(
        rate="stays at the initial lr set in the optimizer and then decreases linearly to `min_lr_ratio` times it",
        setup="""
            num_steps = num_training_steps - num_warmup_steps
            if num_decay_steps is None:
                num_decay_steps = min(num_steps, max(1, round(0.2 * num_training_steps)))
            if not 0 <= num_decay_steps <= num_steps:
                raise ValueError(f"num_decay_steps ({num_decay_steps}) must fit in the {num_steps} steps after warmup")
        """,
        decay="""
            progress = float(current_step - (num_training_steps - num_decay_steps)) / float(max(1, num_decay_steps))
            decay = 1.0 - min(1.0, max(0.0, progress))
        """,
        changes={"num_decay_steps": {"kind": int, "help": "updates of the cool-down; derived: a fifth of the run"}},
        examples=({"num_decay_steps": 6, "min_lr_ratio": 0.1},),
        refused={"num_decay_steps": 9},
    ),
}
