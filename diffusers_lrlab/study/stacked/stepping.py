"""Optimizers and averages of a stack: one step for all members with the same optimizer, at the rates of each."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...optimizers.elementwise import settings_of
from .member import Member
from .rows import Rows

LR, MOMENTUM, AVERAGING = range(3)  # rows of `rates_of`


def optimizer_key(member: Member) -> tuple[str, tuple[str, ...]]:
    """Equal for members whose steps the stack takes together; `("", ())` for optimizers without a rule."""
    rule = member.rule
    return ("", ()) if rule is None else (member.run.config.optimizer, rule.state(member.run.optimizer.defaults))


def rates_of(members: list[Member]) -> torch.Tensor:
    """
    Learning rate, momentum (0 if there is none) and weight of the raw weights in the average (0 if there is none) at each
    update: float64 `(updates, 3, members)`, as long as the longest run.
    """
    table = torch.zeros(max(member.run.plan.num_updates for member in members), 3, len(members), dtype=torch.float64)
    for index, run in enumerate(member.run for member in members):
        plan, own = run.plan, table[: run.plan.num_updates, :, index].numpy()
        own[:, LR] = plan.lrs if plan.lr_factors is None else plan.lrs * plan.lr_factors
        own[:, MOMENTUM] = plan.momenta if plan.schedule.sets_momentum else run.current_momentum or 0.0
        if run.average is not None:
            own[:, AVERAGING] = 1 - run.average.form.decays(plan.num_updates)
    return table


class _FusedGroup(NamedTuple):
    """Members with equal rates and settings, which take their steps by one call of torch's kernel."""

    first: int  # index of a member
    settings: dict[str, float]
    weights: list[torch.Tensor]  # a row of each member
    gradients: list[torch.Tensor]
    state: dict[str, list[torch.Tensor]]


class StackedOptimizer:
    """
    The optimizers of adjacent members with one [`optimizer_key`], whose states become views of common tensors.

    `weights` and `gradients` are the rows of the whole stack, and `own` selects those of the members. With `fuse`, on a
    CPU, members with equal rates and settings take their steps by torch's kernel, where the rule has one: it reads and
    writes every number once.
    """

    def __init__(
        self,
        members: list[Member],
        own: slice,
        rows: Rows,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        rates: torch.Tensor,
        fuse: bool,
    ):
        members, rates = members[own], rates[:, :, own]
        rule, names = members[0].rule, optimizer_key(members[0])[1]
        assert rule is not None
        self.rule, self.own, self.weights, self.gradients = rule, own, weights[own], gradients[own]
        self._adopt(members, names, rows)
        groups = [settings_of(member.run.optimizer.param_groups[0]) for member in members]
        self._settings = {
            name: torch.tensor([[group[name]] for group in groups], dtype=torch.float64, device=weights.device)
            for name in groups[0]
            if name != "weight_decay" or any(group[name] for group in groups)
        }
        self._fused = list(self._fused_groups(members, groups, rates)) if fuse and rule.fused is not None else []

    def _adopt(self, members: list[Member], names: tuple[str, ...], rows: Rows) -> None:
        """Turns the states of the optimizers, empty before their first steps, into views of common tensors."""
        runs = [member.run for member in members]
        states = [[run.optimizer.state[parameter] for parameter in run.model.parameters()] for run in runs]
        nothing = rows.split(torch.zeros_like(self.weights[0]))
        self.state = {
            name: rows.gather([[state.get(name, zero) for state, zero in zip(own, nothing, strict=True)] for own in states])
            for name in names
            if name != "step"
        }
        counts = [float(own[0].get("step", 0.0)) for own in states]
        self.counts = torch.tensor(counts, dtype=torch.float32, device=self.weights.device)
        for member, own in enumerate(states):
            views = {name: rows.split(matrix[member]) for name, matrix in self.state.items()}
            views |= {"step": [self.counts[member]] * len(own)} if "step" in names else {}
            for index, state in enumerate(own):
                state.update({name: views[name][index] for name in names})

    def _fused_groups(
        self, members: list[Member], settings: list[dict[str, float]], rates: torch.Tensor
    ) -> Iterator[_FusedGroup]:
        found: dict[Any, list[int]] = {}
        for index, member in enumerate(members):
            own = rates[:, :AVERAGING, index].numpy().tobytes()
            alone = index if member.run.feedback else None  # its rates are not known in advance
            found.setdefault((own, *settings[index].values(), alone), []).append(index)
        for indices in found.values():
            matrices = {"step": self.counts, **self.state}
            state = {name: [matrix[index] for index in indices] for name, matrix in matrices.items()}
            weights, gradients = ([matrix[index] for index in indices] for matrix in (self.weights, self.gradients))
            yield _FusedGroup(indices[0], settings[indices[0]], weights, gradients, state)

    def step(self, rates: torch.Tensor) -> None:
        """A step with the current gradients at the rates of an update, a row of [`rates_of`], on the device."""
        self.counts += 1
        lr, momentum = rates[LR, self.own, None], rates[MOMENTUM, self.own, None]
        for group in self._fused:
            now = {"lr": float(lr[group.first]), "momentum": float(momentum[group.first])}
            self.rule.fused(group.settings | now, group.weights, group.gradients, group.state)  # type: ignore[misc]
        if not self._fused:
            settings = self._settings | {"lr": lr, "momentum": momentum, "step": self.counts.double()[:, None]}
            self.rule.step(settings, self.weights, self.gradients, self.state)


def slices_by_optimizer(members: list[Member]) -> Iterator[slice]:
    """Slices of adjacent members with one [`optimizer_key`], without those whose optimizers have no rule."""
    start = 0
    for _, some in itertools.groupby(members, optimizer_key):
        end = start + len(list(some))
        if members[start].rule is not None:
            yield slice(start, end)
        start = end


class StackedAverages:
    """The averages of all members as rows of `values`; its rows of members without an average are unused."""

    def __init__(self, members: list[Member], rows: Rows, weights: torch.Tensor, rates: torch.Tensor):
        self.weights, self.values = weights, weights
        self._is_due = (rates[:, AVERAGING] != 0).any(1).tolist()  # at each update, for any of them
        averages = [member.run.average for member in members]
        if all(average is None for average in averages):
            return
        nothing = rows.split(torch.zeros_like(weights[0]))
        self.values = rows.gather([nothing if average is None else average.shadow_params for average in averages])
        for average, row in zip(averages, self.values, strict=True):
            if average is not None:
                average.shadow_params = rows.split(row)

    def step(self, update: int, rates: torch.Tensor) -> None:
        """Updates the averages after an update, if any is due."""
        if self._is_due[update]:
            self.values.lerp_(self.weights, rates[AVERAGING, :, None].to(self.values))
