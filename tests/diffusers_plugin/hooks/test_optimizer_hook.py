"""Other optimizers in third-party scripts, against the same ones made by hand."""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launched_here import script_of
from test_timesteps_hook import run

from diffusers_lrlab import get_optimizer
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.hooks.optimizer import OptimizerHook, recognise
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.host.source import NotRecognised

TEXT = """
import torch

def make_optimizer(groups):
    optimizer_class = torch.optim.AdamW
    optimizer = optimizer_class(groups, lr=1e-2, betas=(0.8, 0.99), weight_decay=0.02, eps=1e-7)
    return optimizer

torch.manual_seed(0)
text_encoder, unet = torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 3))
groups = [{"params": unet.parameters(), "lr": 2e-2}, {"params": text_encoder.parameters(), "weight_decay": 0.1}]
optimizer = make_optimizer(groups)
"""


OPTIONAL = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("lion_pytorch", "prodigyopt", "schedulefree")),
    reason="the optimizers of other packages are not installed",
)


@pytest.fixture
def run_hooked(tmp_path):
    """Runs a text as a script whose optimizer is replaced; its variables, the hook, and what was said."""

    def run(spec, text=TEXT):
        script, said = script_of(tmp_path, text), []
        with Patches() as patches:
            host = SimpleNamespace(warn=said.append, on_prepared=[], optimizer=None, patches=patches)
            hook, variables = OptimizerHook(script, host, spec), {}
            hook.install()
            exec(compile(text, script.path, "exec"), variables)
        return variables, hook, said

    return run


def trained(variables, optimizer):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        loss = variables["unet"](variables["text_encoder"](torch.randn(4, 3, generator=generator))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.clone() for name in ("unet", "text_encoder") for parameter in variables[name].parameters()]


@pytest.mark.parametrize(
    ("spec", "by_hand", "said"),
    [
        ("adamw:beta2=0.9", "adamw:beta1=0.8,beta2=0.9,eps=1e-7,weight_decay=0.02", "Not used: beta2 0.99."),
        pytest.param("lion", "lion:weight_decay=0.02", "Not used: betas (0.8, 0.99), eps 1e-07.", marks=OPTIONAL),
        ("muon:momentum=0.9", "muon:momentum=0.9,weight_decay=0.02", "learning rate 0.01, weight_decay 0.02."),
        ("adafactor", "adafactor:weight_decay=0.02", "Not used: betas"),
    ],
)
def test_the_optimizer_that_was_asked_for_is_that_made_by_hand(run_hooked, spec, by_hand, said):
    """On the script's groups, with their learning rates and weight decay: weights to the bit."""
    variables, hook, warnings = run_hooked(spec)
    hooked = trained(variables, variables["optimizer"])
    own = {}
    exec(compile(TEXT.replace("optimizer = make_optimizer(groups)", ""), "by hand", "exec"), own)
    for group, model in zip(own["groups"], ("unet", "text_encoder"), strict=True):
        group["params"] = [(f"{model}.{name}", parameter) for name, parameter in own[model].named_parameters()]
    by_hand = get_optimizer(by_hand, own["groups"], 1e-2)
    assert type(variables["optimizer"]) is type(by_hand)
    assert all(map(torch.equal, hooked, trained(own, by_hand)))
    assert said in warnings[0]
    assert hook.report() == f"--optimizer: {spec.partition(':')[0]} trained 31 parameters."


def test_settings_in_images(run_hooked):
    """In place of the script's, also of its groups."""
    variables, _, said = run_hooked("muon:tau=6000,beta2_half_life=900,images_per_update=12")
    assert "weight_decay 0.02" in said[0].partition("Not used:")[2]
    groups = variables["optimizer"].param_groups
    assert {group["weight_decay"] for group in groups} == {12 / (1e-2 * 6000)}
    assert {group["betas"][1] for group in groups if "betas" in group} == {0.5 ** (12 / 900)}


