"""`lrlab predict` and `lrlab preview --predict`: from folders of runs and studies whose losses are made up by a law."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tables import cases

from diffusers_lrlab import lr_curve
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.manifest import with_sum
from diffusers_lrlab.diagnostics.timestep_log import TimestepLog, table_of_rows, write_timesteps
from diffusers_lrlab.evaluation.floor_of_data import Floor
from diffusers_lrlab.forecast.law_check import Check
from diffusers_lrlab.forecast.loss_laws import LAWS, RateSums
from diffusers_lrlab.run.known_floor import floor_of_run
from diffusers_lrlab.run.loss_curves import by_schedule, merged_parts, read_runs
from diffusers_lrlab.run.predict import forecast_loss
from diffusers_lrlab.schedules.resolve import resolve_schedule

RECORD = json.loads((Path(__file__).parents[2] / "model_cards" / "ddpm-digits-8" / "lrlab" / "run.json").read_text())
LENGTH, WARMUP, PEAK = 200, 10, 1e-3
SCHEDULES = ("constant_with_warmup", "cosine", "warmup_stable_decay:num_decay_steps=0.3")
UPDATES = np.arange(5, LENGTH + 1, 5)


def loss_of(spec, updates, length=LENGTH, peak=PEAK):
    """Losses of the annealing law."""
    sums = RateSums.of(lr_curve(spec, peak, WARMUP, length), WARMUP, updates, PEAK, LENGTH)
    columns = LAWS["annealing"].columns(sums, {"a": 0.6, "memory": 0.04})
    return 0.3 + columns @ [0.1, 0.2]


def config_of(spec, **changes):
    schedule = resolve_schedule(spec)
    own = {
        "lr_scheduler": schedule.name,
        "lr_scheduler_kwargs": schedule.kwargs,
        "max_train_steps": LENGTH,
        "num_epochs": None,
    }
    own |= {"lr_warmup_steps": WARMUP, "learning_rate": PEAK}
    return RECORD["config"] | own | changes


def run_folder(folder, spec, losses=None, **changes):
    """The folder of a run that nobody trained: its record and its log."""
    (folder / "lrlab").mkdir(parents=True)
    train = RECORD["train"] | {"num_updates": LENGTH, "peak_learning_rate": PEAK}
    record = RECORD | {"train": train, "config": config_of(spec, **changes)}
    (folder / "lrlab" / "run.json").write_text(json.dumps(record))
    losses = loss_of(spec, UPDATES) if losses is None else losses
    rows = [
        {"update": int(n), "validation_loss": float(x), "validation_loss_ema": 1.0}
        for n, x in zip(UPDATES, losses, strict=False)
    ]
    (folder / "lrlab" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs of three schedules."""
    home = tmp_path_factory.mktemp("runs")
    return [run_folder(home / str(index), spec) for index, spec in enumerate(SCHEDULES)]


def predict(capsys, *arguments, status=0, command="predict"):
    capsys.readouterr()
    assert main([command, *map(str, arguments)]) == status, capsys.readouterr().err
    return capsys.readouterr()


USUAL = ("--floor=0", "--law=annealing")


@pytest.mark.slow
@pytest.mark.pictures
def test_other_schedules_lengths_and_peaks_are_predicted(folders, capsys, tmp_path):
    asked = ("--lr_scheduler=rex", "--lr_scheduler=exponential", "--max_train_steps=400", "--learning_rate=5e-4")
    out = tmp_path / "losses.png"
    shown = predict(capsys, "--from", *folders, *asked, *USUAL, "--json", f"--out={out}").out
    found = json.loads(shown)
    assert found["check"]["is_passed"]
    assert found["check"]["law"] == "annealing"
    for one, spec in zip(found["predicted"], ("rex", "exponential"), strict=True):
        assert (one["schedule"], one["num_updates"], one["interval"]) == (spec, 400, None)
        expected = loss_of(spec, np.array(one["updates"]), 400, 5e-4)
        np.testing.assert_allclose(one["losses"], expected, rtol=1e-3)
        assert one["extrapolates"][0] == "2 times as long as the longest run"
    assert out.stat().st_size > 10_000
    own = json.loads(predict(capsys, "--from", *folders, *USUAL, "--json").out)["predicted"]
    assert [one["schedule"] for one in own] == list(SCHEDULES)
    text = predict(capsys, "--from", *folders, "--lr_scheduler=rex", *USUAL).out
    assert "Error of the last fifth of each schedule, predicted from the others:" in text
    assert f"{loss_of('rex', np.array([LENGTH]))[0]:.3g}" in text
    assert "There is no interval over seeds: it needs two seeds that all schedules share." in text
    assert "The law itself is off by" in text
    assert "The interval" not in text


