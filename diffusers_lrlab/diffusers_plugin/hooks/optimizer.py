"""Replaces the optimizer of a third-party script, with the same parameter groups.

The optimizer is replaced in its constructor, before a schedule or accelerate sees it: the `__init__` of every optimizer
class is wrapped and answers calls from the script's file. `Optimizer.__new__` could not be restored: a class that once had a
`__new__` refuses the arguments of its `__init__` without one.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.errors import LabError
from ...core.spec import choose, format_spec
from ...core.words import counted
from ...optimizers.build import check_installed, get_optimizer, optimizer_parts, untrained_in_words
from ...optimizers.entries import OPTIMIZERS
from ...optimizers.layers import parts_in_words
from ...optimizers.timescales import per_update
from ..host.run import HostRun
from ..host.source import HostScript, NotRecognised, lines_of
from ..installed_hooks import Hook, Host

_NAME = "lab_optimizer"  # a key of parameter groups, saved with the optimizer's state


def recognise(script: HostScript) -> str:
    """Raises [`NotRecognised`] if the script makes no optimizer, or several."""
    made: dict[str, list[ast.Call]] = {}
    for node in script.nodes(ast.Assign):
        name, call = ast.unparse(node.targets[0]), node.value
        if "optim" in name and isinstance(call, ast.Call) and {"lr", "betas"} & {keyword.arg for keyword in call.keywords}:
            made.setdefault(name, []).append(call)
    if not made:
        raise NotRecognised("it makes no optimizer by a call with lr= or betas=")
    lines = lines_of([call for calls in made.values() for call in calls])
    if len(made) > 1:
        raise NotRecognised(f"it makes {len(made)} optimizers, {' and '.join(made)} ({lines})")
    return f"the optimizer is replaced where it is made ({lines})"


def make(host: Host) -> Hook:
    return OptimizerHook(host.script, host.run, host.options.optimizer)


class OptimizerHook:
    """Makes another optimizer of the script's parameter groups."""

    def __init__(self, script: HostScript, run: HostRun, spec: str):
        self.script, self.run = script, run
        choice = choose(spec, None, OPTIMIZERS)
        self.name, self.kwargs = choice.name, choice.given
        check_installed(choice.entry)
        per_update(choice.entry, self.kwargs, 1.0, None)  # settings in images need those of an update
        if "averages" in choice.entry.traits:
            raise LabError(
                f"--optimizer {self.name!r} trains weights other than those to keep, so the script would have to call it "
                "at every validation and save. Choose another, such as 'prodigy' or 'muon'."
            )
        recognise(script)
        self._names = WeakTensorKeyDictionary()  # of parameters in their models, the longest that was seen
        self.optimizer: Optimizer | None = None
        self.num_seen = 0

    def install(self) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        def check_and_load(load_state_dict: Any, wrapper: AcceleratedOptimizer, state: dict[str, Any], /) -> None:
            if wrapper.optimizer is self.optimizer:
                self._check_saved(state["param_groups"])
            load_state_dict(wrapper, state)

        self.run.patches.follow_classes(Optimizer, self._follow)
        self.run.patches.wrap(AcceleratedOptimizer, "load_state_dict", check_and_load)
        self.run.patches.wrap(torch.nn.Module, "named_parameters", self._remember_names)
        self.run.on_prepared.append(self._check_prepared)

    def _follow(self, cls: type[Optimizer]) -> None:
        if "__init__" in vars(cls):
            self.run.patches.replace(cls, "__init__", self._replacing(vars(cls)["__init__"]))

    def _remember_names(self, named: Any, module: Any, /, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """The names by which a script finds what its optimizer trains: `parameters()` goes through them, too."""
        for name, parameter in named(module, *args, **kwargs):
            if self.optimizer is None and len(name) > len(self._names.get(parameter, "")):
                self._names[parameter] = name
            yield name, parameter

    def _replacing(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def replace(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            frame, cls = sys._getframe(1), type(optimizer)
            # A class defined in the script also calls the __init__ of its base from there.
            if frame.f_code.co_filename != self.script.path or cls.__init__ is not replace:
                init(optimizer, *args, **kwargs)
                return
            made = self._make(cls, args, kwargs)
            optimizer.__class__, optimizer.__dict__ = type(made), made.__dict__
            self.optimizer = optimizer

        return replace

    def _make(self, cls: type, args: Any, kwargs: Any) -> Optimizer:
        if self.optimizer is not None:
            raise LabError("--optimizer: the script makes more than one optimizer. Remove --optimizer.")
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
        _, params, *_ = bound.arguments.values()
        given = dict([*bound.arguments.items()][2:])
        given |= given.pop("kwargs", {})
        groups = _as_groups(params)
        optimizer = self._replaced(groups, given)
        assigned = ((node.lineno, ast.unparse(target)) for node in self.script.nodes(ast.Assign) for target in node.targets)
        lines = [line for line, target in assigned if "param_groups[" in target]
        if lines and len(optimizer.param_groups) != len(groups):
            raise LabError(
                f"--optimizer: the script indexes parameter groups (line {lines[0]}), whose order would change. Remove "
                "--optimizer."
            )
        rates = {group["lr"] for group in optimizer.param_groups if group["lr"]}
        if "d" in optimizer.param_groups[0] and len(rates) > 1:
            raise LabError(
                f"{self.name} finds one learning rate for all parameters and cannot use several "
                f"({', '.join(f'{rate:g}' for rate in sorted(rates))}). Choose another optimizer, or one rate (0 freezes)."
            )
        for group in optimizer.param_groups:
            group[_NAME] = self.name
        self.optimizer, self.num_seen = optimizer, self.num_seen + 1
        return optimizer

    def _replaced(self, groups: list[dict[str, Any]], given: dict[str, Any]) -> Optimizer:
        """The requested optimizer, with those of the script's settings that it has too."""
        name, own = self.name, dict(given)
        entry = OPTIMIZERS[name]
        lr = own.pop("lr", None)
        lr = groups[0]["lr"] if lr is None else lr
        # As in `diffusers_lrlab.train`: betas and epsilon are Adam's.
        taken = {"weight_decay"} | ({"beta1", "beta2", "eps"} if "adam" in entry.traits else set())
        if "betas" in own and "adam" in entry.traits:
            own["beta1"], own["beta2"] = own.pop("betas")[:2]
        taken &= {parameter.name for parameter in entry.parameters} - self.kwargs.keys()
        taken -= {parameter.instead_of for parameter in entry.parameters if parameter.name in self.kwargs}
        settings = {key: own.pop(key) for key in taken & own.keys() if isinstance(own[key], (int, float))}
        for group in groups:
            if "weight_decay" in group and "weight_decay" not in taken:
                own["weight_decay of a group"] = group.pop("weight_decay")
        kept = ", ".join([f"learning rate {lr:g}", *(f"{key} {value:g}" for key, value in sorted(settings.items()))])
        unused = f" Not used: {', '.join(f'{key} {value}' for key, value in own.items())}." if own else ""
        self.run.warn(f"--optimizer {format_spec(name, self.kwargs)}, with the script's {kept}.{unused}")
        expected = entry.facts.get("learning_rate")
        if expected is not None and lr != expected:
            self.run.warn(
                f"{name} finds its learning rate by itself and multiplies it by the script's, which is {lr:g}. Give the "
                f"script --learning_rate {expected:g}."
            )
        named = [{**group, "params": [(self._names.get(each), each) for each in group["params"]]} for group in groups]
        optimizer = get_optimizer(name, named, lr, **settings, **self.kwargs)
        if (parts := optimizer_parts(optimizer)) is not None:
            self.run.warn(f"{name}: {parts_in_words(parts)}.")
        if untrained := untrained_in_words(optimizer, (each for group in groups for each in group["params"])):
            self.run.warn(f"{name}: {untrained}")
        return optimizer

    # --- errors -------------------------------------------------------------------------------------------------------

    def _check_prepared(self) -> None:
        if self.run.optimizer is not None and self.run.optimizer is not self.optimizer:
            raise LabError(
                f"--optimizer: the script trains with a {type(self.run.optimizer).__name__} made in another file, which "
                "cannot be replaced. Remove --optimizer."
            )

    def _check_saved(self, groups: list[dict[str, Any]]) -> None:
        """Refuses a checkpoint of another optimizer, whose state torch would load."""
        saved = {group.get(_NAME, "the script's own") for group in groups}
        if saved != {self.name}:
            raise LabError(
                f"--optimizer {self.name}: must be the optimizer of the checkpoint, got a checkpoint of "
                f"{' and '.join(sorted(saved))}. Hint: resume with that one."
            )

    def report(self) -> str:
        if self.optimizer is None:
            return "--optimizer: no optimizer was made."
        size = sum(parameter.numel() for group in self.optimizer.param_groups for parameter in group["params"])
        return f"--optimizer: {self.name} trained {counted(size, 'parameter', ',')}."


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """An optimizer's first argument, parameters or groups, as groups with lists of parameters."""
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    tensors = [group["params"] for group in groups]
    lists = [[held] if isinstance(held, torch.Tensor) else list(held) for held in tensors]
    return [{**group, "params": held} for group, held in zip(groups, lists, strict=True)]
