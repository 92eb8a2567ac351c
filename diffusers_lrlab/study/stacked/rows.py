"""Parameters of many networks as rows of one matrix, so that an elementwise operation on all of them is one operation."""

import itertools
import math
from collections.abc import Sequence

import torch

_ALIGNED = 16  # numbers: rounding of products depends on addresses modulo 16 bytes; 64-byte vectors leave no remainder


class Rows:
    """The layout of the parameters of a network in its row, each starting at a multiple of 16 numbers."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self.shapes = [parameter.shape for parameter in parameters]
        lengths = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        *self.starts, self.length = itertools.accumulate(lengths, initial=0)

    def split(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Views of a row as parameters, or of a matrix as parameters of all its rows `(members, ...)`."""
        return [
            row[..., start : start + math.prod(shape)].unflatten(-1, shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    @torch.no_grad()
    def gather(self, tensors: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """A matrix of these values: for each row, tensors in the order of the parameters."""
        matrix = tensors[0][0].new_zeros(len(tensors), self.length)
        for row, values in zip(matrix, tensors, strict=True):
            for view, value in zip(self.split(row), values, strict=True):
                view.copy_(value)
        return matrix