def test_a_flag_that_is_repeated_adds_runs(folders, capsys):
    """Rather than the last one alone being used, without a word."""
    found = predict(capsys, "--from", folders[0], "--from", *folders[1:], *USUAL, "--json").out
    assert found == predict(capsys, "--from", *folders, *USUAL, "--json").out


def test_the_best_schedule_is_one_to_run(folders, capsys):
    found = json.loads(predict(capsys, "--from", *folders, "--best", *USUAL, "--json").out)["predicted"]
    finals = [one["final"] for one in found]
    assert finals[:5] == sorted(finals[:5])
    assert {one["schedule"] for one in found} >= {"cosine", "constant_with_warmup"}
    assert finals[0] <= finals[-1]
    text = predict(capsys, "--from", *folders, "--best", *USUAL).out
    assert f"--lr_scheduler={found[0]['schedule']} --max_train_steps=200" in text.replace("'", "")
    assert re.search(r"\n\d+ of 85 schedules are predicted within|\nNo other of the 85 schedules is predicted within", text)
    assert lr_curve(found[0]["schedule"], PEAK, WARMUP, LENGTH)[-1] < PEAK


def test_the_best_schedule_at_the_edge_of_the_search_is_told(folders):
    forecast = forecast_loss(folders, floor=0, law="annealing")
    longest = "Its decay takes 80% of the run, the longest that was searched, so a longer one may be better"
    shortest = "Its decay takes 5% of the run, the shortest that was searched, so a shorter one may be better"
    for spec, wanted in {
        "warmup_stable_decay:num_decay_steps=0.8,decay_type=linear": longest,
        "join:schedules=[constant|rex],boundaries=[0.2]": longest,
        "join:schedules=[constant|rex],boundaries=[0.95]": shortest,
        "warmup_stable_decay:num_decay_steps=0.3,decay_type=linear": "",
        "cosine": "",
    }.items():
        found = forecast.edge_in_words(forecast.forecaster.predict(forecast.candidate(spec)))
        assert found.startswith(wanted), spec
        assert bool(found) == bool(wanted), spec


def test_measured_losses_have_the_colours_of_their_schedules(folders):
    """That of a prediction for the same rates, else one of their own."""
    forecast = forecast_loss(folders, floor=0, law="annealing")
    predicted = [forecast.forecaster.predict(forecast.candidate(spec)) for spec in ("rex", "cosine")]
    shown = forecast.losses_to_draw(predicted)
    assert [one.color for one in shown.measured] == [2, 1, 3]  # of constant, cosine and WSD
    assert list(shown.predicted) == ["rex", "cosine"]
    for one, curve in zip(shown.measured, forecast.forecaster.curves, strict=True):
        np.testing.assert_array_equal(one.points, (curve.updates, curve.losses))


def test_a_failed_check_shows_no_forecast(tmp_path, capsys):
    rng = np.random.default_rng(0)
    walks = [1 + 0.02 * np.cumsum(rng.normal(size=len(UPDATES))) for _ in SCHEDULES]
    runs = [run_folder(tmp_path / str(i), spec, walks[i]) for i, spec in enumerate(SCHEDULES)]
    out = tmp_path / "losses.png"
    asked = ("--from", *runs, "--lr_scheduler=rex", "--floor=0", "--law=bound")
    text = predict(capsys, *asked, f"--out={out}", status=1).out
    assert "No forecast: a chosen law has an error of" in text
    assert "Predicted" not in text
    assert not out.exists()
    assert json.loads(predict(capsys, *asked, "--json", status=1).out)["predicted"] == []
    assert not forecast_loss(runs, floor=0, law="bound").forecaster.check.is_passed


