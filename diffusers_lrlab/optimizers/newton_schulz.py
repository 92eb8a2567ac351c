"""Newton-Schulz iteration of Muon, for many matrices at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Keller Jordan's quintic iteration, as in torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS, _EPS = 5, 1e-7
_MOST_NUMBERS = 2**26  # of matrices that are stacked: their copies take memory
_WIDE = 1.5  # columns over rows from which the iteration on Gram matrices takes fewer operations


def orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """
    Each matrix `(rows, columns)` with singular values near 1, as `torch.optim.Muon` makes it.

    Matrices of one shape are computed together, transposed ones among them. On a CPU, the precision is that of the
    matrices, float32 at least; elsewhere it is bfloat16, but float64 stays.
    """
    results: list[Tensor] = [torch.empty(0)] * len(matrices)
    for stack in _stacks(matrices):
        wide = torch.stack([_as_wide(matrices[index]).to(_precision(matrices[index])) for index in stack])
        for index, result in zip(stack, newton_schulz(wide), strict=True):
            matrix = matrices[index]
            results[index] = (result if matrix.shape[0] <= matrix.shape[1] else result.T).to(matrix.dtype)
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


def _as_wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


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
