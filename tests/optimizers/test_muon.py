"""Muon: its iteration beside torch's, which parameters it takes, and blocks of fused projections."""

import copy
import inspect
import sys

import pytest
import runs
import torch
from diffusers import DiTTransformer2DModel, UNet2DModel
from tables import cases

from diffusers_lrlab import TrainingConfig, get_optimizer, train
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.models.networks import default_unet_config
from diffusers_lrlab.optimizers import muon
from diffusers_lrlab.optimizers.build import optimizer_parts
from diffusers_lrlab.optimizers.layers import HIDDEN, chunks_of, layers_of, parts_in_words
from diffusers_lrlab.optimizers.muon import orthogonalised

needs_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
SHAPES = [(8, 8), (8, 20), (20, 8), (8, 20), (4, 50), (1, 3), (3, 1)]


def drawn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture
def torchs_iteration(monkeypatch):
    """That of torch, in the precision of its argument rather than in bfloat16."""
    original = sys.modules["torch.optim._muon"]
    source = inspect.getsource(original._zeropower_via_newtonschulz)
    assert source.count("grad.bfloat16()") == 1
    names = dict(vars(original))
    exec(source.replace("grad.bfloat16()", "grad.clone()"), names)
    monkeypatch.setattr(original, "_zeropower_via_newtonschulz", names["_zeropower_via_newtonschulz"])
    return lambda matrix: names["_zeropower_via_newtonschulz"](matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)


@needs_torchs
@cases(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_iteration_is_torchs_for_any_shape(torchs_iteration, monkeypatch, dtype, tolerance):
    matrices = [drawn(*shape, dtype=dtype, seed=place) for place, shape in enumerate(SHAPES)]
    for most in (muon._MOST_NUMBERS, 2 * 8 * 20):  # all of a shape at once, and two at a time
        monkeypatch.setattr(muon, "_MOST_NUMBERS", most)
        for matrix, ours in zip(matrices, orthogonalised(matrices), strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, torchs_iteration(matrix), rtol=0, atol=tolerance)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 16), torch.nn.Linear(16, 16)
    return torch.nn.Sequential(*layers).to(dtype)


def backward(model, seed):
    model.zero_grad()
    model(drawn(4, 1, 8, 8, seed=seed)).square().mean().backward()


@needs_torchs
@cases("is_named", [False, True])
def test_steps_are_those_of_torchs_muon_and_adamw(torchs_iteration, is_named):
    """In float64. Without names, all matrices are orthogonalised; with names, the first and the last are not."""
    ours, theirs = network(), network()
    optimizer = get_optimizer("muon", ours.named_parameters() if is_named else ours.parameters(), 1e-3)
    kernels = [theirs[2].weight] if is_named else [each.weight for each in (theirs[0], theirs[2], theirs[3])]
    flat = [torch.nn.Parameter(kernel.detach().flatten(1)) for kernel in kernels]
    torchs = torch.optim.Muon(flat, lr=1e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    rest = [parameter for parameter in theirs.parameters() if all(parameter is not kernel for kernel in kernels)]
    adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01)
    for seed in range(3):
        backward(ours, seed)
        optimizer.step()
        backward(theirs, seed)
        for matrix, kernel in zip(flat, kernels, strict=True):
            matrix.grad = kernel.grad.flatten(1)
        torchs.step()
        adamw.step()
        for matrix, kernel in zip(flat, kernels, strict=True):
            kernel.data.copy_(matrix.detach().view_as(kernel))
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_a_fused_projection_is_several_matrices():
    """Its steps are those of its blocks as parameters of their own; without `chunks` they are not."""
    weight = drawn(24, 8)
    blocks = [torch.nn.Parameter(block.clone()) for block in weight.chunk(3)]
    fused, whole = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    apart = get_optimizer("muon", blocks, 1e-2)
    together = get_optimizer("muon", [("blocks.0.attn.to_qkv.weight", fused)], 1e-2)
    unlike = get_optimizer("muon:chunks=false", [("blocks.0.attn.to_qkv.weight", whole)], 1e-2)
    for seed in range(3):
        fused.grad = whole.grad = drawn(24, 8, seed=seed)
        for block, gradient in zip(blocks, fused.grad.chunk(3), strict=True):
            block.grad = gradient
        for optimizer in (apart, together, unlike):
            optimizer.step()
    torch.testing.assert_close(fused, torch.cat(blocks), rtol=0, atol=1e-14)
    assert (fused - whole).abs().max() > 1e-3
    assert optimizer_parts(together)["chunks"] == {"blocks.0.attn.to_qkv.weight": 3}


