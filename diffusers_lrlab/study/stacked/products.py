"""The matrix products of a stack, always by the same operations of torch: none are chosen by timing them."""

import torch

# The three products of a linear layer: x W^T, g^T x and g W.
KINDS = ("forward", "weight_gradient", "input_gradient")


def operands(kind: str, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The left and right factors of a product, as views of the tensors of a layer."""
    if kind == "forward":
        return first, second.transpose(1, 2)
    return (first.transpose(1, 2) if kind == "weight_gradient" else first), second


def multiply(kind: str, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """Writes a product into `out`, or adds it to `out`; all are `(members, ., .)`, in the precision of the operands."""
    left, right = operands(kind, first, second)
    if len(out) == 1 and 1 in out.shape[1:]:
        # For a single product with a vector, MKL has another routine, which rounds differently: compute it twice.
        twice = out.repeat(2, 1, 1)
        multiply(kind, first.expand(2, -1, -1), second.expand(2, -1, -1), twice, add)
        out.copy_(twice[:1])
    elif add:
        out.baddbmm_(left, right)
    else:
        torch.bmm(left, right, out=out)
