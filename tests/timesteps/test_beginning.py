"""When a density that waits for losses begins: forecast, refused where it cannot, warned of, and noted."""

import json
import math

import numpy as np
import pytest
import torch
from continued_runs import SMALL, new_run
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from helpers import load_data_once
from made_up_studies import made_up_study
from runs import read_record
from small_studies import BASE, SPEC
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig, get_timestep_sampler, register_loss_weighting
from diffusers_lrlab.study.report.sentences import limitations
from diffusers_lrlab.study.run import warnings_before
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.timesteps.beginning import Beginning, Guards
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.resolve import resolve_config

FLOW = FlowMatchEulerDiscreteScheduler()
SHORT = "infonoise:num_bins=2,warmup_updates=2,refresh_every=2,min_count=1"


def begun_at(sampler, batch_size, seed, num_updates=400):
    """The update at which the sampler itself begins, with losses of its own draws."""
    generator = torch.Generator().manual_seed(seed)
    for update in range(num_updates):
        drawn = sampler.sample(batch_size, update, generator)
        sampler.observe(drawn, torch.rand(batch_size, generator=generator) + 0.1)
        if sampler.began():
            return sampler.began()
    return math.inf


@cases("scheduler", [FLOW, DDPMScheduler()])
def test_half_of_all_runs_begin_by_the_update_of_the_forecast(scheduler):
    spec = "infonoise:num_bins=10,warmup_updates=0,refresh_every=4,min_count=2"
    begun = [begun_at(get_timestep_sampler(spec, noise_scheduler=scheduler), 64, seed) for seed in range(30)]
    expected = get_timestep_sampler(spec, noise_scheduler=scheduler).beginning(64, 1000)
    assert expected.update == pytest.approx(np.median(begun), rel=0.25, abs=4)
    late = expected.guards.update_of(0.999, 64)
    assert max(begun) <= 1.3 * late


def test_the_chance_is_that_of_counts_of_draws():
    masses = np.array([0.01, 0.02, 0.3, 0.67])
    guards = Guards(masses, min_count=3, warmup_updates=0, refresh_every=1)
    counts = np.random.default_rng(0).multinomial(250, masses, size=20_000)
    assert guards.chance(250) == pytest.approx((counts >= 3).all(axis=1).mean(), abs=0.01)
    assert guards.chance(11) == 0  # four parts of three losses


@cases(
    ("guards", "num_updates", "why"),
    [
        ({"warmup_updates": 500, "refresh_every": 100}, 500, r"first density is due at update 500 \(warmup_updates"),
        (
            {"warmup_updates": 1, "refresh_every": 100},
            100,
            "due at update 100 .* lower warmup_updates and refresh_every to 25",
        ),
        ({"min_count": 20}, 9, "4 parts with 20 losses each take 80 images, but 64 are seen"),
        ({"masses": [0.5, 0.0, 0.5]}, 100, "uniform never draws 1 of its 3 parts"),
    ],
)
def test_what_cannot_begin_is_refused(guards, num_updates, why):
    guards = {"masses": [0.25] * 4, "min_count": 1, "warmup_updates": 0, "refresh_every": 1, **guards}
    beginning = Beginning(Guards(**guards | {"masses": np.array(guards["masses"])}), 8, num_updates)
    assert beginning.chance == 0
    with pytest.raises(LabError, match=f"--timestep_sampler infonoise: must be able to begin in .*{why}"):
        beginning.check("infonoise", "uniform")


def test_a_run_of_16_images_an_update_is_told_what_it_lacks():
    """The default guards, on 1,000 noise levels of flow matching: once, such runs stayed uniform to the end, unnoticed."""
    spec = "infonoise:warmup_updates=200,refresh_every=50"
    warning = get_timestep_sampler(spec, noise_scheduler=FLOW).beginning(16, 1000).warning("infonoise", "uniform")
    assert "with 16 images an update, half of all runs begin by update 1,750" in warning
    assert (
        "This run has 1,000 updates and begins with a probability of below 1 %. Hint: set min_count=2, with which it begins"
        in warning
    )
    helped = get_timestep_sampler(f"{spec},min_count=2", noise_scheduler=FLOW).beginning(16, 1000)
    assert helped.warning("infonoise", "uniform") is None
    assert helped.guards.update_of(0.9, 16) <= 500
    assert get_timestep_sampler("loss_second_moment", noise_scheduler=FLOW).beginning(16, 1000) is None


