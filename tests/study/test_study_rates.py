"""Studies that tune learning rates, within the rates given and beyond them."""

import math
import shutil

import numpy as np
import pytest
from small_studies import (
    BEYOND,
    HOT,
    ONE,
    SPEC,
    assert_same_but_for_times,
    moments,
    read_summary,
    records,
    started,
    study,
    wait_for,
    write_spec,
)

from diffusers_lrlab.cli.main import main

pytestmark = pytest.mark.usefixtures("bare")


# --- learning rates --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tuning_takes_the_best_rate_that_does_not_diverge(home, tmp_path):
    tune = {"learning_rates": ["1e-4", 1e-2, 1e30], "seeds": [10, 11], "metric": "validation_loss_ema"}
    out = study(home, tmp_path / "out", **ONE, tune=tune)
    scores, chosen = {}, {}
    for record in records(out).values():
        run = record["run"]
        if run["stage"] == "compare":
            chosen[run["arm"]] = run["learning_rate"]
            assert record["config"]["learning_rate"] == run["learning_rate"]
            assert run["seed"] == 0
        else:
            assert run["seed"] in (10, 11)
            score = record["train"]["results"].get("validation_loss_ema", math.inf)
            scores.setdefault(run["arm"], {}).setdefault(run["learning_rate"], []).append(score)
    assert {rate: len(values) for rate, values in scores["cosine"].items()} == {1e-4: 2, 1e-2: 2, 1e30: 2}
    for arm, of_arm in scores.items():
        means = {rate: np.mean(values) for rate, values in of_arm.items()}
        assert math.isinf(means[1e30])
        assert chosen[arm] == min(means, key=means.get) == 1e-2
    rows = read_summary(out)["tuning"]
    assert {(row["arm"], row["learning_rate"]) for row in rows if row["chosen"]} == set(chosen.items())
    assert {row["score"] for row in rows if row["learning_rate"] == 1e30} == {None}
    assert read_summary(out)["study"]["runs"] == {"finished": 2 + 8, "diverged": 4}
    before = moments(out)
    study(home, out, **ONE, tune=tune)
    assert moments(out) == before


def test_a_chosen_rate_at_the_edge_is_said(home, tmp_path):
    """Here of the rates that were tried: the best may lie beyond."""
    tune = {"factors": [0.1, 1, 10], "seeds": [10], "metric": "validation_loss_ema", "extensions": 0}
    out = study(home, tmp_path / "out", **ONE, tune=tune, arms={"cosine": SPEC["arms"]["cosine"]})
    rows = read_summary(out)["tuning"]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert [row["at_edge"] for row in rows] == [False, False, True]


@pytest.mark.slow
def test_an_arm_that_diverges_at_every_rate_takes_part_with_the_lowest(home, tmp_path):
    """The others are compared as ever."""
    tune = {"factors": [1, 10], "seeds": [10], "metric": "validation_loss_ema"}
    out = study(home, tmp_path / "out", **ONE, tune=tune, arms={**SPEC["arms"], "hot": HOT})
    rows = [row for row in read_summary(out)["rows"] if row["metric"] == "validation_loss_ema"]
    assert {row["arm"]: row["n"] for row in rows} == {"constant": 1, "cosine": 1, "hot": 0}
    assert {row["arm"]: row["diverged"] for row in rows} == {"constant": 0, "cosine": 0, "hot": 1}
    rates = {row["learning_rate"]: row["chosen"] for row in read_summary(out)["tuning"] if row["arm"] == "hot"}
    assert [*rates] == pytest.approx([1e27, 1e28, 1e29, 1e30, 1e31])
    assert [*rates.values()] == [True, False, False, False, False]
    assert main(["study", "report", str(out)]) == 0


# The best rate of these is far above the grid.


def tuning_of(out):
    return {record["run"]["id"]: record["run"] for record in records(out).values() if record["run"]["stage"] == "tune"}


