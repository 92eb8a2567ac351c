"""Muon for a whole model: torch's takes matrices only, and a UNet consists mostly of convolutions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from .layers import HIDDEN, layers_of, parts_of

_RMS = 0.2  # of AdamW's updates
# Keller Jordan's quintic iteration, as in torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS, _EPS = 5, 1e-7
_MOST_NUMBERS = 2**26  # of matrices that are stacked: their copies take memory
_WIDE = 1.5  # columns over rows from which the iteration on Gram matrices takes fewer operations


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
            can_fuse = all(parameter.device.type in ("cpu", "cuda") for parameter in rest)
            parts = ({"params": matrices, "momentum": momentum}, {"params": rest, "betas": betas, "fused": can_fuse})
            groups += [{**group, **part} for part in parts if part["params"]]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._adamw = [None if "momentum" in group else _adamw(group) for group in self.param_groups]

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
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        means = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        lr, momentum = float(group["lr"]), float(group["momentum"])
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        updates = self._orthogonalised(parameters, torch._foreach_lerp(gradients, means, momentum))
        if group["weight_decay"]:
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


def _adamw(group: dict[str, Any]) -> AdamW:
    return AdamW(group["params"], **{key: group[key] for key in ("lr", "betas", "weight_decay", "fused")})


# --- the Newton-Schulz iteration, for many matrices at once ----------------------------------------------------------


def orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """
    Each matrix `(rows, columns)` with singular values near 1, as `torch.optim.Muon` makes it.

    Matrices of one shape are computed together, transposed ones among them. On a CPU, the precision is that of the
    matrices, float32 at least; elsewhere it is bfloat16, but float64 stays.
    """
    results: list[Tensor] = [torch.empty(0)] * len(matrices)
    wide = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T for matrix in matrices]
    for stack in _stacks(matrices):
        found = newton_schulz(torch.stack([wide[index].to(_precision(wide[index])) for index in stack]))
        for index, result in zip(stack, found, strict=True):
            results[index] = (result if wide[index] is matrices[index] else result.T).to(matrices[index].dtype)
    return results


def _stacks(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The places of matrices that are computed together."""
    found: dict[tuple[object, ...], list[list[int]]] = {}
    for index, matrix in enumerate(matrices):
        stacks = found.setdefault((*sorted(matrix.shape), matrix.dtype, matrix.device), [])
        if not stacks or (len(stacks[-1]) + 1) * matrix.numel() > _MOST_NUMBERS:
            stacks.append([])
        stacks[-1].append(index)
    return [stack for stacks in found.values() for stack in stacks]


def _precision(matrix: Tensor) -> torch.dtype:
    """bfloat16 is slow on CPUs without instructions for it."""
    if matrix.dtype == torch.float64:
        return torch.float64
    return torch.float32 if matrix.device.type == "cpu" else torch.bfloat16


def newton_schulz(matrices: Tensor) -> Tensor:
    """The iteration for wide matrices `(n, rows, columns)`, rows <= columns."""
    matrices = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    if matrices.dtype == torch.bfloat16 or matrices.shape[2] <= _WIDE * matrices.shape[1]:
        return _on_matrices(matrices)
    return _on_gram(matrices)


def _on_matrices(matrices: Tensor) -> Tensor:
    for _ in range(_STEPS):
        gram = matrices @ matrices.mT
        matrices = torch.baddbmm(matrices, _polynomial(gram), matrices, beta=_A)
    return matrices


def _polynomial(gram: Tensor) -> Tensor:
    return torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)


def _on_gram(matrices: Tensor) -> Tensor:
    """
    The same by square matrices alone, for much fewer operations where columns are many: each step multiplies from the left
    by P = a + b G + c G^2 and so makes P G P of the Gram matrix G, with which P commutes. bfloat16 is too coarse for it.
    """
    gram = matrices @ matrices.mT
    factor = None
    for step in range(_STEPS):
        change = _polynomial(gram)
        change.diagonal(dim1=1, dim2=2).add_(_A)
        factor = change if factor is None else change @ factor
        if step < _STEPS - 1:
            gram = change @ (gram @ change)
    assert factor is not None
    return factor @ matrices
