"""The optimizer of a script that is not ours: another one in its place, and learning rates of its own for some parameters.

It is replaced where the script makes it, before a schedule or accelerate sees it: `Optimizer.__new__` is asked for every
optimizer, of whatever package, and answers calls from the script's own file.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from ..core.errors import LabError
from ..core.spec import format_spec, merge_spec
from ..optimizers.entries import OPTIMIZERS, check_installed, get_optimizer
from .host_run import HostRun
from .host_script import HostScript, NotRecognised, called_in

# What both are kept in, in the groups of parameters: so they are saved with the optimizer's state.
_NAME, _FACTOR = "lab_optimizer", "lab_lr_factor"
_HIGHEST_FACTOR = 1e6


def recognise(script: HostScript) -> str:
    """Where a script makes its optimizer; [`NotRecognised`] if nowhere, or if it makes several."""
    made: dict[str, list[ast.Call]] = {}
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        name = ast.unparse(node.targets[0])
        if "optim" in name and {"lr", "betas"} & {keyword.arg for keyword in node.value.keywords}:
            made.setdefault(name, []).append(node.value)
    if not made:
        raise NotRecognised("it makes no optimizer by a call with lr= or betas=")
    calls = [call for each in made.values() for call in each]
    if len(made) > 1:
        raise NotRecognised(f"it makes {len(made)} optimizers, {' and '.join(made)} ({called_in(calls)})")
    return f"the optimizer is replaced where it is made ({called_in(calls)})"


def parse_lr_groups(text: str) -> dict[str, float]:
    """`"text_encoder*=0.1,*.bias=2"` as patterns and factors."""
    factors: dict[str, float] = {}
    for part in text.split(","):
        pattern, _, number = part.strip().rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 <= factor <= _HIGHEST_FACTOR:
            raise LabError(
                f"--lr_groups {text!r}: {part!r} is not PATTERN=FACTOR, with a factor on the learning rate from 0 to "
                f"{_HIGHEST_FACTOR:g}. Write it as in 'text_encoder*=0.1,*.bias=2'."
            )
        if pattern in factors:
            raise LabError(f"--lr_groups {text!r} has the pattern {pattern!r} twice. Drop one.")
        factors[pattern] = factor
    return factors


class OptimizerHook:
    """
    Makes another optimizer of the script's groups of parameters, or splits these by patterns of names.

    Args:
        script ([`HostScript`]): The script.
        run ([`HostRun`]): What it prepares.
        spec (`str`, *optional*): The optimizer in place of the script's.
        lr_groups (`str`, *optional*): Patterns of parameters' names with factors on the learning rate.
    """

    def __init__(self, script: HostScript, run: HostRun, spec: str | None, lr_groups: str | None):
        self.script, self.run = script, run
        self.name: str | None = None
        self.kwargs: dict[str, Any] = {}
        if spec:
            self.name, self.kwargs = merge_spec(spec, None, OPTIMIZERS)
            check_installed(self.name)
        if self.name and "averages" in OPTIMIZERS[self.name].traits:
            raise LabError(
                f"--optimizer {self.name!r} trains with other weights than those to keep, and would have to be told of "
                "every validation and save of the script. Choose another, such as 'prodigy' or 'muon'."
            )
        self.factors = parse_lr_groups(lr_groups) if lr_groups else {}
        self.asked = " and ".join(option for option, given in (("--optimizer", spec), ("--lr_groups", lr_groups)) if given)
        recognise(script)
        self.optimizer: Optimizer | None = None
        self.num_seen = 0

    def install(self) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        load_state_dict = AcceleratedOptimizer.load_state_dict

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_filename != self.script.path or not args and not kwargs:
                return object.__new__(cls)
            return _as_made_by(cls, self._make(cls, args, kwargs, frame))

        def check_and_load(wrapper: AcceleratedOptimizer, state: dict[str, Any]) -> None:
            if wrapper.optimizer is self.optimizer:
                self._check_saved(state["param_groups"])
            load_state_dict(wrapper, state)

        cast(Any, Optimizer).__new__ = new
        cast(Any, AcceleratedOptimizer).load_state_dict = check_and_load
        self.run.on_prepared.append(self._check_prepared)

    def _make(self, cls: type, args: Any, kwargs: Any, frame: FrameType) -> Optimizer:
        if self.optimizer is not None:
            raise LabError(
                f"The script makes more than one optimizer, and {self.asked} cannot tell them apart. Leave it out."
            )
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
        _, params, *_ = bound.arguments.values()
        given = dict([*bound.arguments.items()][2:])
        given |= given.pop("kwargs", {})
        own_groups = _as_groups(params)
        groups = self._split(own_groups, given, frame)
        optimizer = self._replaced(groups, given) if self.name else cls(groups, **given)
        if len(optimizer.param_groups) != len(own_groups) and (written := self._writes_of_groups()):
            raise LabError(
                f"The script changes groups of parameters by their numbers (line {written[0].lineno}), which are others "
                f"with {self.asked}. Leave it out."
            )
        rates = {group["lr"] for group in optimizer.param_groups if group["lr"]}
        if "d" in optimizer.param_groups[0] and len(rates) > 1:
            raise LabError(
                f"{self.name or cls.__name__} finds one learning rate for all parameters, and cannot have others for some "
                f"({', '.join(f'{rate:g}' for rate in sorted(rates))}). Choose another optimizer, or one rate (0 freezes)."
            )
        for group in optimizer.param_groups:
            group[_NAME] = self.name or cls.__name__
            group.setdefault(_FACTOR, 1.0)
        self.optimizer, self.num_seen = optimizer, self.num_seen + 1
        return optimizer

    def _replaced(self, groups: list[dict[str, Any]], given: dict[str, Any]) -> Optimizer:
        """The optimizer that was asked for; of the script's own settings it takes those that it has too."""
        assert self.name is not None
        entry, own = OPTIMIZERS[self.name], dict(given)
        lr = own.pop("lr", None)
        lr = groups[0]["lr"] if lr is None else lr
        # As `diffusers_lrlab.train` does: betas and epsilon are Adam's.
        taken = {"weight_decay"} | ({"beta1", "beta2", "eps"} if "adam" in entry.traits else set())
        if "betas" in own and "adam" in entry.traits:
            own["beta1"], own["beta2"] = own.pop("betas")[:2]
        taken &= {parameter.name for parameter in entry.parameters} - self.kwargs.keys()
        settings = {name: own.pop(name) for name in taken & own.keys() if isinstance(own[name], (int, float))}
        for group in groups:
            if "weight_decay" in group and "weight_decay" not in taken:
                own["weight_decay of a group"] = group.pop("weight_decay")
        kept = ", ".join([f"learning rate {lr:g}", *(f"{name} {value:g}" for name, value in sorted(settings.items()))])
        unused = f" Not used: {', '.join(f'{name} {value}' for name, value in own.items())}." if own else ""
        self.run.warn(f"--optimizer {format_spec(self.name, self.kwargs)}, with the script's {kept}.{unused}")
        expected = entry.facts.get("learning_rate")
        if expected is not None and lr != expected:
            self.run.warn(
                f"{self.name} finds its learning rate by itself, and multiplies it by the script's, which is {lr:g}. Give "
                f"the script --learning_rate {expected:g}."
            )
        return get_optimizer(self.name, groups, lr, **settings, **self.kwargs)

    def _writes_of_groups(self) -> list[ast.Assign]:
        """Where the script sets something of `optimizer.param_groups[1]`, say."""
        assigned = [node for node in ast.walk(self.script.tree) if isinstance(node, ast.Assign)]
        return [node for node in assigned if any("param_groups[" in ast.unparse(target) for target in node.targets)]

    # --- groups ------------------------------------------------------------------------------------------------------

    def _split(self, groups: list[dict[str, Any]], given: dict[str, Any], frame: FrameType) -> list[dict[str, Any]]:
        """Each group once for each factor that some of its parameters have."""
        if not self.factors:
            return groups
        names = _parameter_names(frame, self.script.path)
        ours = [names.get(id(parameter), []) for group in groups for parameter in group["params"]]
        for pattern in self.factors:
            if not any(fnmatchcase(name, pattern) for each in ours for name in each):
                known = [each[0] for each in ours if each]
                raise LabError(
                    f"--lr_groups: no parameter that is trained matches {pattern!r}. Known: {', '.join(known[:8])}"
                    + (f" and {len(known) - 8} others." if len(known) > 8 else ".")
                )
        used = {self._pattern_of(each) for each in ours}
        if hidden := [pattern for pattern in self.factors if pattern not in used]:
            raise LabError(
                f"--lr_groups: whatever {hidden[0]!r} matches, a pattern before it matches, too, and the first one counts. "
                "Put it further to the front, or leave it out."
            )
        split = []
        for group in groups:
            lr = group.get("lr", given.get("lr"))
            if lr is None:
                raise LabError("--lr_groups: the script gives its optimizer no learning rate to multiply. Leave it out.")
            parts: dict[str | None, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                parts.setdefault(self._pattern_of(names.get(id(parameter), [])), []).append(parameter)
            for found, parameters in parts.items():
                factor = 1.0 if found is None else self.factors[found]
                split.append({**group, "params": parameters, "lr": lr * factor, _FACTOR: factor})
        return split

    def _pattern_of(self, names: list[str]) -> str | None:
        """The first pattern that matches."""
        return next((pattern for pattern in self.factors if any(fnmatchcase(name, pattern) for name in names)), None)

    # --- what can go wrong -------------------------------------------------------------------------------------------

    def _check_prepared(self) -> None:
        if self.run.optimizer is not None and self.run.optimizer is not self.optimizer:
            raise LabError(
                f"The script trains with a {type(self.run.optimizer).__name__} that is made in another file, where "
                f"{self.asked} does not reach it. Leave it out."
            )

    def _check_saved(self, groups: list[dict[str, Any]]) -> None:
        """Before a checkpoint is loaded: torch would take its groups, rates included, whatever was asked for now."""
        assert self.optimizer is not None

        def described(groups: list[dict[str, Any]]) -> list[tuple[Any, float]]:
            return [(group.get(_NAME, "the script's own"), group.get(_FACTOR, 1.0)) for group in groups]

        saved, now = described(groups), described(self.optimizer.param_groups)
        if saved != now:
            raise LabError(
                f"The checkpoint was saved with the optimizer and the factors on its rate {_shown(saved)}, and {self.asked} "
                f"asks for {_shown(now)}. Resume with those of the checkpoint."
            )

    def report(self) -> str:
        if self.optimizer is None:
            return f"{self.asked}: no optimizer was made."
        sizes: dict[float, int] = {}
        for group in self.optimizer.param_groups:
            size = sum(parameter.numel() for parameter in group["params"])
            sizes[group[_FACTOR]] = sizes.get(group[_FACTOR], 0) + size
        shown = f"{self.optimizer.param_groups[0][_NAME]} trained {sum(sizes.values()):,} parameters"
        if self.factors:
            shown += f", with factors on the learning rate: {', '.join(f'{f:g} for {n:,}' for f, n in sizes.items())}"
        return f"{self.asked}: {shown}."


def _shown(groups: list[tuple[Any, float]]) -> str:
    return ", ".join(f"{name} x {factor:g}" for name, factor in groups)


def _as_made_by(cls: type, optimizer: Optimizer) -> Optimizer:
    """What `cls.__new__` may return: where it is a `cls`, Python calls its `__init__` once more, which does nothing here."""
    made = type(optimizer)
    if issubclass(made, cls):

        def put_back(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            self.__class__ = made

        cast(Any, optimizer).__class__ = type(made.__name__, (made,), {"__init__": put_back})
    return optimizer


def _as_groups(params: Any) -> list[dict[str, Any]]:
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    as_lists = []
    for group in groups:
        held = group["params"]
        as_lists.append({**group, "params": [held] if isinstance(held, torch.Tensor) else list(held)})
    return as_lists


def _parameter_names(frame: FrameType | None, path: str) -> dict[int, list[str]]:
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
