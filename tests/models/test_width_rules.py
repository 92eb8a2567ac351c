"""The roles of parameters by which learning rates and initial weights follow the width of a model (muP)."""

import copy

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DModel

from diffusers_lrlab import MLPDenoiser
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.models.width import start_for_width, width_of, width_rule
from diffusers_lrlab.optimizers.build import LR_FACTOR, get_optimizer
from diffusers_lrlab.training.model import keep_weight_decay, width_groups

NUM_STEPS, LR = 4, 1e-3
WIDTHS = (64, 128, 256)


def make_mlp(width):
    return MLPDenoiser(hidden_size=width, num_layers=2, embedding_size=16)


def make_dit(width, **more):
    sizes = {"num_attention_heads": width // 16, "attention_head_dim": 16, "num_layers": 1, "sample_size": 4}
    return DiTTransformer2DModel(**sizes, in_channels=1, patch_size=2, num_embeds_ada_norm=3, **more)


def inputs_of(model):
    generator = torch.Generator().manual_seed(1)
    timesteps = torch.randint(0, 100, (16,), generator=generator)
    if isinstance(model, MLPDenoiser):
        return torch.randn(16, 2, generator=generator), timesteps
    images, labels = torch.randn(16, 1, 4, 4, generator=generator), torch.arange(16) % 3
    return images, timesteps, labels


@pytest.mark.parametrize("make", [make_mlp, make_dit])
def test_the_roles_are_those_of_the_shapes(make):
    """A fan-in or fan-out grows with the width if it differs between two widths."""
    small, large = (dict(make(width).named_parameters()) for width in (64, 128))
    width = width_of(make(64), 32)
    for name, role in width.roles.items():
        grows = [a < b for a, b in zip(small[name].shape, large[name].shape, strict=True)]
        expected = {(False, True): "input", (True, True): "hidden", (True, False): "output"}.get((grows[-1], grows[0]))
        if "embedding_table" in name:  # (labels, width): the fan-in is the number of labels
            expected = "input"
        assert role == ("vector" if name.endswith(".bias") else expected), name
        assert width.factor(role) == (0.5 if role in ("hidden", "output") else 1.0)
    assert width.names("output") == ["output.weight" if make is make_mlp else "proj_out_2.weight"]


def test_groups_of_an_optimizer():
    model = make_mlp(128)
    named = dict(model.named_parameters())
    groups = width_groups(named, width_of(model, 32), 1e-3)
    assert [(group["lr"], group[LR_FACTOR]) for group in groups] == [(1e-3, 1.0), (0.25e-3, 0.25)]
    # AdamW's own weight decay, which nothing gave.
    optimizer = torch.optim.AdamW(groups, 1e-3)
    keep_weight_decay(optimizer, width_of(model, 32))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.04]
    scaled = ("blocks.0.weight", "blocks.1.weight", "output.weight")
    assert [*map(id, groups[1]["params"])] == [id(named[name]) for name in scaled]
    (alone,) = width_groups(named, width_of(model, 128), 1e-3)
    assert (alone["lr"], [*map(id, alone["params"])]) == (1e-3, [*map(id, model.parameters())])


@pytest.mark.parametrize("make", [make_mlp, make_dit])
def test_only_the_declared_weights_start_at_zero(make):
    model = make(64)
    before = copy.deepcopy(model.state_dict())
    start_for_width(model, width_of(model, 32))
    zeros = {name for name, value in model.named_parameters() if not value.any()}
    assert not any(not before[name].any() for name in zeros)  # torch and diffusers start none of them at zero
    matrices = {name for name in zeros if name.endswith(".weight")}
    of_dit = {"transformer_blocks.0.norm1.linear.weight", "proj_out_1.weight", "proj_out_2.weight"}
    assert matrices == ({"output.weight"} if make is make_mlp else of_dit)
    roles = width_of(model, 32).roles
    biases = {name.removesuffix("weight") + "bias" for name, role in roles.items() if role in ("hidden", "output")}
    assert zeros - matrices == biases & before.keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items() if name not in zeros)
    assert not model(*inputs_of(model)).sample.any()


def changes(make, width):
    """The mean absolute change of each layer's output after a few steps of AdamW, by the layer's name."""
    torch.manual_seed(0)
    model = make(width)
    found = width_of(model, WIDTHS[0])
    start_for_width(model, found)
    optimizer = get_optimizer("adamw", width_groups(dict(model.named_parameters()), found, LR), LR, weight_decay=0.0)
    inputs = inputs_of(model)
    before = outputs(model.eval(), inputs)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (model(*inputs).sample - torch.sin(3 * inputs[0])).square().mean().backward()
        optimizer.step()
    after = outputs(model, inputs)
    return {name: float((after[name] - before[name]).abs().mean()) for name in before}


@torch.no_grad()
def outputs(model, inputs):
    found, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            handles.append(module.register_forward_hook(lambda _, __, value, name=name: found.update({name: value})))
    model(*inputs)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("make", [make_mlp, make_dit])
def test_steps_change_every_layer_equally_at_every_width(make, width):
    """The coordinate check of muP."""
    smallest, wider = (changes(make, each) for each in (WIDTHS[0], width))
    found = {name: wider[name] / smallest[name] for name in smallest}
    assert all(0.7 < ratio < 1.4 for ratio in found.values()), found


def test_models_without_a_rule_are_refused_and_so_are_heads_of_another_size():
    class WithGate(MLPDenoiser):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            self.gate = torch.nn.Linear(8, 8)

    for call, told in (
        (lambda: width_of(WithGate(hidden_size=8), 8), r"the rule of WithGate has no role for its parameter 'gate\.weight'"),
        (lambda: width_rule(UNet2DModel), "a UNet2DModel has no rule for its width: a UNet has a width for each level"),
        (lambda: width_rule(torch.nn.Linear), "a Linear has no rule for its width"),
        (lambda: width_of(make_dit(64), 40), r"--width_base 40: must be a multiple of the head size, attention_head_dim=16"),
    ):
        with pytest.raises(LabError, match=told):
            call()
