"""Learning rates of their own for some parameters of a script that is not ours, by patterns of names (`--lr_groups`)."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch

from ...core.errors import LabError, must_be
from ...core.ranges import Range

LR_FACTOR = "lab_lr_factor"  # a key of groups of parameters, which are saved with the optimizer's state
_FACTOR = Range("[0, 1e6]")


def parse_lr_groups(text: str) -> dict[str, float]:
    """`"text_encoder*=0.1,*.bias=2"` as patterns and factors."""
    factors: dict[str, float] = {}
    for part in text.split(","):
        pattern, _, number = part.strip().rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not pattern or factor not in _FACTOR:
            wanted = f"PATTERN=FACTOR, with {_FACTOR} on the learning rate"
            raise must_be("--lr_groups", part, wanted, "write it as in 'text_encoder*=0.1,*.bias=2'")
        if pattern in factors:
            raise LabError(f"--lr_groups {text!r} has the pattern {pattern!r} twice. Drop one.")
        factors[pattern] = factor
    return factors


def as_groups(params: Any) -> list[dict[str, Any]]:
    """What an optimizer is given, parameters or groups of them, as groups with lists of parameters."""
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    as_lists = []
    for group in groups:
        held = group["params"]
        as_lists.append({**group, "params": [held] if isinstance(held, torch.Tensor) else list(held)})
    return as_lists


def split_groups(
    groups: list[dict[str, Any]], lr: float | None, factors: dict[str, float], names: dict[int, list[str]]
) -> list[dict[str, Any]]:
    """
    Each group once for each factor that some of its parameters have.

    `lr` is the learning rate of groups without one; `names` are those of [`parameter_names`].
    """
    _check_patterns([names.get(id(parameter), []) for group in groups for parameter in group["params"]], factors)
    split = []
    for group in groups:
        rate = group.get("lr", lr)
        if rate is None:
            raise LabError("--lr_groups: the script gives its optimizer no learning rate to multiply. Leave it out.")
        parts: dict[str | None, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(_pattern_of(names.get(id(parameter), []), factors), []).append(parameter)
        for pattern, parameters in parts.items():
            factor = 1.0 if pattern is None else factors[pattern]
            split.append({**group, "params": parameters, "lr": rate * factor, LR_FACTOR: factor})
    return split


def _check_patterns(trained: list[list[str]], factors: dict[str, float]) -> None:
    """Raises a `LabError` for a pattern without effect on the parameters that are trained, given by their names."""
    for pattern in factors:
        if not any(fnmatchcase(name, pattern) for names in trained for name in names):
            known = [names[0] for names in trained if names]
            raise LabError(
                f"--lr_groups: no parameter that is trained matches {pattern!r}. Known: {', '.join(known[:8])}"
                + (f" and {len(known) - 8} others." if len(known) > 8 else ".")
            )
    used = {_pattern_of(names, factors) for names in trained}
    if hidden := [pattern for pattern in factors if pattern not in used]:
        raise LabError(
            f"--lr_groups: whatever {hidden[0]!r} matches, a pattern before it matches, too, and the first one counts. "
            "Put it further to the front, or leave it out."
        )


def _pattern_of(names: list[str], factors: dict[str, float]) -> str | None:
    """The first pattern that matches."""
    return next((pattern for pattern in factors if any(fnmatchcase(name, pattern) for name in names)), None)


def parameter_names(frame: FrameType | None, path: str) -> dict[int, list[str]]:
    """By parameter, its names: those in each model among the script's variables, after the variable's own."""
    names: dict[int, list[str]] = {}
    seen = set()
    for variable, model in _models(frame, path):
        if variable in seen:
            continue
        seen.add(variable)
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), []).append(f"{variable}.{name}")
    return names


def _models(frame: FrameType | None, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The models that the script has variables for, where it makes its optimizer and in what called that."""
    while frame is not None and frame.f_code.co_filename == path:
        for variables in (frame.f_locals, frame.f_globals):
            yield from ((name, value) for name, value in variables.items() if isinstance(value, torch.nn.Module))
        frame = frame.f_back
