"""Speed of the matrix products of a stack by torch, oneDNN and the compiler.

    python benchmarks/matmul_paths.py

Prints GFLOP/s of one core, medians of turns, for layers of 256 and 384 units and 256 points, as in the study of schedules.
The compiler (`torch.compile`, which needs a C++ compiler) chooses among templates of its own and torch's products by
measuring them. A study computes with torch's own.
"""

import statistics
from functools import partial

import torch
from common import in_turns, make_parser, milliseconds, parse

from diffusers_lrlab.core.environment import describe_environment

BATCH, OUTPUTS = 256, 256


# The three products of a linear layer: x W^T, g^T x and g W.
KINDS = ("forward", "weight_gradient", "input_gradient")


def operands(kind, first, second):
    """The left and right factors of a product, as views of the tensors of a layer."""
    if kind == "forward":
        return first, second.transpose(1, 2)
    return (first.transpose(1, 2) if kind == "weight_gradient" else first), second


def multiply(kind, first, second, out):
    """A product as stacks compute it."""
    left, right = operands(kind, first, second)
    torch.bmm(left, right, out=out)


def onednn(kind, first, second, out):
    """OneDNN's linear layer, member by member: it has AVX-512 on processors where MKL keeps to AVX2."""
    left, right = operands(kind, first, second)
    for one, other, result in zip(left, right.transpose(1, 2), out, strict=True):
        result.copy_(torch.ops.mkldnn._linear_pointwise(one, other, None, "none", [], ""))


def compiled(kind):
    """The compiled product; compiles at its first call."""
    product = partial(multiply, kind)
    # Its template takes no transposed first operand: there it can only choose torch's product.
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    return torch.compile(product, options=options)


def tensors(kind, members, inputs):
    """First and second operand and the output of a layer with this many inputs."""
    x, g = torch.randn(members, BATCH, inputs), torch.randn(members, BATCH, OUTPUTS)
    weight = torch.randn(members, OUTPUTS, inputs)
    return {
        "forward": (x, weight, torch.empty_like(g)),
        "weight_gradient": (g, x, torch.empty_like(weight)),
        "input_gradient": (g, weight, torch.empty_like(x)),
    }[kind]


@torch.no_grad()
def main():
    parser = make_parser(__doc__)
    parser.add_argument("--members", type=int, default=10, help="of the stack: those of one core in a stack of 20")
    parser.add_argument("--rounds", type=int, default=30)
    options = parse(parser, members=2, rounds=1)
    torch.set_num_threads(1)
    meta = describe_environment()
    print(f"{meta['processor']}, torch {meta['versions']['torch']}, {torch.backends.cpu.get_cpu_capability()}\n")
    rows, compiling = [], 0.0
    for inputs in (256, 384):
        for kind in KINDS:
            arguments = tensors(kind, options.members, inputs)
            products = {"stock": partial(multiply, kind), "onednn": partial(onednn, kind)}
            if not options.tiny:  # compiling takes minutes
                products["compiled"] = compiled(kind)
                compiling += milliseconds(products["compiled"], *arguments) / 1e3
            flop = 2 * options.members * BATCH * OUTPUTS * inputs
            calls = {name: partial(product, *arguments) for name, product in products.items()}
            speeds = [flop / statistics.median(times) / 1e6 for times in in_turns(calls, options.rounds, 2).values()]
            rows.append(f"| {kind}, {inputs} inputs | " + " | ".join(f"{speed:.0f}" for speed in speeds) + " |")
    print(f"| product | {' | '.join(products)} |\n|{'---|' * (1 + len(products))}")
    print("\n".join(rows))
    print(f"\nCompiling took {compiling:.0f} s.")


if __name__ == "__main__":
    main()