def test_a_long_run_warns_of_nothing_and_its_plan_names_the_update():
    options = {"dataset_name": "moons", "train_batch_size": 64, "max_train_steps": 3000}
    texts = []
    for sampler in (SHORT, "infonoise:min_count=1900"):
        config = resolve_config(TrainingConfig(timestep_sampler=sampler, **options))
        data = load_data_once(config)
        texts.append(describe_plan(make_plan(config, data, None)))
    assert "; its own density from about update 2 on, with a probability of 100 % before the end" in texts[0]
    assert "keeps the density" not in texts[0]
    assert "'infonoise' keeps the density uniform until its warm-up is over" in texts[1]


def test_noise_levels_that_the_loss_leaves_out_are_not_waited_for():
    """Those of the upper half of the timesteps: they are no part, and their draws do not count."""
    options = {"dataset_name": "moons", "max_train_steps": 3000, "timestep_sampler": "infonoise"}
    with LOSS_WEIGHTINGS.temporarily():
        register_loss_weighting("lower_half", description="of a test", source="this test")(
            lambda levels: (np.arange(len(levels.snr)) < len(levels.snr) / 2).astype(float)
        )
        masses = []
        for weighting in ("none", "lower_half"):
            config = resolve_config(TrainingConfig(loss_weighting=weighting, **options))
            masses.append(make_plan(config, load_data_once(config), None).beginning.guards.masses)
    assert masses[0].sum() == pytest.approx(1)
    assert masses[1].sum() == pytest.approx(0.5)
    assert len(masses[1]) < len(masses[0])


def test_a_run_prints_and_records_the_update_and_its_card_shows_it(tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(SMALL))
    run = new_run(tmp_path, "run", "constant", 8, timestep_sampler=SHORT, logging_steps=3)
    assert "infonoise: its own density of the timesteps began at update 2." in capsys.readouterr().err
    assert read_record(run)["train"]["timestep_density_began"] == 2
    assert "update 2; `uniform` until then" in (run / "README.md").read_text()


def test_a_run_in_which_it_never_began_says_so(tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(SMALL))
    never = "infonoise:num_bins=64,warmup_updates=2,refresh_every=2,min_count=1"
    run = new_run(tmp_path, "run", "constant", 8, timestep_sampler=never, objective="flow_matching:num_steps=1000")
    printed = capsys.readouterr().out
    assert "warning  'infonoise' keeps the density uniform" in printed
    assert "infonoise: its own density of the timesteps never began; uniform was used for 8 updates." in printed
    assert read_record(run)["train"]["timestep_density_began"] is None
    assert "never: all updates had `uniform`" in (run / "README.md").read_text()


def test_a_study_warns_before_its_runs(tmp_path):
    arms = {
        "uniform": {},
        "learned": {"timestep_sampler": "infonoise:warmup_updates=10,refresh_every=10,num_bins=8,min_count=40"},
    }
    base = {key: value for key, value in BASE.items() if key != "model_config_name_or_path"}
    spec = load_spec({**SPEC, "base": base, "arms": arms, "baseline": "uniform", "datasets": ["dino"]})
    (warning,) = warnings_before(spec, expand(spec), StudyContext(StudyFolder(tmp_path / "study"), quiet=True))
    assert warning.startswith("In the arm 'learned' on 'dino': 'infonoise' keeps the density uniform")


def test_a_card_of_a_study_says_in_which_runs_it_never_began():
    def change(run):
        if run.arm == "b":
            run.record["train"]["timestep_density_began"] = None if run.seed else 300
            run.config["timestep_sampler_kwargs"] = {"before": "uniform"}
        return run

    results, summary = made_up_study(("a", "b"), ("dino",), change=change)
    expected = "The density of the timesteps of b on dino never began in 4 of 5 runs: what is compared there is the density"
    assert any(text.startswith(expected) for text in limitations(results, summary))
