"""Samplers that follow the losses of unmodified scripts, for DDPM and for flow matching."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from test_launch import launch
from test_resume_hook import SCRIPT as RESUMED
from test_resume_hook import end_of
from test_timesteps_hook import SCRIPTS, run, timesteps

from diffusers_lrlab import get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.core.streams import stream_generator
from diffusers_lrlab.diffusers_plugin.hooks.observed_losses import LossesHook
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.installed_hooks import InstalledHooks
from diffusers_lrlab.launch import make_parser

INFONOISE = "infonoise:num_bins=4,warmup_updates=2,refresh_every=1,min_count=1,uniform_share=0.1"
SECOND_MOMENT = "loss_second_moment:history=1,uniform_share=0.5"


def flow_form(tmp_path: Path) -> Path:
    """The script that resumes, with the lines of scripts for flow matching."""
    text = RESUMED.read_text()
    for old, new in [
        ("from diffusers import DDPMScheduler", "from diffusers import FlowMatchEulerDiscreteScheduler"),
        ("import torch.nn.functional as F\n", ""),
        (
            "from diffusers.optimization import get_scheduler\n",
            "from diffusers.optimization import get_scheduler\n"
            "from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3\n",
        ),
        ("DDPMScheduler(num_train_timesteps=1000)", "FlowMatchEulerDiscreteScheduler(shift=3.0)"),
        (
            "timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=images.device).long()",
            "u = compute_density_for_timestep_sampling('none', bsz, 0.0, 1.0, 1.29)\n"
            "                indices = (u * noise_scheduler.config.num_train_timesteps).long()\n"
            "                sigmas = noise_scheduler.sigmas[indices][:, None]",
        ),
        ("noise_scheduler.add_noise(images, noise, timesteps)", "(1.0 - sigmas) * images + sigmas * noise"),
        (
            'loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")',
            "weighting = compute_loss_weighting_for_sd3('none', sigmas)\n"
            "                errors = (prediction - (noise - images)) ** 2\n"
            "                loss = torch.mean((weighting * errors).reshape(bsz, -1), 1).mean()",
        ),
    ]:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    script = tmp_path / "flow_script.py"
    script.write_text(text)
    return script


def replayed(batches, sampler, weights=None):
    """The share of timesteps that are not those of a sampler that sees the errors that the script itself wrote down."""
    others = []
    for update, (drawn, errors) in enumerate(batches):
        expected = sampler.sample(len(drawn), update, stream_generator(0, "timesteps", update)).numpy()
        others.append((expected != drawn).mean())
        factors = 1.0 if weights is None else weights.table[torch.from_numpy(drawn)]
        sampler.observe(torch.from_numpy(drawn), torch.tensor(errors) * factors)
    return max(others)


def batches_of(done):
    return [(drawn, row["errors"]) for drawn, row in zip(timesteps(done["rows"]), done["rows"], strict=True)]


def has_adapted(drawn, update, spec, scheduler):
    first = get_timestep_sampler(spec, noise_scheduler=scheduler).sample(
        len(drawn), update, stream_generator(0, "timesteps", update)
    )
    return (first.numpy() != drawn).mean() > 0.5


@pytest.mark.parametrize(
    ("name", "arguments", "spec", "weighting"),
    [
        ("ddpm", [], INFONOISE, None),
        ("ddpm", [], INFONOISE, "min_snr"),
        ("flow", ["--shift=3"], INFONOISE, None),
        ("flow", [], INFONOISE, "p2"),
        ("flow", ["--max_train_steps=16"], SECOND_MOMENT, None),
    ],
    ids=["ddpm", "ddpm_weighted", "flow_shifted", "flow_weighted", "second_moment"],
)
def test_it_follows_the_losses_of_single_images(tmp_path, name, arguments, spec, weighting):
    options = [f"--timestep_sampler={spec}", "--strict", *([f"--loss_weighting={weighting}"] if weighting else [])]
    (done,), stderr = run(tmp_path / "run", name, "--train_batch_size=512", *arguments, options=options)
    shift = 3.0 if "--shift=3" in arguments else 1.0
    scheduler = DDPMScheduler() if name == "ddpm" else FlowMatchEulerDiscreteScheduler(shift=shift)
    sampler, weights = get_timestep_sampler(spec, noise_scheduler=scheduler), None
    if weighting:
        weights = get_loss_weighting(weighting, scheduler)
        sampler.losses_are("epsilon" if name == "ddpm" else "flow_velocity", lambda: weights.table)
    # The errors of a script for flow matching come by way of gradients, to the last digits of float32.
    assert replayed(batches_of(done), sampler, weights) < 0.01
    update = len(done["rows"]) - 1
    assert has_adapted(batches_of(done)[update][0], update, spec, scheduler)
    said = [
        "Its own density of the timesteps began at update 2.",
        "To keep its last density fixed in another run: --timestep_sampler",
    ]
    assert [each in stderr for each in said] == [spec == INFONOISE] * 2


@pytest.mark.parametrize(
    ("min_count", "expect", "said"),
    [
        (
            12,
            0,
            ["begins with a probability of below 1 %", "density of the timesteps has not begun: it waits for its warm-up"],
        ),
        (99, 2, ["must be able to begin in 4 updates of 16 images, but 4 parts with 99 losses each take 396 images"]),
    ],
    ids=["warned", "refused"],
)
def test_a_density_that_does_not_begin_is_not_silent(tmp_path, min_count, expect, said):
    spec = INFONOISE.replace("min_count=1", f"min_count={min_count}")
    arguments = [f"--output_dir={tmp_path}", "--train_batch_size=16", "--max_train_steps=4"]
    stderr = launch(SCRIPTS["ddpm"], *arguments, options=[f"--timestep_sampler={spec}"], expect=expect)
    assert [each for each in said if each not in stderr] == [], stderr


def test_two_processes_share_statistics_and_one_batch(tmp_path):
    ranks, _ = run(
        tmp_path / "run",
        "ddpm",
        "--train_batch_size=16",
        "--gradient_accumulation_steps=2",
        "--max_train_steps=5",
        options=[f"--timestep_sampler={INFONOISE}", "--strict"],
        processes=2,
    )
    batches = []
    for update in range(5):
        micro = zip(*([row for row in rank["rows"] if row["update"] == update] for rank in ranks), strict=True)
        rows = [row for parts in micro for row in parts]
        drawn, errors = ([value for row in rows for value in row[key]] for key in ("timesteps", "errors"))
        batches.append((np.array(drawn), errors))
    assert replayed(batches, get_timestep_sampler(INFONOISE, noise_scheduler=DDPMScheduler())) < 0.01
    assert has_adapted(batches[4][0], 4, INFONOISE, DDPMScheduler())


def test_sd3_scripts_whose_loss_is_of_the_data(tmp_path):
    options = [f"--timestep_sampler={INFONOISE}"]
    arguments = ["--train_batch_size=256", "--precondition_outputs=1"]
    (done,), _ = run(tmp_path / "run", "flow", *arguments, options=options)
    sampler = get_timestep_sampler(INFONOISE, noise_scheduler=FlowMatchEulerDiscreteScheduler())
    sampler.losses_are("sample")
    assert replayed(batches_of(done), sampler) < 0.01


def test_losses_of_an_update_that_a_gradient_scaler_left_out_are_left_out():
    observed = []

    class Sampler:
        def observe(self, timesteps, losses):
            observed.append((timesteps.tolist(), losses.tolist()))

    hook = LossesHook.__new__(LossesHook)
    hook.timesteps = type("Hook", (), {"sampler": Sampler()})()
    hook._resumed, hook._seen, hook._update = {}, [torch.tensor([[1.0, 2.0], [0.5, 0.25]])], 3
    hook._at_update(3)  # drawn again
    assert observed == []
    hook._seen, hook._update = [torch.tensor([[1.0, 2.0], [0.5, 0.25]]), torch.tensor([[5.0], [2.0]])], 3
    hook._at_update(4)
    assert observed == [([1, 2, 5], [0.5, 0.25, 2.0])]
    assert hook._seen == []


def test_other_samplers_need_no_losses():
    for spec, is_there in ((INFONOISE, True), ("logit_normal", False)):
        options = make_parser().parse_args([f"--timestep_sampler={spec}", str(RESUMED)])
        with Patches() as patches:
            assert ("losses" in InstalledHooks(options, None, patches).made) == is_there


def test_losses_that_cannot_be_seen_are_refused(tmp_path):
    script = tmp_path / "script.py"
    text = SCRIPTS["flow"].read_text()
    script.write_text(
        text.replace("compute_loss_weighting_for_sd3(weighting_scheme=args.weighting_scheme, sigmas=sigmas)", "sigmas")
    )
    options = [f"--timestep_sampler={INFONOISE}", "--strict"]
    assert "the losses of single images are not visible" in launch(
        script, f"--output_dir={tmp_path}", options=options, expect=2
    )


@pytest.mark.slow
@pytest.mark.parametrize(("form", "spec"), [("ddpm", INFONOISE), ("flow", INFONOISE)], ids=["ddpm", "flow"])
def test_killed_scripts_end_with_the_same_bits(tmp_path, form, spec):
    script = flow_form(tmp_path) if form == "flow" else RESUMED
    arguments = ["--checkpointing_steps=2", "--train_batch_size=22"]
    options = [f"--timestep_sampler={spec}"]
    whole, _ = end_of(tmp_path / "whole", script, *arguments, options=options)
    killed, stderr = end_of(tmp_path / "killed", script, *arguments, kills=(6, 5), options=options)
    assert killed == whole
    assert "It resumed after update" in stderr
    assert "--timestep_sampler 'piecewise:" in stderr, "it did adapt"
