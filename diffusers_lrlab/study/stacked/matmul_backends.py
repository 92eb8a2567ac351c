"""The matrix products of a stack, by several backends. All multiply and add in the precision of their operands.

New studies compute with torch's own. Rounding depends on the choice, so that one made by the clock would not come out the
same twice; what the others would gain is measured by `benchmarks/study_throughput.py`.
"""

from collections.abc import Callable

import torch

# The three products of a linear layer: x W^T, g^T x and g W, for every member of a stack.
KINDS = ("forward", "weight_gradient", "input_gradient")

# f(first, second, out, add): all of shape (members, ., .); `add` adds to what is in `out`.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]


def operands(kind: str, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The left and right factor of a product, as views of `(first, second)` as a layer has them."""
    if kind == "forward":
        return first, second.transpose(1, 2)
    return (first.transpose(1, 2) if kind == "weight_gradient" else first), second


def _stock(kind: str) -> Product:
    """Torch's batched product, which on a CPU is MKL's."""

    def product(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        left, right = operands(kind, first, second)
        if len(out) == 1 and 1 in out.shape[1:]:
            # MKL has a routine of its own for a single product with a vector, which rounds otherwise: two of them, then.
            twice = out.repeat(2, 1, 1)
            product(first.expand(2, -1, -1), second.expand(2, -1, -1), twice, add)
            out.copy_(twice[:1])
        elif add:
            out.baddbmm_(left, right)
        else:
            torch.bmm(left, right, out=out)

    return product


def _onednn(kind: str) -> Product:
    """OneDNN's linear layer, member by member: it has AVX-512 on processors where MKL keeps to AVX2."""
    linear = torch.ops.mkldnn._linear_pointwise

    def product(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        left, right = operands(kind, first, second)
        for one, other, result in zip(left, right.transpose(1, 2), out, strict=True):
            value = linear(one, other, None, "none", [], "")
            if add:
                result.add_(value)
            else:
                result.copy_(value)

    return product


BACKENDS: dict[str, Callable[[str], Product]] = {"stock": _stock, "onednn": _onednn}
STOCK = dict.fromkeys(KINDS, "stock")
# What earlier versions chose from. Gradients of weights have both of their operands transposed, which oneDNN copies first.
CANDIDATES: dict[str, dict[str, str]] = {
    "stock": STOCK,
    "onednn": dict.fromkeys(KINDS, "onednn"),
    "onednn, weight gradients stock": {**dict.fromkeys(KINDS, "onednn"), "weight_gradient": "stock"},
}