@cases(
    ("name", "shape", "num"),
    [
        ("blocks.0.attn.to_qkv.weight", (16, 8), 1),  # by its name, it has three
        ("blocks.0.attn.to_q.weight", (24, 8), 1),
        ("blocks.0.attn.to_kv.weight", (16, 8), 2),
        ("transformer_blocks.0.norm1.linear.weight", (48, 8), 6),
        ("blocks.0.to_qkv.weight", (24, 8, 1, 1), 1),
    ],
)
def test_fused_projections_are_found_by_name_and_shape(name, shape, num):
    assert chunks_of(name, shape) == num


def dit():
    sizes = {"num_attention_heads": 1, "attention_head_dim": 8, "num_layers": 2, "norm_num_groups": 1}
    return DiTTransformer2DModel(**sizes, in_channels=1, out_channels=1, sample_size=4)


def others_of(model, **kwargs):
    return optimizer_parts(get_optimizer("muon", model.named_parameters(), 1e-3, **kwargs))["adamw"]["names"]


def test_what_is_not_hidden():
    others = others_of(UNet2DModel(**default_unet_config(8, 1, 100)))
    assert others["first and last layers"] == ["conv_in.weight", "conv_out.weight"]
    assert others["embeddings"] == ["time_embedding.linear_1.weight", "time_embedding.linear_2.weight"]
    assert all(name.endswith("time_emb_proj.weight") for name in others["modulation"])
    others = others_of(dit())
    assert {name.split(".")[-2] for name in others["embeddings"]} == {"proj", "linear_1", "linear_2", "embedding_table"}
    assert others["modulation"] == [f"transformer_blocks.{block}.norm1.linear.weight" for block in (0, 1)]


def test_patterns_change_it():
    others = others_of(dit(), hidden=["*.norm1.linear.weight", "proj_out_1.weight"], adamw=["*.0.norm1.*", "*to_q*"])
    assert others["first and last layers"] == ["proj_out_2.weight"]
    assert "modulation" not in others
    assert {"transformer_blocks.0.norm1.linear.weight", "transformer_blocks.1.attn1.to_q.weight"} <= {*others["by adamw="]}


def test_layers_of_a_lora_are_neither_first_nor_last():
    names = [f"blocks.{block}.attn.to_q.lora_{factor}.default.weight" for block in (0, 1) for factor in "AB"]
    assert all(layer.role == HIDDEN for layer in layers_of([(name, torch.zeros(4, 4)) for name in names]))


@cases(
    ("spec", "is_named", "message"),
    [
        ("muon:hidden=[nothing*]", True, r"hidden='nothing\*' of 'muon': must be patterns of names of matrices"),
        ("muon:adamw=[1.*]", False, r"adamw='1\.\*' of 'muon' needs the names.*model\.named_parameters\(\)"),
        ("muon:adamw=[*]", True, "finds no weights of hidden layers"),
    ],
)
def test_patterns_that_cannot_be(spec, is_named, message):
    model = network()
    with pytest.raises(LabError, match=message):
        get_optimizer(spec, model.named_parameters() if is_named else model.parameters(), 1e-3)


@cases("name", ["adamw", "sgd"])
def test_other_optimizers_take_names_too(name):
    model = network()
    plain = get_optimizer(name, model.parameters(), 1e-3).state_dict()
    assert get_optimizer(name, model.named_parameters(), 1e-3).state_dict() == plain
    group = get_optimizer(name, [{"params": model.named_parameters(), "lr": 1e-2}], 1e-3).param_groups[0]
    assert all(map(torch.equal, group["params"], model.parameters()))


def test_what_went_where_in_words():
    words = parts_in_words(optimizer_parts(get_optimizer("muon", dit().named_parameters(), 1e-3)))
    assert words == (
        "Muon for 12 weights of hidden layers (1,536 numbers); AdamW for first and last layers (2), embeddings (7), "
        "modulation (2), biases and norms (21)"
    )


def test_weights_that_move_are_followed():
    model = network()
    optimizer = get_optimizer("muon", model.parameters(), 1e-3)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # what model.to(device) does
    before = copy.deepcopy(model.state_dict())
    backward(model, 0)
    optimizer.step()
    assert all(not torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.slow
def test_a_run_says_and_records_what_went_where(tmp_path, capsys):
    options = {"dataset_name": "moons", "max_train_steps": 2, "evaluation": False, "optimizer": "muon"}
    train(TrainingConfig(**options, output_dir=str(tmp_path / "run")))
    parts = runs.read_record(tmp_path / "run")["train"]["optimizer_parts"]
    assert parts["muon"]["names"]
    assert parts["adamw"]["names"]["first and last layers"]
    assert capsys.readouterr().out.count("Optimizer: Muon for ") == 1
