"""The optimizer of a script that is not ours: another one in its place, and learning rates of its own for some parameters.

It is replaced where the script makes it, before a schedule or accelerate sees it: the `__init__` of every optimizer, of
whatever package, answers calls from the script's own file. Not `Optimizer.__new__`, which Python could not put back: a class
that once had a `__new__` refuses the arguments of its `__init__` without one.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from ...core.errors import LabError
from ...core.spec import format_spec, merge_spec
from ...core.words import counted
from ...optimizers.entries import OPTIMIZERS, check_installed, get_optimizer
from ..host.hook import Hook, Host
from ..host.run import HostRun
from ..script.source import HostScript, NotRecognised, called_in
from .lr_groups import LR_FACTOR, as_groups, parameter_names, parse_lr_groups, split_groups

_NAME = "lab_optimizer"  # a key of groups of parameters, which are saved with the optimizer's state


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


def make(host: Host) -> Hook:
    return OptimizerHook(host.script, host.run, host.options.optimizer, host.options.lr_groups)


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

        def check_and_load(load_state_dict: Any, wrapper: AcceleratedOptimizer, state: dict[str, Any]) -> None:
            if wrapper.optimizer is self.optimizer:
                self._check_saved(state["param_groups"])
            load_state_dict(wrapper, state)

        def follow_new(cls: type[Optimizer], **kwargs: Any) -> None:  # of packages that the script imports
            super(Optimizer, cls).__init_subclass__(**kwargs)
            self._follow(cls)

        for cls in _with_subclasses(Optimizer):
            self._follow(cls)
        self.run.patches.replace(Optimizer, "__init_subclass__", classmethod(follow_new))
        self.run.patches.wrap(AcceleratedOptimizer, "load_state_dict", check_and_load)
        self.run.on_prepared.append(self._check_prepared)

    def _follow(self, cls: type[Optimizer]) -> None:
        if "__init__" in vars(cls):
            self.run.patches.replace(cls, "__init__", self._replacing(vars(cls)["__init__"]))

    def _replacing(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def replace(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            frame, cls = sys._getframe(1), type(optimizer)
            # A class of the script's own calls the __init__ of its base from there, too.
            if frame.f_code.co_filename != self.script.path or cls.__init__ is not replace:
                init(optimizer, *args, **kwargs)
                return
            made = self._make(cls, args, kwargs, frame)
            optimizer.__class__, optimizer.__dict__ = type(made), made.__dict__
            self.optimizer = optimizer

        return replace

    def _make(self, cls: type, args: Any, kwargs: Any, frame: FrameType) -> Optimizer:
        if self.optimizer is not None:
            raise LabError(
                f"The script makes more than one optimizer, and {self.asked} cannot tell them apart. Leave it out."
            )
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
        _, params, *_ = bound.arguments.values()
        given = dict([*bound.arguments.items()][2:])
        given |= given.pop("kwargs", {})
        own_groups = groups = as_groups(params)
        if self.factors:
            groups = split_groups(own_groups, given.get("lr"), self.factors, parameter_names(frame, self.script.path))
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
            group.setdefault(LR_FACTOR, 1.0)
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
            return [(group.get(_NAME, "the script's own"), group.get(LR_FACTOR, 1.0)) for group in groups]

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
            sizes[group[LR_FACTOR]] = sizes.get(group[LR_FACTOR], 0) + size
        shown = f"{self.optimizer.param_groups[0][_NAME]} trained {counted(sum(sizes.values()), 'parameter', ',')}"
        if self.factors:
            shown += f", with factors on the learning rate: {', '.join(f'{f:g} for {n:,}' for f, n in sizes.items())}"
        return f"{self.asked}: {shown}."


def _shown(groups: list[tuple[Any, float]]) -> str:
    return ", ".join(f"{name} x {factor:g}" for name, factor in groups)


def _with_subclasses(cls: type[Optimizer]) -> set[type[Optimizer]]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))