@pytest.mark.slow
def test_rates_beyond_the_edge_are_tried(beyond, capsys):
    rows = read_summary(beyond)["tuning"]
    for arm in SPEC["arms"]:
        rates = {row["learning_rate"]: row["score"] for row in rows if row["arm"] == arm}
        assert len(rates) > 3
        assert [*rates] == pytest.approx([1e-3 * 10 ** (number / 2 - 1) for number in range(len(rates))], rel=0.06)
        best = min(rates, key=rates.get)
        assert min(rates) < best < max(rates)
        assert [(row["learning_rate"], row["at_edge"]) for row in rows if row["arm"] == arm and row["chosen"]] == [
            (best, False)
        ]
        compared = [record["run"] for record in records(beyond).values() if record["run"]["stage"] == "compare"]
        assert {run["learning_rate"] for run in compared if run["arm"] == arm} == {best}
    before = (beyond / "summary.json").read_text()
    assert main(["study", "report", str(beyond)]) == 0
    assert (beyond / "summary.json").read_text() == before
    capsys.readouterr()
    main(["study", "run", str(beyond / "spec.yaml"), f"--out={beyond}", "--dry_run"])
    text = capsys.readouterr().out
    assert f"before, {len(rows)} runs to choose learning rates\n" in text
    assert f"{len(records(beyond))} of them are already finished" in text


def test_the_forecast_says_that_tuning_may_add_runs(home, capsys):
    assert main(["study", "run", str(write_spec(home, **BEYOND)), "--dry_run"]) == 0
    assert "before, 4 runs to choose learning rates, and up to 10 more" in capsys.readouterr().out


@pytest.mark.slow
def test_tuning_goes_on_in_the_middle_of_a_round(home, beyond):
    """As after a kill: of the third round, one run of two has its result, and nothing after that is there."""
    out = shutil.copytree(beyond, home / "middle-of-a-round")
    rates = {run["id"]: run["learning_rate"] for run in tuning_of(out).values()}
    third = sorted(name for name, rate in rates.items() if rate == pytest.approx(3e-3))
    assert len(third) == 2
    gone = {third[0], *(name for name, rate in rates.items() if rate > 5e-3)} | {*records(out)} - {*rates}
    for name in gone:
        (out / "runs" / f"{name}.json").unlink()
    assert main(["study", "report", str(out)]) == 2  # the rates are not chosen yet
    study(home, out, "--executor=stacked", **BEYOND)
    assert_same_but_for_times(beyond, out)


@pytest.mark.slow
def test_a_study_without_extensions_goes_on_with_them(home, beyond, tmp_path):
    """Its results stay."""
    out = study(home, tmp_path / "out", **{**BEYOND, "tune": {**BEYOND["tune"], "extensions": 0}})
    assert {row["at_edge"] for row in read_summary(out)["tuning"] if row["chosen"]} == {True}
    before = moments(out)
    study(home, out, "--executor=stacked", **BEYOND)
    assert before.items() <= moments(out).items()
    assert {*tuning_of(out)} == {*tuning_of(beyond)}
    assert read_summary(out)["tuning"] == read_summary(beyond)["tuning"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "pool"])
def test_executors_agree_on_the_rates_that_are_tried(home, beyond, tmp_path, executor):
    out = study(home, tmp_path / "out", f"--executor={executor}", **BEYOND)
    assert {*tuning_of(out)} == {*tuning_of(beyond)}


@pytest.mark.slow
def test_killed_while_it_tunes_beyond_the_edge(home, beyond, tmp_path):
    (name,) = [
        run["id"] for run in tuning_of(beyond).values() if run["arm"] == "cosine" and 2e-3 < run["learning_rate"] < 5e-3
    ]
    out = tmp_path / "out"
    with started(home, out, "--executor=stacked", **BEYOND) as process:
        wait_for(process, out, f"runs/{name}.json")
        process.kill()
        process.wait()
    assert len(tuning_of(out)) < len(tuning_of(beyond))
    study(home, out, "--executor=stacked", **BEYOND)
    assert_same_but_for_times(beyond, out)
