"""Tuned learning rates: grids go on beyond their edge until the best rate is inside, however often a study is stopped."""

import math
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_studies import BEYOND, assert_same_but_for_times, read_summary, records, study
from small_studies import SPEC as SMALL
from tables import cases

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.analysis.tuning import chosen_rates, most_tuning_runs, tuning_rounds, tuning_rows
from diffusers_lrlab.study.spec.expansion import expand_tuning
from diffusers_lrlab.study.spec.reading import read_spec
from diffusers_lrlab.study.spec.spec import next_beyond

pytestmark = pytest.mark.usefixtures("bare")

# grid, the next number below, the next one above
GRIDS = [
    ([0.3, 1.0, 3.0, 10.0], 0.1, 30.0),
    ([1e-2, 1e-3, 3e-3], 3e-4, 3e-2),
    ([0.1 * 3, 0.1 * 10], 0.1, 3.0),  # a float beside that of the series
    ([1.0], 0.3, 3.0),
    ([0.5], 0.3, 1.0),
    ([1e-3, 1e-2, 1e-1], 1e-4, 1.0),
    ([1.0, 2.0, 8.0], 0.5, 32.0),
    ([1.0, 3.0, 9.0], 0.3, 27.0),
    ([1e-4, 1e-2], 1e-6, 1.0),  # and not 1.0000000000000002
    ([5e-324], None, 1e-323),
    ([1e308, 1.5e308], 6.66666666667e307, None),
]


@cases(("grid", "below", "above"), GRIDS)
def test_the_next_number_beyond_a_grid(grid, below, above):
    assert [next_beyond(grid, higher=False), next_beyond(grid, higher=True)] == [below, above]


BASE = {"max_train_steps": 30, "num_validation_images": 200, "learning_rate": 1e-3}
ARMS = {"a": {"lr_scheduler": "constant"}, "b": {"lr_scheduler": "cosine", "learning_rate": 2e-2}}


def spec(arms=ARMS, **tune):
    tune = {"factors": [1, 3], "seeds": [10, 11], "metric": "validation_loss_ema"} | tune
    return read_spec({"base": BASE, "arms": arms, "datasets": ["dino", "moons"], "seeds": 1, "tune": tune}, "x")


class Folder:
    """Stands for a folder: the runs that are done, whose results follow from their learning rates."""

    def __init__(self, score):
        self.done, self.score = set(), score

    def result(self, run):
        score = self.score(run)
        results = {} if score is None else {"validation_loss_ema": score}
        return SimpleNamespace(arm=run.arm, dataset=run.dataset, learning_rate=run.config.learning_rate, results=results)

    def results(self, runs):
        return [self.result(run) for run in runs if run.id in self.done]


def tuned(study, folder, batch=None):
    """All rounds, with `batch` runs done between two looks at the folder; by default all that are known."""
    while True:
        rounds = tuning_rounds(study, folder)
        missing = [run for run in sum(rounds, []) if run.id not in folder.done]
        if not missing:
            return rounds
        folder.done |= {run.id for run in missing[: batch or len(missing)]}


def of_bowl(best):
    """The score of a run: the distance of its learning rate to the best of its arm and data set, in decades."""
    return lambda run: abs(math.log10(run.config.learning_rate / best[run.arm, run.dataset])) + 1


places = [(arm, dataset) for arm in ARMS for dataset in ("dino", "moons")]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    best=st.fixed_dictionaries({place: st.floats(-7, 3).map(lambda power: 10.0**power) for place in places}),
    grid=st.sampled_from([[1.0], [1.0, 3.0], [0.3, 1.0, 3.0, 10.0], [1.0, 2.0]]),
    extensions=st.integers(0, 4),
    batch=st.integers(1, 20),
)
def test_the_best_is_inside_or_the_limit_is_reached(best, grid, extensions, batch):
    study, folder = spec(factors=grid, extensions=extensions), Folder(of_bowl(best))
    rounds = tuned(study, folder)
    stopped = tuned(study, Folder(folder.score), batch)
    assert [[run.id for run in runs] for runs in stopped] == [[run.id for run in runs] for runs in rounds]
    assert [run.id for run in rounds[0]] == [run.id for run in expand_tuning(study)]
    runs = sum(rounds, [])
    assert len({run.id for run in runs}) == len(runs) <= most_tuning_runs(study)
    tuning = folder.results(runs)
    chosen = chosen_rates(study, tuning)
    results = [SimpleNamespace(arm=arm, dataset=data, learning_rate=rate) for (arm, data), rate in chosen.items()]
    rows = tuning_rows(study, results, tuning)
    for arm, dataset in places:
        rates = [row["learning_rate"] for row in rows if (row["arm"], row["dataset"]) == (arm, dataset)]
        own = study.arms[arm].get("learning_rate", BASE["learning_rate"])
        below, above = sum(rate < own * min(grid) for rate in rates), sum(rate > own * max(grid) for rate in rates)
        assert max(below, above) <= extensions
        (at_edge,) = [row["at_edge"] for row in rows if row["chosen"] and (row["arm"], row["dataset"]) == (arm, dataset)]
        assert at_edge == (chosen[arm, dataset] in (min(rates), max(rates)))
        assert not at_edge or extensions in (below, above)