def test_a_name_in_a_whole_model_counts_more_than_one_in_a_part_of_it(run_hooked):
    """As of the embeddings that textual inversion trains, for which it asks the layer."""
    text = TEXT.replace("text_encoder.parameters()", "text_encoder.layer.parameters()")
    text = text.replace("torch.nn.Linear(3, 4), ", "torch.nn.Sequential(), ").replace(
        "groups = [", "text_encoder.layer = torch.nn.Linear(3, 4)\ntext_encoder.requires_grad_(True)\ngroups = ["
    )
    variables, _, (_, said) = run_hooked("muon:hidden=[layer.weight]", text)
    assert said.startswith("muon: Muon for 2 weights of hidden layers (24 numbers); AdamW for biases and norms")
    assert variables["optimizer"].parts["muon"]["names"] == ["0.weight", "layer.weight"]


@OPTIONAL
def test_what_is_refused(run_hooked):
    with pytest.raises(LabError, match=r"prodigy finds one learning rate for all parameters.*\(0.01, 0.02\)"):
        run_hooked("prodigy")
    with pytest.raises(LabError, match="more than one optimizer"):
        run_hooked("lion", text=TEXT + "optimizer = make_optimizer([text_encoder.weight])\n")
    with pytest.raises(LabError, match="'schedulefree_adamw' trains weights other than those to keep"):
        run_hooked("schedulefree_adamw")
    with pytest.raises(LabError, match=r"the script indexes parameter groups \(line 13\), whose order would change"):
        run_hooked("muon", text=TEXT + "optimizer.param_groups[0]['lr'] = 0.0\n")
    _, hook, _ = run_hooked("lion")
    hook.run.optimizer = torch.optim.SGD([torch.ones(1)])
    with pytest.raises(LabError, match="trains with a SGD made in another file"):
        hook._check_prepared()
    saved = torch.optim.AdamW([torch.ones(1)]).state_dict()["param_groups"]
    with pytest.raises(LabError, match="--optimizer lion: must be the optimizer of the checkpoint, got .* the script's own"):
        hook._check_saved(saved)


def test_what_is_recognised(tmp_path):
    for text, reason in (("x = 1", "it makes no optimizer"), (f"{TEXT}\noptim2 = A(p, lr=1)", "it makes 2 optimizers")):
        with pytest.raises(NotRecognised, match=reason):
            recognise(script_of(tmp_path, text))
    assert recognise(script_of(tmp_path, TEXT)) == "the optimizer is replaced where it is made (line 6)"


def test_a_run_with_another_optimizer_resumes_to_the_bit(tmp_path):
    """Its schedule follows the script's clock in every group."""
    optimizer = "--optimizer=adamw:beta2_half_life=500,tau=2000,images_per_update=4"
    options = [optimizer, "--strict", "--strict_lr_audit"]
    (whole,), stderr = run(tmp_path / "whole", "two_models", "--checkpointing_steps=4", options=options)
    assert whole["optimizer"] == "AdamW"
    saved = tmp_path / "whole" / "checkpoint-4"
    group = torch.load(saved / "optimizer.bin", weights_only=True)["param_groups"][0]
    assert (group["betas"][1], group["weight_decay"]) == (0.5 ** (4 / 500), 0.2)
    assert "LR audit: 8 updates, every value that follows the clock was as expected." in stderr
    for row in whole["rows"]:
        np.testing.assert_allclose(row["lrs"][1], row["lrs"][0] * 0.5)
    (resumed,), _ = run(tmp_path / "whole", "two_models", "--resume_from_checkpoint=checkpoint-4", options=options)
    assert resumed["weights"] == whole["weights"]
    others = ["--optimizer=rmsprop"]
    _, stderr = run(tmp_path / "whole", "two_models", "--resume_from_checkpoint=checkpoint-4", options=others, expect=2)
    assert "--optimizer rmsprop: must be the optimizer of the checkpoint, got a checkpoint of adamw. Hint: resume" in stderr


@pytest.mark.slow
def test_processes_and_accumulation(tmp_path):
    """Both processes end with the same weights."""
    options = ["--optimizer=muon", "--strict_lr_audit"]
    ranks, stderr = run(tmp_path / "2", "two_models", "--gradient_accumulation_steps=2", options=options, processes=2)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert "LR audit: 8 updates, every value" in stderr
