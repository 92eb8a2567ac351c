"""Studies with several lengths of each run: a trunk and its branches are, to the bit, the runs by themselves."""

import contextlib
import json

import pytest
import torch
from small_studies import BASE, counted_updates, read_summary, records, study, without_times, write_spec

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.analysis.tuning import most_tuning_runs
from diffusers_lrlab.study.executors.jobs import make_jobs
from diffusers_lrlab.study.forecast import describe_study
from diffusers_lrlab.study.report.curves import styles
from diffusers_lrlab.study.report.horizons import horizon_tables, plot_horizons
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand, expand_tuning
from diffusers_lrlab.study.spec.horizons import families, why_separate
from diffusers_lrlab.study.spec.reading import load_spec, spec_from_dict
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("bare")

ARMS = {"cosine": {"lr_scheduler": "cosine"}, "wsd": {"lr_scheduler": "wsd:num_decay_steps=0.4,decay_type=linear"}}
ARMS["wsd"]["ema"] = "constant:decay=0.9|posthoc:sigma_rels=[0.1|0.2],snapshots=3|constant:decay=0.5"
BY_BRANCHES = {
    "base": {key: value for key, value in BASE.items() if key != "max_train_steps"} | {"lr_warmup_steps": 2},
    "arms": ARMS,
    "datasets": ["dino"],
    "seeds": 1,
    "horizons": [10, 20, 40],
}
# The same runs without the axis: nothing is shared between data sets.
SEPARATE = {
    **BY_BRANCHES,
    "arms": {"wsd": ARMS["wsd"]},
    "base": {**BY_BRANCHES["base"], "validation_steps": 3},
    "horizons": None,
}
SEPARATE["datasets"] = {f"dino@{num}": {"dataset_name": "dino", "max_train_steps": num} for num in (10, 20, 40)}
LEAVES = {10: 7, 20: 13}  # the first update of a cool-down still has the rate of the plateau
IN_ALL = (10 + 20 + 40) + 40 + (10 - 7) + (20 - 13)  # three cosines, the trunk, and what two branches add to it


def without_branch(record):
    record = without_times(record)
    record["run"]["executor"] = None
    return record


