"""Samplers that follow the losses of unmodified scripts."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from test_launch import launch
from test_timesteps_hook import SCRIPTS, run, timesteps

from diffusers_lrlab import get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.core.streams import stream_generator
from diffusers_lrlab.diffusers_plugin.hooks.observed_losses import LossesHook
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.installed_hooks import InstalledHooks
from diffusers_lrlab.launch import make_parser

INFONOISE = "infonoise:num_bins=4,warmup_updates=2,refresh_every=1,min_count=1,uniform_share=0.1"
SECOND_MOMENT = "loss_second_moment:history=1,uniform_share=0.5"


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
    ("arguments", "spec", "weighting"),
    [
        ([], INFONOISE, None),
        ([], INFONOISE, "min_snr"),
        (["--max_train_steps=16"], SECOND_MOMENT, None),
    ],
    ids=["infonoise", "weighted", "second_moment"],
)
def test_it_follows_the_losses_of_single_images(tmp_path, arguments, spec, weighting):
    options = [f"--timestep_sampler={spec}", "--strict", *([f"--loss_weighting={weighting}"] if weighting else [])]
    (done,), stderr = run(tmp_path / "run", "ddpm", "--train_batch_size=512", *arguments, options=options)
    scheduler = DDPMScheduler()
    sampler, weights = get_timestep_sampler(spec, noise_scheduler=scheduler), None
    if weighting:
        weights = get_loss_weighting(weighting, scheduler)
        sampler.losses_are("epsilon", lambda: weights.table)
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


def test_losses_of_an_update_that_a_gradient_scaler_left_out_are_left_out():
    observed = []

    class Sampler:
        def observe(self, timesteps, losses):
            observed.append((timesteps.tolist(), losses.tolist()))

    hook = LossesHook.__new__(LossesHook)
    hook.timesteps = type("Hook", (), {"sampler": Sampler()})()
    hook._seen, hook._update = [torch.tensor([[1.0, 2.0], [0.5, 0.25]])], 3
    hook._at_update(3)  # drawn again
    assert observed == []
    hook._seen, hook._update = [torch.tensor([[1.0, 2.0], [0.5, 0.25]]), torch.tensor([[5.0], [2.0]])], 3
    hook._at_update(4)
    assert observed == [([1, 2, 5], [0.5, 0.25, 2.0])]
    assert hook._seen == []


def test_other_samplers_need_no_losses():
    for spec, is_there in ((INFONOISE, True), ("logit_normal", False)):
        options = make_parser().parse_args([f"--timestep_sampler={spec}", str(SCRIPTS["ddpm"])])
        with Patches() as patches:
            assert ("losses" in InstalledHooks(options, None, patches).made) == is_there


@pytest.mark.parametrize("options", [[f"--timestep_sampler={INFONOISE}"], ["--log_timesteps"]])
def test_losses_that_cannot_be_seen_are_refused(tmp_path, options):
    """Scripts for flow matching reduce them without a function that could be replaced."""
    said = launch(SCRIPTS["flow"], f"--output_dir={tmp_path}", options=[*options, "--strict"], expect=2)
    assert f"{options[0].partition('=')[0]} cannot be used in this script: it does not call F.mse_loss" in said
