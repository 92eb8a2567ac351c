"""Muon for a whole model: torch's takes matrices only, and a UNet consists mostly of convolutions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ..core.errors import LabError
from .cautious import CautiousAdamW, decay_cautiously
from .layers import HIDDEN, layers_of, parts_of
from .newton_schulz import orthogonalised

_RMS = 0.2  # of AdamW's updates


class MuonWithAdamW(Optimizer):
    """
    Muon for the weights of hidden layers, AdamW for the rest, with one learning rate.

    The kernel of a convolution is treated as a matrix (out channels, in channels x height x width), and a fused projection
    as several (arXiv 2608.02502). Muon's updates are scaled to the root mean square of AdamW's (arXiv 2502.16982, eq. 4), so
    that one learning rate suits both.

    Args:
        params (`list`): Parameters, or groups of them, each alone or as `(name, parameter)`.
        lr (`float`): The learning rate of groups without one.
        momentum (`float`): Decay of Muon's mean of gradients, with Nesterov's look-ahead.
        betas (`tuple` of `float`): Those of AdamW.
        weight_decay (`float`): Decoupled weight decay of all parameters.
        chunks, hidden, adamw: As in [`layers_of`].
        cautious (`bool`): Whether weight decay is cautious, as in [`decay_cautiously`].
    """

    parts: dict[str, Any]  # what each of the two trains, by [`parts_of`]

    def __init__(
        self,
        params: list[Any],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        weight_decay: float,
        chunks: bool = True,
        hidden: Sequence[str] = (),
        adamw: Sequence[str] = (),
        cautious: bool = False,
    ):
        given = params if isinstance(params[0], dict) else [{"params": params}]
        named = [_named(each) for group in given for each in group["params"]]
        layers = layers_of(named, hidden, adamw, chunks)
        self.parts = parts_of(named, layers)
        self._chunks = {parameter: layer.chunks for (_, parameter), layer in zip(named, layers, strict=True)}
        is_hidden = {parameter: layer.role == HIDDEN for (_, parameter), layer in zip(named, layers, strict=True)}
        groups: list[dict[str, Any]] = []
        for group in given:
            own = [_named(each)[1] for each in group["params"]]
            matrices, rest = ([each for each in own if is_hidden[each] == wanted] for wanted in (True, False))
            parts = ({"params": matrices, "momentum": momentum}, {"params": rest, "betas": betas, "fused": _can_fuse(rest)})
            groups += [{**group, **part} for part in parts if part["params"]]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.cautious, made = cautious, CautiousAdamW if cautious else AdamW
        self._adamw = [None if "momentum" in group else _adamw(made, group) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, adamw in zip(self.param_groups, self._adamw, strict=True):
            if adamw is None:
                self._step_muon(group)
                continue
            adamw.state = self.state
            adamw.param_groups[0].update(group)
            adamw.step()
        return loss

    def _step_muon(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        if any(parameter not in self._chunks for parameter in parameters):  # FSDP 2 puts shards in their places
            raise LabError("'muon' orthogonalises whole matrices, and these are sharded. Hint: use 'adamw' with FSDP.")
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        means = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        lr, momentum = float(group["lr"]), float(group["momentum"])
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        updates = self._orthogonalised(parameters, torch._foreach_lerp(gradients, means, momentum))
        if group["weight_decay"] and self.cautious:
            decay_cautiously(parameters, updates, lr * group["weight_decay"])
        elif group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-lr)

    def _orthogonalised(self, parameters: list[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
        """Scaled updates in the shapes of their parameters."""
        blocks = [
            block
            for parameter, update in zip(parameters, updates, strict=True)
            for block in update.reshape(len(update), -1).chunk(self._chunks[parameter])
        ]
        scaled = iter([result * (_RMS * math.sqrt(max(result.shape))) for result in orthogonalised(blocks)])
        made = []
        for parameter in parameters:
            own = [next(scaled) for _ in range(self._chunks[parameter])]
            made.append((own[0] if len(own) == 1 else torch.cat(own)).reshape(parameter.shape))
        return made


def _named(each: Any) -> tuple[str | None, Any]:
    return each if isinstance(each, tuple) else (None, each)


def _can_fuse(parameters: list[Tensor]) -> bool:
    return all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)


def _adamw(made: type[AdamW], group: dict[str, Any]) -> AdamW:
    return made(group["params"], **{key: group[key] for key in ("lr", "betas", "weight_decay", "fused")})
