"""Learning rate factors for parameters of a third-party script, by patterns of names (`--lr_groups`)."""

from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch

from ...core.errors import LabError, must_be
from ...core.ranges import Range
from ...optimizers.groups import split_group

_FACTOR = Range("[0, 1e6]")


def parse_lr_groups(text: str) -> dict[str, float]:
    """Factors by pattern, from a text such as `"text_encoder*=0.1,*.bias=2"`."""
    factors: dict[str, float] = {}
    for part in text.split(","):
        pattern, _, number = part.strip().rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not pattern or factor not in _FACTOR:
            wanted = f"PATTERN=FACTOR, with {_FACTOR} for the learning rate"
            raise must_be("--lr_groups", part, wanted, "write it as in 'text_encoder*=0.1,*.bias=2'")
        if pattern in factors:
            raise must_be("--lr_groups", text, "a list of different patterns", f"remove one {pattern!r}")
        factors[pattern] = factor
    return factors


def as_groups(params: Any) -> list[dict[str, Any]]:
    """An optimizer's first argument, parameters or groups, as groups with lists of parameters."""
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    tensors = [group["params"] for group in groups]
    lists = [[held] if isinstance(held, torch.Tensor) else list(held) for held in tensors]
    return [{**group, "params": held} for group, held in zip(groups, lists, strict=True)]


def split_groups(
    groups: list[dict[str, Any]], lr: float | None, factors: dict[str, float], names: dict[int, list[str]]
) -> list[dict[str, Any]]:
    """
    Splits each group by the factors of its parameters.

    `lr` is the learning rate of groups without one; `names` are those of [`parameter_names`].
    """
    _check_patterns([names.get(id(parameter), []) for group in groups for parameter in group["params"]], factors)

    def pattern_of(parameter: torch.nn.Parameter) -> str | None:
        return _pattern_of(names.get(id(parameter), []), factors)

    split = []
    for group in groups:
        rate = group.get("lr", lr)
        if rate is None:
            raise LabError("--lr_groups: the script gives its optimizer no learning rate to multiply. Remove --lr_groups.")
        split += split_group(group, rate, pattern_of, {None: 1.0, **factors})
    return split


def _check_patterns(trained: list[list[str]], factors: dict[str, float]) -> None:
    """Raises a `LabError` for a pattern without effect on the trained parameters, given by their names."""
    for pattern in factors:
        if not any(fnmatchcase(name, pattern) for names in trained for name in names):
            known = [names[0] for names in trained if names]
            more = f" and {len(known) - 8} others" if len(known) > 8 else ""
            raise LabError(f"--lr_groups: no trained parameter matches {pattern!r}. Known: {', '.join(known[:8])}{more}.")
    used = {_pattern_of(names, factors) for names in trained}
    if hidden := [pattern for pattern in factors if pattern not in used]:
        raise LabError(
            f"--lr_groups: earlier patterns match everything that {hidden[0]!r} matches, and the first match counts. Move "
            "it forward, or remove it."
        )


def _pattern_of(names: list[str], factors: dict[str, float]) -> str | None:
    """The first pattern that matches."""
    return next((pattern for pattern in factors if any(fnmatchcase(name, pattern) for name in names)), None)


def parameter_names(frame: FrameType | None, path: str) -> dict[int, list[str]]:
    """
    The names of each parameter, by its id: those in each model, after the variable of the model.

    The models are the script's variables that are visible where it makes its optimizer, and in its calling functions.
    """
    models: dict[str, torch.nn.Module] = {}
    while frame is not None and frame.f_code.co_filename == path:
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in variables.items():
                if isinstance(value, torch.nn.Module):
                    models.setdefault(name, value)
        frame = frame.f_back
    names: dict[int, list[str]] = {}
    for variable, model in models.items():
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), []).append(f"{variable}.{name}")
    return names
