"""
Maximal update parametrisation (muP): the factors by which a learning rate found at one width holds at another.

The rules are those of Tensor Programs V (arXiv 2203.03466) for Adam; arXiv 2505.15270 shows that they hold for diffusion
transformers. With the width n and the base width b:

| role | parameters | learning rate | initial weights |
|---|---|---|---|
| `input` | weights with a fan-in that does not grow: embeddings, first layers | as given | as they are, ~ 1/fan-in |
| `vector` | biases, norms | as given | biases of hidden and output layers are 0 |
| `hidden` | matrices whose fan-in and fan-out grow | times b / n | variance ~ 1/fan-in, as torch has it |
| `output` | matrices whose fan-in alone grows | times b / n | 0 |

Table 8 of Tensor Programs V multiplies the output by b / n in `forward`, which diffusers would not do when it loads the
model. By the symmetry of its lemma J.1, a factor on a weight is the same, for Adam, as that factor on its initial value and
on its learning rate. This gives table 3, which has no multiplier. Outputs start at 0 here, so that only the learning rate is
left. Scores of attention stay divided by the root of the head size: a wider model has more heads of the same size.

DiT starts with zeros in the modulations of its norms, too, so that each block begins as the identity. diffusers'
`DiTTransformer2DModel` alone does not; the denoiser `dit` does, and [`start_for_width`] for all models with these rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..core.errors import LabError, must_be

OPTION = "--width_base"
ROLES = {
    "input": "input layers and embeddings",
    "vector": "biases and norms",
    "hidden": "hidden matrices",
    "output": "output matrices",
}
SCALED = ("hidden", "output")  # the roles whose learning rate follows the width


@dataclass(frozen=True)
class WidthRule:
    """
    The roles of a model's parameters.

    Args:
        sizes (`tuple` of `str`): Arguments of the model whose product is its width.
        roles (`dict`): The role of the parameters whose names match a pattern; the first match counts.
        zeros (`tuple` of `str`): Patterns of the matrices that start at 0, beside the outputs.
        fixed (`str`, *optional*): The one of `sizes` that must not grow.
    """

    sizes: tuple[str, ...]
    roles: Mapping[str, str]
    zeros: tuple[str, ...] = ()
    fixed: str | None = None


_BLOCK = "transformer_blocks.*"
_EMBEDDING = f"{_BLOCK}.norm1.emb"

WIDTH_RULES: dict[str, WidthRule] = {
    "MLPDenoiser": WidthRule(
        sizes=("hidden_size",),
        roles={"*.bias": "vector", "input.weight": "input", "blocks.*.weight": "hidden", "output.weight": "output"},
    ),
    "DiTTransformer2DModel": WidthRule(
        sizes=("num_attention_heads", "attention_head_dim"),
        roles={
            "*.bias": "vector",
            f"{_BLOCK}.norm[123].weight": "vector",
            "pos_embed.proj.weight": "input",
            f"{_EMBEDDING}.timestep_embedder.linear_1.weight": "input",
            f"{_EMBEDDING}.class_embedder.embedding_table.weight": "input",
            f"{_EMBEDDING}.timestep_embedder.linear_2.weight": "hidden",
            f"{_BLOCK}.norm1.linear.weight": "hidden",
            f"{_BLOCK}.attn1.to_[qkv].weight": "hidden",
            f"{_BLOCK}.attn1.to_out.0.weight": "hidden",
            f"{_BLOCK}.ff.net.0.proj.weight": "hidden",
            f"{_BLOCK}.ff.net.2.weight": "hidden",
            "proj_out_1.weight": "hidden",
            "proj_out_2.weight": "output",
        },
        zeros=(f"{_BLOCK}.norm1.linear.weight", "proj_out_1.weight"),
        fixed="attention_head_dim",
    ),
}
"""Rules by the name of a model's class; subclasses share them."""


def width_rule(model_class: Any) -> WidthRule:
    """The rule of a class; a `LabError` that says why if it has none."""
    for each in model_class.__mro__:
        if each.__name__ in WIDTH_RULES:
            return WIDTH_RULES[each.__name__]
    name = model_class.__name__
    reason = "no rule says which of its parameters follow the width"
    if "UNet" in name:
        reason = "a UNet has a width for each level, and skip connections join the levels, so no single number is its width"
    raise LabError(f"{OPTION}: a {name} has no rule for its width: {reason}. Hint: use {' or '.join(WIDTH_RULES)}.")


@dataclass(frozen=True)
class Width:
    """The width of a model, the base width, and the role of each parameter by its name."""

    width: int
    base: int
    roles: Mapping[str, str]

    def factor(self, role: str) -> float:
        """The factor on the learning rate of a role."""
        return self.base / self.width if role in SCALED else 1.0

    def names(self, role: str) -> list[str]:
        return [name for name, own in self.roles.items() if own == role]

    def facts(self) -> dict[str, Any]:
        """For records."""
        factors = {role: self.factor(role) for role in ROLES}
        return {"width": self.width, "base": self.base, "lr_factors": factors, "roles": dict(self.roles)}


def width_of(model: Any, base: int) -> Width:
    """The width of a model; a `LabError` for a base width with heads of another size, and for an unknown parameter."""
    rule, width = width_rule(type(model)), 1
    for size in rule.sizes:
        width *= model.config[size]
    if rule.fixed is not None and base % (size := model.config[rule.fixed]):
        wanted = f"a multiple of the head size, {rule.fixed}={size}"
        raise must_be(OPTION, base, wanted, "a wider model has more heads, not larger ones")
    roles = {name: _role(rule, name, type(model).__name__) for name, _ in model.named_parameters()}
    return Width(width, base, roles)


def _role(rule: WidthRule, name: str, model: str) -> str:
    for pattern, role in rule.roles.items():
        if fnmatchcase(name, pattern):
            return role
    raise LabError(
        f"{OPTION}: the rule of {model} has no role for its parameter {name!r}, whose learning rate may or may not follow "
        f"the width. Hint: leave {OPTION} out, or add the role to WIDTH_RULES."
    )


def start_for_width(model: Any, width: Width) -> None:
    """Sets the initial weights that start at 0, in place; the others keep those that they have."""
    import torch

    rule, parameters = width_rule(type(model)), dict(model.named_parameters())
    with torch.no_grad():
        for role in SCALED:
            for name in width.names(role):
                if role == "output" or any(fnmatchcase(name, pattern) for pattern in rule.zeros):
                    parameters[name].zero_()
                # torch draws biases from a range that shrinks with the fan-in.
                if (bias := parameters.get(f"{name.removesuffix('.weight')}.bias")) is not None:
                    bias.zero_()