def test_a_round_begins_when_the_one_before_is_complete():
    """So that stacks are of the same runs, whenever a study was stopped."""
    study, folder = spec(), Folder(of_bowl(dict.fromkeys(places, 1e-6)))
    (first,) = tuning_rounds(study, folder)
    folder.done = {run.id for run in first[:-1]}
    assert len(tuning_rounds(study, folder)) == 1
    folder.done = {run.id for run in first}
    first, second = tuning_rounds(study, folder)
    assert {run.config.learning_rate for run in second} == {1e-3 * 0.3, 2e-2 * 0.3}
    assert len(second) == len(places) * 2
    folder.done |= {run.id for run in second if run.arm == "a"}
    assert len(tuning_rounds(study, folder)) == 2


def test_a_rate_that_diverges_is_the_worst():
    """One run of it is enough; where all rates diverge, lower ones are tried, and the lowest is chosen."""

    def score(run):
        is_hot = run.config.learning_rate > 1e-3 or run.dataset == "moons"
        return None if is_hot and run.seed == 11 else 0.5

    study, folder = spec(arms={"a": ARMS["a"]}, extensions=1), Folder(score)
    rounds = tuned(study, folder)
    tried = [{(run.dataset, run.config.learning_rate) for run in runs} for runs in rounds]
    assert tried == [
        {(dataset, rate) for dataset in study.datasets for rate in (1e-3, 3e-3)},
        {(dataset, 1e-3 * 0.3) for dataset in study.datasets},
    ]
    chosen = chosen_rates(study, folder.results(sum(rounds, [])))
    assert chosen == {("a", "dino"): 1e-3 * 0.3, ("a", "moons"): 1e-3 * 0.3}


def test_names_of_tuning_runs_stay():
    """Written down, so that a study that was begun goes on with its results."""
    runs = expand_tuning(spec(arms={"a": ARMS["a"]}, seeds=[10]))
    ids = ["a--dino--10--3b4332122dd3", "a--dino--10--d2f90f6d8d1a"]
    assert [run.id for run in runs if run.dataset == "dino"] == ids


def test_arms_that_differ_in_their_rate_only_may_meet():
    """By extensions, after all tuning; those that are too far from each other are compared as ever."""
    arms = {"low": {"learning_rate": 1e-5}, "high": {"learning_rate": 1e-4}}
    with pytest.raises(LabError, match="'low' on 'dino' is the same as 'high' on 'dino' at learning rate"):
        expand_tuning(spec(arms=arms))
    assert len(expand_tuning(spec(arms=arms, extensions=0))) == 2 * 2 * 2 * 2
    assert len(expand_tuning(spec(arms={**arms, "high": {"learning_rate": 1e2}}))) == 2 * 2 * 2 * 2


# --- small studies, whose best rate is far above the grid ---------------------------------------------------------------


@pytest.mark.slow
def test_rates_beyond_the_edge_are_tried(beyond, capsys):
    rows = read_summary(beyond)["tuning"]
    for arm in SMALL["arms"]:
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
    main(["study", "run", str(beyond / "spec.yaml"), "--dry_run"])
    assert "before, 4 runs to choose learning rates, and up to 10 more" in capsys.readouterr().out
    main(["study", "run", str(beyond / "spec.yaml"), f"--out={beyond}", "--dry_run"])
    text = capsys.readouterr().out
    assert f"before, {len(rows)} runs to choose learning rates\n" in text
    assert f"{len(records(beyond))} of them are already finished" in text


@pytest.mark.slow
def test_tuning_goes_on_in_the_middle_of_a_round(home, beyond):
    """As after a kill: of the third round, one run of two has its result, and nothing after that is there."""
    out = shutil.copytree(beyond, home / "middle-of-a-round")
    runs = [record["run"] for record in records(out).values()]
    rates = {run["id"]: run["learning_rate"] for run in runs if run["stage"] == "tune"}
    third = sorted(name for name, rate in rates.items() if rate == pytest.approx(3e-3))
    assert len(third) == 2
    gone = {third[0], *(name for name, rate in rates.items() if rate > 5e-3)} | {*records(out)} - {*rates}
    for name in gone:
        (out / "runs" / f"{name}.json").unlink()
    assert main(["study", "report", str(out)]) == 2  # the rates are not chosen yet
    study(home, out, "--executor=stacked", **BEYOND)
    assert_same_but_for_times(beyond, out)
