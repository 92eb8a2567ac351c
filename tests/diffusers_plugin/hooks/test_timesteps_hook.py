"""Timesteps of third-party scripts for DDPM and for flow matching, in real processes."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, PNDMScheduler
from scipy.stats import chisquare
from test_launch import launch

from diffusers_lrlab import get_timestep_sampler
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.hooks.timesteps import TimestepHook, _is_index_scheduler
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.host.source import HostScript, NotRecognised

FOLDER = Path(__file__).parents[2] / "scripts"
SCRIPTS = {name: FOLDER / f"{name}_script.py" for name in ("ddpm", "flow")}


def run(folder, name, *arguments, options=(), **how):
    """What a script did: its rows, its weights, and what the launcher said."""
    folder.mkdir(exist_ok=True)
    stderr = launch(FOLDER / f"{name}_script.py", f"--output_dir={folder}", *arguments, options=options, **how)
    done = [json.loads(path.read_text()) for path in sorted(folder.glob("rows-*.json"))]
    return done, stderr


def timesteps(rows):
    """As they grow with the noise, of either form."""
    return [np.array(row["timesteps"] if "timesteps" in row else 999 - np.array(row["indices"])) for row in rows]


@pytest.mark.parametrize("name", SCRIPTS)
def test_uniform_changes_nothing(tmp_path, name):
    (bare,), _ = run(tmp_path / "bare", name)
    (hooked,), stderr = run(tmp_path / "hooked", name, options=["--timestep_sampler=uniform"])
    assert hooked == bare
    assert "--timestep_sampler uniform: timesteps of 6 batches replaced." in stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_draws_follow_the_density_of_their_update(tmp_path, name):
    """At the first, a middle and the last update of a curriculum; other numbers of the script stay as they were."""
    spec, size = "clts:sigma=0.5", 64
    arguments = [f"--train_batch_size={size}", "--gradient_accumulation_steps=8"]
    (bare,), _ = run(tmp_path / "bare", name, *arguments)
    (hooked,), _ = run(tmp_path / "hooked", name, *arguments, options=[f"--timestep_sampler={spec}"])
    assert [row["after"] for row in hooked["rows"]] == [row["after"] for row in bare["rows"]]
    scheduler = DDPMScheduler() if name == "ddpm" else None
    sampler = get_timestep_sampler(spec, 1000, 6, scheduler)
    for update in (0, 3, 5):
        drawn = np.concatenate(timesteps(row for row in hooked["rows"] if row["update"] == update))
        expected = sampler.probabilities(update).numpy().reshape(10, 100).sum(1)
        assert len(drawn) == 512
        assert chisquare(np.bincount(drawn // 100, minlength=10), expected * 512).pvalue > 1e-4, update


def test_processes_and_accumulation_share_one_batch(tmp_path):
    """The global batch of an update is the same however it is divided; each process and micro-batch has its own part."""
    options = ["--timestep_sampler=logit_normal", "--strict"]
    whole = run(tmp_path / "1", "ddpm", "--train_batch_size=8", "--seed=3", options=options)[0]
    divided = ("--train_batch_size=2", "--gradient_accumulation_steps=2", "--seed=3")
    split = run(tmp_path / "2", "ddpm", *divided, options=options, processes=2)[0]
    for update in range(6):
        together = [row["timesteps"] for row in whole[0]["rows"] if row["update"] == update]
        parts = zip(*([row["timesteps"] for row in rank["rows"] if row["update"] == update] for rank in split), strict=True)
        assert [t for row in together for t in row] == [t for micro in parts for part in micro for t in part]


def test_strata_span_updates_where_batches_are_small(tmp_path):
    """64 draws of batch 1 have one in each 64th of the timesteps."""
    arguments = ["--train_batch_size=1", "--max_train_steps=128"]
    (done,), _ = run(tmp_path / "run", "ddpm", *arguments, options=["--timestep_sampler=stratified"])
    drawn = np.concatenate(timesteps(done["rows"]))
    for window in drawn.reshape(2, 64):
        borders = np.arange(65) * 1000 / 64
        assert (np.sort(window) >= np.floor(borders[:-1])).all()
        assert (np.sort(window) < borders[1:]).all()


def test_noise_schedulers_beside_the_scripts_own_must_agree():
    """Such as those of a pipeline that has made the class images, if it is still there."""
    with Patches() as patches:
        clock = SimpleNamespace(run=SimpleNamespace(patches=patches))
        hook = TimestepHook(HostScript(str(SCRIPTS["ddpm"])), clock, None, "--log_timesteps")
        hook.install()
        kept = [DDPMScheduler(), PNDMScheduler(), EulerDiscreteScheduler(beta_schedule="scaled_linear")]
        matches = functools.partial(_is_index_scheduler, num=1000)
        hook._begin(matches)
        np.testing.assert_allclose(hook.levels.alphas_cumprod, kept[0].alphas_cumprod, rtol=1e-6)
        other = DDPMScheduler(beta_schedule="scaled_linear")
        with pytest.raises(NotRecognised, match="is ambiguous or missing; found: DDPMScheduler, PNDMScheduler"):
            hook._begin(matches)
        del other
        hook._begin(matches)


def test_an_update_that_a_gradient_scaler_left_out_is_drawn_again():
    """By all its micro-batches, where fp16 overflows: it is no draw too many."""
    accelerator = SimpleNamespace(gradient_accumulation_steps=2, num_processes=1, process_index=0)
    run = SimpleNamespace(accelerator=accelerator, arguments={}, num_skipped=0)
    clock = SimpleNamespace(run=run, update=3)
    hook = TimestepHook(HostScript(str(SCRIPTS["ddpm"])), clock, "logit_normal", "--timestep_sampler")
    hook.sampler = get_timestep_sampler("logit_normal", 1000)
    drawn = []
    for skipped in (0, 0, 1, 1):
        run.num_skipped = skipped
        drawn.append(hook._sampled(torch.zeros(4).long()).tolist())
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    with pytest.raises(LabError, match="draws timesteps 3 times in an update of 2 micro-batches"):
        hook._sampled(torch.zeros(4).long())


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        ("ddpm", ["--draw_twice"], ["--timestep_sampler=logit_normal"], "draws timesteps 2 times in an update"),
        ("ddpm", ["--snr_gamma=5"], ["--loss_weighting=min_snr"], "weights losses itself (--snr_gamma 5.0)"),
        ("flow", ["--weighting_scheme=cosmap"], ["--loss_weighting=p2"], "weights losses itself (--weighting_scheme"),
        ("ddpm", [], ["--loss_weighting=learned_log_variance"], "needs the loss of each image"),
    ],
    ids=["drawn_twice", "snr_gamma", "weighting_scheme", "learned_weighting"],
)
def test_what_is_refused(tmp_path, name, arguments, options, message):
    done, stderr = run(tmp_path / "run", name, *arguments, options=options, expect=2)
    assert message in stderr
    assert not done


def test_a_hook_with_nothing_to_act_on(tmp_path):
    """Its text has what is hooked, in a place that is never reached: said, or with `--strict` an error."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nif not torch.__version__:\n    t = torch.randint(0, s.config.num_train_timesteps, (3,))\n"
    )
    unused = "--timestep_sampler logit_normal: timesteps of 0 batches replaced."
    assert unused in launch(script, options=["--timestep_sampler=logit_normal"])
    assert f"error: {unused} (--strict)" in launch(script, options=["--timestep_sampler=logit_normal", "--strict"], expect=2)
