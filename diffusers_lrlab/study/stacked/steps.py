"""Steps of a stack at the rates of each member: AdamW, SGD, and averages."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .member import Member
from .networks import own_parameters, per_member, stack_parameters

LR, MOMENTUM, AVERAGING = range(3)  # rows of `rates_of`


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


def batched_kind(member: Member) -> tuple[Any, ...]:
    """Equal for members with one [`BatchedOptimizer`]; empty for optimizers that take their steps by themselves."""
    name, optimizer = member.run.config.optimizer, member.run.optimizer
    if name == "adamw":
        return (name,) if type(optimizer) is torch.optim.AdamW else ()  # else it is cautious
    return (name, optimizer.param_groups[0]["momentum"] > 0) if name in ("sgd", "nesterov") else ()


class BatchedOptimizer:
    """
    AdamW or SGD of adjacent members, whose states become views of common tensors.

    An operation serves all members, with rates and settings `(members,)` on the device: a GPU computes the steps of each in
    less time than it takes to launch them. With `fuse`, on a CPU, AdamW takes them one after the other by torch's kernel,
    which reads and writes every number once. `weights` are those of the whole stack, and `own` selects those of the members.
    """

    def __init__(self, members: list[Member], own: slice, weights: Sequence[torch.Tensor], fuse: bool):
        optimizers = [member.run.optimizer for member in members[own]]
        groups = [optimizer.param_groups[0] for optimizer in optimizers]
        self.own, self._weights, self._group = own, [values[own] for values in weights], groups[0]
        settings = [(group["weight_decay"], group.get("eps", 0.0), group.get("betas", (0.0, 0.0))[1]) for group in groups]
        self._decay, self._eps, self._beta2 = torch.tensor(settings, dtype=torch.float64, device=weights[0].device).T
        self._is_adam = "betas" in groups[0]
        names = ("exp_avg", "exp_avg_sq") if self._is_adam else ("momentum_buffer",) if groups[0]["momentum"] else ()
        states = [[each.state[parameter] for parameter in each.param_groups[0]["params"]] for each in optimizers]
        self._counts = torch.tensor([float(own[0].get("step", 0.0)) for own in states], device=weights[0].device)
        nothing = [torch.zeros_like(values[0]) for values in self._weights]
        self._state = [
            stack_parameters([state.get(name, zero) for state, zero in zip(own, nothing, strict=True)] for own in states)
            for name in names
        ]
        for member, own_states in enumerate(states):
            for index, state in enumerate(own_states):
                state.update({name: values[index][member] for name, values in zip(names, self._state, strict=True)})
                if self._is_adam:
                    state["step"] = self._counts[member]
        self._fused: list[Any] = []  # of each member: arguments of torch's kernel
        for member, group in enumerate(groups) if fuse and self._is_adam else ():
            views = [own_parameters(values, member) for values in (self._weights, *self._state)]
            fixed = {"beta2": group["betas"][1], "weight_decay": group["weight_decay"], "eps": group["eps"]}
            fixed |= {"amsgrad": False, "maximize": False}
            self._fused.append((*views, [self._counts[member]] * len(weights), fixed))

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rates: torch.Tensor) -> None:
        """A step at the rates of an update, a row of [`rates_of`] on the device."""
        self._counts += 1
        lr, momentum = rates[LR, self.own], rates[MOMENTUM, self.own]
        if self._fused:
            each = zip(*(gradient[self.own].unbind() for gradient in gradients), strict=True)
            for own, rate, beta1, fused in zip(each, lr.tolist(), momentum.tolist(), self._fused, strict=True):
                weights, means, squares, steps, fixed = fused
                torch._fused_adamw_(weights, own, means, squares, [], steps, lr=rate, beta1=beta1, **fixed)
            return
        for index, (weight, gradient) in enumerate(zip(self._weights, gradients, strict=True)):
            state = [values[index] for values in self._state]
            (self._adamw if self._is_adam else self._sgd)(weight, gradient[self.own], state, lr, momentum)

    def _adamw(self, weight: Tensor, gradient: Tensor, state: list[Tensor], lr: Tensor, beta1: Tensor) -> None:
        mean, square = state
        weight.mul_(per_member(1 - lr * self._decay, weight))
        mean.lerp_(gradient, per_member(1 - beta1, mean))
        square.lerp_(gradient.square(), per_member(1 - self._beta2, mean))
        steps = self._counts.double()
        roots = square.sqrt().mul_(per_member((1 - self._beta2**steps).rsqrt(), mean)).add_(per_member(self._eps, mean))
        weight.addcmul_(mean / roots, per_member(-lr / (1 - beta1**steps), mean))

    def _sgd(self, weight: Tensor, gradient: Tensor, state: list[Tensor], lr: Tensor, momentum: Tensor) -> None:
        change = gradient.addcmul(weight, per_member(self._decay, weight))
        for velocity in state:
            momentum = per_member(momentum, weight)
            velocity.mul_(momentum).add_(change)
            change = change.addcmul(velocity, momentum) if self._group["nesterov"] else velocity
        weight.addcmul_(change, per_member(-lr, weight))


def batched_optimizers(members: list[Member], weights: Sequence[torch.Tensor], fuse: bool) -> Iterator[BatchedOptimizer]:
    """The [`BatchedOptimizer`]s of members that are sorted by [`batched_kind`]."""
    start = 0
    for kind, some in itertools.groupby(members, batched_kind):
        end = start + len(list(some))
        if kind:
            yield BatchedOptimizer(members, slice(start, end), weights, fuse)
        start = end


class StackedAverages:
    """The averages of all members, `(members, ...)` each in `values`; those of members without an average are unused."""

    def __init__(self, members: list[Member], weights: list[torch.Tensor], rates: torch.Tensor):
        self._weights, self.values = weights, weights
        self._is_due = (rates[:, AVERAGING] != 0).any(1).tolist()  # at each update, for any of them
        averages = [member.run.average for member in members]
        if all(average is None for average in averages):
            return
        nothing = [torch.zeros_like(values[0]) for values in weights]
        self.values = stack_parameters(nothing if average is None else average.shadow_params for average in averages)
        for index, average in enumerate(averages):
            if average is not None:
                average.shadow_params = own_parameters(self.values, index)

    @torch.no_grad()
    def step(self, update: int, rates: torch.Tensor) -> None:
        """Updates the averages after an update, if any is due."""
        if self._is_due[update]:
            for average, weight in zip(self.values, self._weights, strict=True):
                average.lerp_(weight, per_member(rates[AVERAGING], weight))
