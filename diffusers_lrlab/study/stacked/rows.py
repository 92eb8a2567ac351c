"""The numbers of many networks as rows of one matrix: what is done to each number is one operation for all of them."""

import itertools
import math
from collections.abc import Sequence

import torch

_ALIGNED = 16  # numbers: products round by addresses modulo 16 bytes, and vectors of 64 bytes have no rest


class Rows:
    """Where the parameters of a network lie in its row, one after another, each at a multiple of 16 numbers."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self.shapes = [parameter.shape for parameter in parameters]
        lengths = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        *self.starts, self.length = itertools.accumulate(lengths, initial=0)

    def split(self, row: torch.Tensor) -> list[torch.Tensor]:
        """A row as parameters, or a matrix as parameters of all its rows `(members, ...)`: views."""
        return [
            row[..., start : start + math.prod(shape)].unflatten(-1, shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    @torch.no_grad()
    def gather(self, tensors: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """A matrix with the values of these, which are in the order of the parameters for each row."""
        matrix = tensors[0][0].new_zeros(len(tensors), self.length)
        for row, values in zip(matrix, tensors, strict=True):
            for place, value in zip(self.split(row), values, strict=True):
                place.copy_(value)
        return matrix