def averages(folder):
    """The files of the averages beside the measured one, with their bytes."""
    found = folder / "averages"
    return {str(path.relative_to(found)): path.read_bytes() for path in sorted(found.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def separate(home):
    return study(home, home / "separate", "--executor=local", **SEPARATE)


@pytest.fixture(scope="module")
def computed(home):
    """The study by its branches, computed run by run, and the updates that this took."""
    with counted_updates() as updates:
        return study(home, home / "branches", "--executor=local", **BY_BRANCHES), len(updates)


@pytest.mark.slow
def test_branches_are_the_separate_runs_to_the_bit(separate, computed):
    folder, num_updates = computed
    expected, found = records(separate), records(folder)
    assert expected.keys() == {name for name in found if name.startswith("wsd")}  # with a hash of all that matters
    for name in expected:
        assert json.dumps(without_branch(found[name])) == json.dumps(without_branch(expected[name])), name
        weights = [run / "weights" / f"{name}.safetensors" for run in (separate, folder)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert averages(folder) == averages(separate)
    assert num_updates == IN_ALL


def test_the_record_names_the_trunk(computed):
    folder, _ = computed
    for record in records(folder).values():
        branch, length = record["run"]["executor"].get("branch"), record["train"]["num_updates"]
        assert (branch is None) == (record["run"]["arm"] == "cosine" or length == 40)
        if branch:
            assert branch["update"] == LEAVES[length]
            assert branch["git_commit"] == record["meta"]["git_commit"]
            trunk = json.loads((folder / "runs" / f"{branch['run']}.json").read_text())
            assert (trunk["run"]["seed"], trunk["train"]["num_updates"]) == (record["run"]["seed"], 40)
            assert record["train"]["training_seconds"] < trunk["train"]["training_seconds"]


def assert_near(one, other):
    """The results that two executors compute, which differ in the order of sums."""
    first, second = records(one), records(other)
    for name in second:
        assert first[name]["train"]["results"] == pytest.approx(second[name]["train"]["results"], rel=1e-3), name
        branches = [run[name]["run"]["executor"].get("branch", {}) for run in (first, second)]
        assert branches[0] == branches[1]


@pytest.fixture(scope="module")
def stacked(home):
    """The same in stacks: cosines and trunks of one length together, then branches."""
    with counted_updates() as updates:
        out = study(home, home / "stacked-branches", "--executor=stacked", **BY_BRANCHES)
    assert len(updates) <= (IN_ALL - 40) * torch.get_num_threads()
    return out


@pytest.mark.slow
def test_stacks_branch_too(computed, stacked):
    assert_near(computed[0], stacked)


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(kind, num_updates):
    """The process ends at an update, without anything saved because of it."""
    original, done = kind.do_update, []

    def do_update(self, *inputs):
        if len(done) == num_updates:
            raise Killed
        done.append(1)
        return original(self, *inputs)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(kind, "do_update", do_update)
        yield
    assert len(done) == num_updates


WSD = {**BY_BRANCHES, "arms": {"wsd": ARMS["wsd"]}}


# In the trunk, after a branch left and before its next checkpoint; in a branch.
@pytest.mark.slow
@pytest.mark.parametrize(("num_updates", "repeated"), [(9, 2), (42, 2)])
def test_killed_and_started_again(home, computed, tmp_path, num_updates, repeated):
    with killed_at(Trainer, num_updates):
        study(home, tmp_path / "out", "--executor=local", **WSD)
    with counted_updates() as updates:
        study(home, tmp_path / "out", "--executor=local", **WSD)
    assert len(updates) == (IN_ALL - 70) - num_updates + repeated
    expected, found = records(computed[0]), records(tmp_path / "out")
    for name, record in found.items():
        assert json.dumps(without_times(record)) == json.dumps(without_times(expected[name])), name
    assert len(found) == 3
    assert averages(tmp_path / "out") == averages(computed[0])


@pytest.mark.slow
def test_a_killed_stack_goes_on(home, stacked, tmp_path):
    with killed_at(Stack, 20):
        study(home, tmp_path / "out", "--executor=stacked", **WSD)
    assert {path.name.partition("-")[2] for path in (tmp_path / "out" / "stacks").iterdir()} == {"7", "13"}
    study(home, tmp_path / "out", "--executor=stacked", **WSD)
    assert_near(stacked, tmp_path / "out")
    assert averages(tmp_path / "out").keys() == averages(stacked).keys()


# --- the specification -----------------------------------------------------------------------------------------------


def runs_of(**changes):
    options = {key: value for key, value in {**BY_BRANCHES, **changes}.items() if value is not None}
    options["base"] = {key: value for key, value in options["base"].items() if key != "model_config_name_or_path"}
    return load_spec(options)


def families_of(arm, **changes):
    return families(expand(runs_of(arms={"arm": arm}, horizons=[100, 200, 400], **changes)))


# arm, updates at which the horizons 100 and 200 leave that of 400: none where nothing is shared, with the reason.
SHARED = [
    ({"lr_scheduler": "cosine"}, None, "depends on the length from the start"),
    ({"lr_scheduler": "linear"}, None, "depends on the length from the start"),
    ({"lr_scheduler": "constant_with_warmup"}, [99, 199], ""),
    ({"lr_scheduler": "inverse_sqrt"}, [99, 199], ""),
    ({"lr_scheduler": "wsd"}, [81, 161], ""),
    ({"lr_scheduler": "trapezoid:num_decay_steps=30"}, [71, 171], ""),
    ({"lr_scheduler": "wsd", "lr_warmup_steps": 0.05}, None, "lr_warmup_steps in updates would be the same"),
    ({"lr_scheduler": "reduce_lr_on_plateau"}, None, "follows the validation loss"),
    ({"lr_scheduler": "wsd", "timestep_sampler": "clts"}, None, "its timesteps depend on the length"),
    ({"lr_scheduler": "wsd", "timestep_sampler": "logit_normal"}, [81, 161], ""),
]


def test_what_is_shared():
    for arm, leave, reason in SHARED:
        found = families_of(arm)
        if leave is None:
            assert [family.branches for family in found] == [{}, {}, {}], arm
            configs = [family.trunk.config for family in found]
            assert reason in why_separate(configs[0], configs[2]), arm
        else:
            (family,) = found
            assert [*family.branches] == leave, arm
            assert sum(family.own_updates.values()) == 400 + (100 - leave[0]) + (200 - leave[1])


def test_a_trunk_is_tuned_at_its_longest_horizon():
    spec = runs_of(tune={"factors": [1.0, 3.0], "seeds": [9], "metric": "validation_loss_ema", "extensions": 0})
    tuned = {(run.arm, run.dataset) for run in expand_tuning(spec)}
    assert tuned == {("wsd", "dino@40"), *(("cosine", f"dino@{num}") for num in (10, 20, 40))}
    assert most_tuning_runs(spec) == 2 * 4


def test_the_saved_specification_is_the_same(tmp_path):
    spec, folder = runs_of(), StudyFolder(tmp_path)
    folder.write_spec(spec, "lrlab study run spec.yaml --out out")
    again = spec_from_dict(folder.read_spec()[0], tmp_path)
    assert [run.id for run in expand(again)] == [run.id for run in expand(spec)]
    assert (again.datasets, again.horizons) == (spec.datasets, (10, 20, 40))


WRONG = [
    ({"horizons": 10}, r"horizons=.*: must be a list of 2 to 100 different numbers of updates, got 10"),
    ({"horizons": [10]}, r"horizons=.*: must be a list of 2 to 100 .*\[10\]\. Hint: .* one length is max_train_steps"),
    ({"horizons": [10, 10]}, "horizons=.*: must be a list of 2 to 100 different"),
    ({"horizons": [10, 0]}, "horizons=.*: must be a list of 2 to 100 different"),
    ({"horizons": [10, 20.5]}, "horizons=.*: must be a list of 2 to 100 different"),
    ({"base": {**BY_BRANCHES["base"], "max_train_steps": 10}}, "base has max_train_steps, and horizons set the length"),
    ({"arms": {"wsd": {"num_epochs": 1}}}, "the arm 'wsd' has num_epochs, and horizons"),
    ({"datasets": {"dino": {"max_train_steps": 3}}}, "the data set 'dino' has max_train_steps, and horizons"),
    ({"horizons": [2, 20]}, "Warm-up of 2 updates does not fit into a run of 2 updates"),
]


def test_what_is_refused():
    for changes, message in WRONG:
        with pytest.raises(LabError, match=message):
            expand(runs_of(**changes))


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_the_price_is_in_summary_and_tables(computed):
    summary = read_summary(computed[0])
    rows = {(row["arm"], row["horizon"]): row for row in summary["horizons"]}
    assert {key: row["updates"] for key, row in rows.items() if key[0] == "wsd"} == {
        ("wsd", 10): 3, ("wsd", 20): 7, ("wsd", 40): 40
    }  # fmt: skip
    assert rows["wsd", 10]["branch_at"] == 7
    assert rows["cosine", 20]["branch_at"] is None
    prices = {row["arm"]: (row["updates"], row["separate"]) for row in summary["prices"]}
    assert prices == {"cosine": (70, 70), "wsd": (50, 70)}
    values = {record["run"]["id"]: record["train"]["results"] for record in records(computed[0]).values()}
    (own,) = [results for name, results in values.items() if name.startswith("wsd--dino@10--")]
    assert rows["wsd", 10]["energy_distance"] == pytest.approx(own["energy_distance"])
    table, price = horizon_tables(summary)
    assert [*table.frame["left its trunk at"]] == ["–", "7", "–", "13", "–", "–"]
    assert [*price.frame["updates of all horizons"]] == ["70", "50"]


def test_the_plot_has_a_line_for_each_arm(computed):
    summary = read_summary(computed[0])
    shown = styles(summary["study"]["arms"], "cosine")
    figure = plot_horizons(summary["horizons"], summary["prices"], "energy_distance", shown)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert [*lines] == ["cosine: 70 updates for all", "wsd: 50 updates for all"]
    assert lines["wsd: 50 updates for all"].get_xdata().tolist() == [10, 20, 40]


@pytest.mark.slow
def test_the_forecast_says_the_price(home):
    text = describe_study(load_spec(write_spec(home, **BY_BRANCHES)), "local", None)
    assert "1 data set (dino) x 3 horizons (updates 10, 20, 40) x 1 seed = 6 runs" in text
    assert "all horizons of wsd: one trunk, which branches leave at update 7, 13: 50 updates in place of 70" in text
    assert "all horizons of cosine: separate runs, as its learning rate depends on the length from the start: 70" in text
    assert f"local: 6 runs, {IN_ALL} updates" in text


class ToldWorkers:
    workers, num_threads = (1, 2), 1


@pytest.mark.parametrize("executor", ["local", "stacked"])
def test_branches_are_part_of_the_job_of_their_trunk(tmp_path, executor):
    study = StudyContext(StudyFolder(tmp_path), quiet=True)
    jobs = [*make_jobs([(executor, expand(runs_of(seeds=2)))], study, ToldWorkers())]
    assert len({spec.id for job in jobs for spec in job.specs}) == sum(len(job.specs) for job in jobs) == 12
    for job in jobs:
        for family in families(expand(runs_of(seeds=2))):
            ids = {spec.id for spec in family.runs}
            assert ids <= {spec.id for spec in job.specs} or not ids & {spec.id for spec in job.specs}