def test_a_preview_refuses_a_schedule_before_it_reads_runs(capsys, tmp_path):
    asked = ["--num_training_steps=100", "--lr_scheduler=greedy", "--predict", tmp_path / "none"]
    assert (
        "--lr_scheduler 'greedy': must be a function of the clock"
        in predict(capsys, *asked, status=2, command="preview").err
    )


@pytest.mark.slow
@pytest.mark.pictures
def test_a_preview_draws_predicted_losses(folders, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.forecast.law_check.LAWS", {"annealing": LAWS["annealing"]})
    monkeypatch.setattr("diffusers_lrlab.run.predict._known_floor", lambda run: None)
    asked = ("--lr_scheduler=rex", "--num_training_steps=200", "--num_warmup_steps=10", "--learning_rate=1e-3", "--predict")
    text = predict(capsys, *asked, *folders, command="preview").out
    assert "predicted validation loss, from update 11" in text
    found = json.loads(predict(capsys, *asked, *folders, "--json", command="preview").out)
    assert found["forecast"]["predicted"][0]["final"] == pytest.approx(loss_of("rex", np.array([LENGTH]))[0], rel=1e-3)
    assert "lr" in found["schedules"][0]
    sizes = []
    for more in ([], ["--predict", *folders]):
        predict(capsys, *asked[:-1], f"--out={tmp_path / 'curve.png'}", *more, command="preview")
        sizes.append((tmp_path / "curve.png").stat().st_size)
    assert sizes[1] > 1.2 * sizes[0]
    monkeypatch.setattr(Check, "is_passed", False)
    text = predict(capsys, *asked, *folders, status=1, command="preview").out
    assert "No forecast" in text
    assert "redicted validation loss" not in text


@pytest.mark.slow
def test_the_floor_of_the_data_is_used(folders, monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.run.known_floor.MOST_IMAGES", 100)
    forecast = forecast_loss(folders[:1], law="bound")
    assert 0 < forecast.forecaster.floor < 1
    assert any(model.with_floor for model in forecast.forecaster.check.errors) or forecast.forecaster.check.notes


@cases(
    "changes, losses, arguments, message",
    [
        ({"spec": "reduce_lr_on_plateau"}, None, [], "its schedule reduce_lr_on_plateau follows a metric"),
        ({}, UPDATES[:0], [], "has no validation_loss of its held-out data"),
        ({}, [0.5], [], "must have 10 validation losses or more after its warm-up, got 0"),
        ({}, None, ["--law=multi-power"], "--law multi-power: must be fitted to 2 schedules or more, got 1 schedule"),
        ({}, None, ["--metric=kl"], "--metric 'kl': must be validation_loss or validation_loss_ema"),
        ({}, None, ["--floor=-1"], "--floor -1: must be a number in"),
        ({}, None, ["--lr_scheduler=greedy"], "--lr_scheduler 'greedy': must be a function of the clock to be predicted"),
        ({}, None, ["--best"], "--best True: must be left out beside --lr_scheduler, got both"),
        ({}, None, ["--max_train_steps=0"], "--max_train_steps 0: must be a whole number"),
        ({}, None, ["--arm=cosine"], "--arm has no effect without a study in --from"),
        ({}, None, ["--out=losses.txt"], "--out 'losses.txt' must end in .png"),
    ],
)
def test_wrong_input_is_refused(changes, losses, arguments, message, tmp_path_factory, capsys):
    folder = run_folder(tmp_path_factory.mktemp("wrong") / "run", **{"spec": "cosine", **changes}, losses=losses)
    floor = [] if any(one.startswith("--floor") for one in arguments) else ["--floor=0"]
    error = predict(capsys, "--from", folder, "--lr_scheduler=rex", *floor, *arguments, status=2).err
    assert message in error


def test_runs_must_differ_in_schedules_alone(tmp_path, capsys):
    runs = [run_folder(tmp_path / str(size), "cosine", train_batch_size=size) for size in (64, 128)]
    error = predict(capsys, "--from", *runs, "--lr_scheduler=rex", "--floor=0", status=2).err
    assert "got train_batch_size 64 and 128" in error
    assert (
        "must be the folder of a run or of a study"
        in predict(capsys, "--from", tmp_path, "--lr_scheduler=rex", "--floor=0", status=2).err
    )


def test_a_run_that_was_stopped_counts_as_far_as_it_came(tmp_path):
    run_folder(tmp_path / "run", "cosine", loss_of("cosine", UPDATES[:26]))
    (run,) = read_runs([tmp_path / "run"])
    assert (run.curve.num_updates, run.rates.num_updates) == (130, LENGTH)
    np.testing.assert_array_equal(run.curve.lrs, lr_curve("cosine", PEAK, WARMUP, LENGTH)[:130])


def test_the_beginning_of_a_longer_run_does_not_count_twice(tmp_path, capsys):
    """As the parent of an extended run, or a stopped run of another seed: both tell the check what it is to predict."""
    losses = loss_of("constant_with_warmup", UPDATES)
    run_folder(tmp_path / "longer", "constant_with_warmup", losses)
    run_folder(tmp_path / "parent", "constant_with_warmup", losses[:26])
    run_folder(tmp_path / "other", "constant_with_warmup", losses[:26], seed=5)
    for names in (("longer", "parent", "other"), ("other", "parent", "longer")):
        schedules = by_schedule(read_runs([tmp_path / name for name in names]))
        found = sorted((seed, curve.num_updates) for of_seeds in schedules for seed, curve in of_seeds.items())
        assert found == [(RECORD["config"]["seed"], 200)]
        assert re.search("parent, .*other: the beginning of a longer run|other, .*parent: the", capsys.readouterr().err)


@pytest.mark.slow
def test_losses_by_noise_level_are_fitted_too(tmp_path):
    folder = run_folder(tmp_path / "run", "cosine")
    losses = loss_of("cosine", UPDATES)
    rows = [
        {"update": int(n), "bin": index, "first_timestep": index, "last_timestep": index, "validation_loss": x + index}
        for n, x in zip(UPDATES, losses, strict=True)
        for index in (0, 1)
    ]
    write_timesteps(table_of_rows(rows), folder / "lrlab" / "timesteps.parquet")
    forecast = forecast_loss([folder], floor=0, law="annealing")
    np.testing.assert_allclose(forecast.runs[0].by_bin, np.stack([losses, losses + 1], axis=1))
    assert [model.name for model in forecast.forecaster.check.errors] == ["annealing", "annealing, by noise level"]


# --- studies ----------------------------------------------------------------------------------------------------------


def study_folder(folder, arms=SCHEDULES, seeds=2, dataset="dino"):
    """A study that nobody ran."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text("none\n")
    for arm in arms:
        for seed in range(seeds):
            about = {"id": f"{arm.partition(':')[0]}--{dataset}--{seed}--0", "arm": arm, "dataset": dataset, "seed": seed}
            about |= {"stage": "compare", "status": "finished", "learning_rate": PEAK}
            losses = np.ones(len(UPDATES)) if arm == "greedy" else loss_of(arm, UPDATES) + 0.001 * seed
            quality = {"update": UPDATES.tolist(), "validation_loss": losses.tolist()}
            train = {"num_updates": LENGTH, "global_batch": 256, "results": {}}
            record = {
                "run": about,
                "train": train,
                "curves": {"loss": {}, "quality": quality},
                "config": config_of(arm, seed=seed),
            }
            (folder / "runs" / f"{about['id']}.json").write_text(json.dumps(with_sum(record)))
    return folder


def test_the_runs_of_a_study_are_means_over_seeds(tmp_path, capsys):
    study = study_folder(tmp_path / "study", (*SCHEDULES, "greedy"))
    shown = predict(capsys, "--from", study, "--lr_scheduler=rex", *USUAL, "--json")
    assert "greedy--dino--0--0: its schedule greedy follows a metric" in shown.err
    (one,) = json.loads(shown.out)["predicted"]
    expected = loss_of("rex", np.array([LENGTH]))[0] + 0.0005
    assert one["final"] == pytest.approx(expected, rel=1e-3)
    assert one["interval"][0] < one["final"] < one["interval"][1]
    runs = read_runs([study], arms=["cosine"])
    assert [run.seed for run in runs] == [0, 1]
    assert [sorted(of_seeds) for of_seeds in by_schedule(runs)] == [[0, 1]]
    assert (
        "--arm 'cosin': must be one of"
        in predict(capsys, "--from", study, "--lr_scheduler=rex", "--floor=0", "--arm=cosin", status=2).err
    )


def test_a_study_of_several_data_sets_needs_one(tmp_path, capsys):
    for dataset in ("dino", "moons"):
        study = study_folder(tmp_path / "study", dataset=dataset)
    error = predict(capsys, "--from", study, "--floor=0", status=2).err
    assert "has runs on dino, moons, which need separate laws. Give --dataset." in error
    for dataset in ("dino", "moons"):
        names = [run.name for run in read_runs([study], dataset=dataset)]
        assert len(names) == 6
        assert all(f"--{dataset}--" in name for name in names)


def test_parts_of_the_noise_levels_are_means_of_bins():
    np.testing.assert_array_equal(merged_parts(np.arange(20.0).reshape(2, 10))[0], [0.5, 2.5, 4.5, 6.5, 8.5])
    np.testing.assert_array_equal(merged_parts(np.arange(7.0)), [3.0])


def test_the_floor_is_computed_once(folders, monkeypatch):
    """It is kept beside the run, with what decides it; a damaged file is computed anew."""
    monkeypatch.setattr("diffusers_lrlab.run.known_floor.MOST_IMAGES", 100)
    (run,) = read_runs(folders[:1])
    file = folders[0] / "lrlab" / "loss_floor.json"
    file.unlink(missing_ok=True)
    first, found = floor_of_run(run), file.read_text()
    computed = []
    monkeypatch.setattr("diffusers_lrlab.run.known_floor.loss_floor", lambda *given: computed.append(given) or Once)
    assert (floor_of_run(run).tolist(), computed) == (first.tolist(), [])
    other = dataclasses.replace(run, options=run.options | {"random_flip": not run.options["random_flip"]})
    assert (floor_of_run(other).tolist(), len(computed)) == ([0.5], 1)
    assert (floor_of_run(run).tolist(), len(computed)) == (first.tolist(), 1)
    for damaged in ("{}", "[1]", "no", '[{"of": {}, "floor": ["x"]}]', found[: len(found) // 2]):
        file.write_text(damaged)
        assert floor_of_run(run).tolist() == [0.5], damaged


class Once:
    @staticmethod
    def best_known():
        return np.array([0.5])


def test_the_logged_floor_is_taken(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.run.known_floor.loss_floor", None)
    log = TimestepLog(2, 1000)
    log.add_floor(0, np.array([0.2, 0.1]))
    write_timesteps(log.table, tmp_path / "rows.parquet")
    (run,) = read_runs(folders[:1])
    assert floor_of_run(dataclasses.replace(run, timesteps_file=tmp_path / "rows.parquet")).tolist() == [0.2, 0.1]


def test_an_unknown_floor_is_that_of_the_training_set():
    class Found:
        of_set, exact = np.array([1.0, 2.0]), np.array([np.nan, 3.0])

    assert Floor.best_known(Found).tolist() == [1.0, 3.0]
