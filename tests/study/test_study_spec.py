"""Specifications of studies: what is refused before anything is written, and what decides the identity of a run."""

import copy
import dataclasses
import json
from pathlib import Path

import datasets
import pytest
import yaml
from small_studies import TINY
from tables import cases, rows

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.options import UPDATE, Option, defaults_of, options_of
from diffusers_lrlab.study.results import StudyFolder
from diffusers_lrlab.study.spec import spec as spec_module
from diffusers_lrlab.study.spec.expansion import expand, expand_tuning, located
from diffusers_lrlab.study.spec.reading import load_spec, num_runs, preset_names, read_spec, spec_from_dict
from diffusers_lrlab.study.spec.spec import RunSpec, controlled
from diffusers_lrlab.training.config import TrainingConfig

BASE = {
    "max_train_steps": 30,
    "train_batch_size": 16,
    "num_validation_images": 200,
    "distance_samples": 200,
    "lr_warmup_steps": 0,
}
ARMS = {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine"}}
SPEC = {
    "base": BASE,
    "arms": ARMS,
    "datasets": ["dino", "moons"],
    "seeds": 2,
    "metrics": ["energy_distance", "validation_loss_ema"],
}


def spec(**changes):
    """The small study of these tests, with other keys; those that are `None` are left out."""
    return read_spec({key: value for key, value in {**SPEC, **changes}.items() if value is not None}, "study")


def ids(study, chosen=None):
    return {(run.arm, run.dataset, run.seed): run.id for run in expand(study, chosen)}


# --- what is refused -------------------------------------------------------------------------------------------------


def with_base(**fields):
    return {"base": {**BASE, **fields}}


def with_arm(**fields):
    return {"arms": {**ARMS, "a": fields}}


TUNE = {"learning_rates": [1e-3, 1e-2], "seeds": [10], "metric": "energy_distance"}


def with_tune(**fields):
    return {"tune": {**TUNE, **fields}}


# Changes of the study, and what the message must contain.
REFUSED = [
    ({"seed": 3}, "no 'seed' in the study 'study'. Did you mean 'seeds'? Known: title, base"),
    (with_base(learning_rat=1e-3), "'learning_rat' in base. Did you mean 'learning_rate'?"),
    (with_base(output_dir="x"), "base has output_dir, which a study sets itself. Leave it out"),
    (with_base(learning_rate=-1), "In the arm 'constant' on 'dino': learning_rate=-1.0: must be"),
    ({"base": {"num_epochs": 1, "num_validation_images": 200}}, "give max_train_steps, not num_epochs"),
    (with_arm(lr_scheduler="cosine", description="other words"), "'cosine' on 'dino' is the same as 'a' on 'dino'"),
    ({"arms": {"a": {"learning_rates": [1e-3, 1e-2]}, "a@0.001": {}}}, "Two arms would be called 'a@0.001'"),
    ({"seeds": [0, 1, 0]}, "seeds: 0 is listed twice"),
    (with_arm(ema="posthoc"), "ema='posthoc': must be an average that needs no snapshots"),
    (with_arm(distance_samples=100),
     "energy_distance cannot be compared between arms with different numbers of samples (100"),
    ({"arms": {shift: {"objective": f"flow_matching:shift={shift},num_steps=100"} for shift in "13"}},
     "validation_loss_ema cannot be compared between arms that differ in objective (shift=1.0, shift=3.0 on 'dino')"),
    (with_arm(dataset_name="dino"), "The arm 'a' has dataset_name, but arms are compared on the same data. Add a data set"),
    ({"metrics": []}, "metrics=[]: must be a list of one or more names"),
    ({"title": [1]}, "title=[1]: must be text"),
    ({"learning_rates": 5}, "learning_rates=5: must be numbers above 0"),
    ({"learning_rates": ["1e-3", 0.001]}, "learning_rates: 0.001 is listed twice"),
    (with_arm(learning_rate=1e-3, learning_rates=[1e-3, 1e-2]),
     "'a' has learning_rate and learning_rates. Give one of them"),
    ({"baseline": "cosin"}, "The baseline 'cosin' is not an arm. Did you mean 'cosine'? They are constant, cosine"),
    (with_arm(controls=["cosin"]),
     "The control 'cosin' of 'a' is not another arm. Did you mean 'cosine'? They are constant"),
    (with_arm(controls=[3]), "controls=[3] of 'a': must be names of arms"),
    ({"metrics": ["kll"]}, "metrics: there is no metric 'kll'. Did you mean 'kl'?"),
    ({"metrics": ["exact_kl"]}, "on 'moons': metrics: 'exact_kl' needs data whose density is known in closed form"),
    ({"metrics": ["frechet_distance"]}, "'frechet_distance' is for images"),
    (with_base(use_ema=False), "'validation_loss_ema' needs an EMA"),
    ({"metrics": ["validation_loss"], **with_base(num_validation_images=0)},
     "'validation_loss' needs held-out data: give num"),
    ({"arms": {"a": {}, "b": {"num_validation_images": 100}}, "datasets": ["digits"], "metrics": ["frechet_distance"],
      "base": {"max_train_steps": 2}}, "num_validation_images (100, 256 on 'digits') train on different data"),
    (with_base(distance_samples=0), "'energy_distance' needs samples: give distance_samples above 0"),
    ({"primary_metric": "kl"},
     "primary_metric: 'kl' is not a metric of the study. They are energy_distance, validation_loss"),
    ({"arms": {"a--b": {}}}, "the name 'a--b' of an arm: must be"),
    ({"datasets": {"..": {"dataset_name": "dino"}}}, "the name '..' of a data set: must be"),
    ({"arms": {}}, "The study 'study' has no arms. Add them"),
    ({"datasets": 3}, "datasets=3: must be a mapping of names to values"),
    ({"seeds": [0.5]}, "seeds=[0.5]: must be"),
    ({"evaluation_points": 0}, "evaluation_points=0: must be a whole number in [1, 1e9]"),
    (with_tune(seeds=[1, 7]), "tune: seeds [1] are also those of the comparison"),
    (with_tune(factors=[1, 2]), "tune takes either learning_rates or factors"),
    (with_tune() | {"learning_rates": [1e-3, 1e-2]}, "learning_rates and tune exclude each other"),
    (with_tune(metric="density"), "metric='density' of tune: must be a metric of which smaller values are better"),
    (with_tune(metric="frechet_distance"), "tune: metric: 'frechet_distance' is for images"),
    (with_tune(extensions=21), "extensions=21 of tune: must be a whole number in [0, 20]"),
]  # fmt: skip


@cases(("changes", "expected"), REFUSED)
def test_it_is_refused_before_anything_is_written(capsys, tmp_path, changes, expected):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**SPEC, **changes}, sort_keys=False))
    assert main(["study", "run", str(tmp_path / "study.yaml"), f"--out={tmp_path / 'out'}"]) == 2
    out, error = capsys.readouterr()
    assert (out, error[:7], error.count("\n")) == ("", "error: ", 1)
    assert expected in error
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


@cases(("arguments", "expected"), [
    ("run study.yaml --out=out --executor=stakced", "no executor 'stakced'"),
    ("run study.yaml --out=out --workers=2", "--workers 2 has no effect without --executor pool or ray"),
    ("run study.yaml --out=out --executor=pool --workers=0", "--workers 0: must be a whole number in [1, "),
    ("run study.yaml --out=out --stack_size=0", "--stack_size 0: must be a whole number"),
    ("run study.yaml --out=out --seeds 5", "Unknown argument '--seeds'"),
    ("run quick", "--out DIR is missing. Give a new folder"),
    ("run quik --out=out", "no study 'quik'. Did you mean 'quick'?"),
    ("rum quick", "argument ACTION: must be one of 'list', 'run', 'report', got 'rum'"),
    ("report .", "no study in"), ("list --out=out", "Unknown argument '--out="),
    ("run", "the following arguments are required: SPEC"),
])  # fmt: skip
def test_command_lines_that_are_refused(capsys, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SPEC))
    assert main(["study", *arguments.split()]) == 2
    assert expected in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


def test_folders_that_are_something_else(capsys, tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SPEC))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    (tmp_path / "file").write_text("")
    for out, part, *more in (
        ("out", "a new or empty folder, or that of the study 'study', got one with thesis.tex and no readable spec.yaml"),
        ("out", "got one with thesis.tex and no readable spec.yaml. Hint: give another folder", "--dry_run"),
        ("file", "got a file"),
    ):
        assert main(["study", "run", str(tmp_path / "study.yaml"), f"--out={tmp_path / out}", *more]) == 2
        assert part in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


# --- what a specification means --------------------------------------------------------------------------------------


def test_the_list_of_presets(capsys):
    assert main(["study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(line.split()[0], line.rpartition("  ")[2]) for line in lines] == [
        (name, load_spec(name).title) for name in preset_names()
    ]


@pytest.mark.slow
@rows("name", preset_names())
def test_every_preset_expands(name):
    study = load_spec(name)
    runs, tuning = expand(study), expand_tuning(study)
    assert len(runs) + len(tuning) == num_runs(study)
    assert len({run.id for run in [*runs, *tuning]}) == len(runs) + len(tuning)
    assert bool(tuning) == (study.tune is not None)
    assert study.baseline in study.arms
    assert study.title != name
    assert spec_from_dict(json.loads(json.dumps(study.to_dict())), Path()) == study


def test_numbers_as_yaml_has_them(tmp_path):
    """YAML takes 3e-4 for text."""
    (tmp_path / "study.yaml").write_text(
        "base: {learning_rate: 3e-4, max_train_steps: 1_000, lr_warmup_steps: 0, ema_power: 2e-1}\n"
        "arms: {a: {}, b: {learning_rates: [1e-3, 2e-3]}, c: {learning_rates: 5e-5}}\n"
        "datasets: dino\nseeds: [4]\n"
    )
    study = load_spec(str(tmp_path / "study.yaml"))
    rates = {run.arm: run.config.learning_rate for run in expand(study)}
    assert rates == {"a": 3e-4, "b@0.001": 1e-3, "b@0.002": 2e-3, "c@5e-05": 5e-5}
    assert {run.config.max_train_steps for run in expand(study)} == {1000}
    (tmp_path / "tuned.yaml").write_text(
        "base: {learning_rate: 3e-4, max_train_steps: 30}\narms: {a: {}}\ndatasets: dino\nseeds: [4]\n"
        "tune: {factors: [1e-1, 1e0], seeds: 2, metric: kl}\n"
    )
    tuned = expand_tuning(load_spec(str(tmp_path / "tuned.yaml")))
    assert {run.config.learning_rate for run in tuned} == {3e-4 * 1e-1, 3e-4}


def test_defaults():
    study = read_spec({"base": BASE, "arms": ARMS, "datasets": "dino"}, "mine")
    assert (study.title, study.baseline, study.seeds) == ("mine", "constant", (0, 1, 2, 3, 4))
    (first, *_) = expand(study)
    assert first.metrics == ("kl", "validation_loss_ema", "validation_loss", "energy_distance", "training_set_loss")
    assert first.config.validation_steps == 1  # 20 evaluation points in 30 updates
    assert first.config.log_timestep_bins == 0
    assert first.config.mixed_precision == "no"
    arms = {f"sgd{norm}": {"optimizer": "sgd", "max_grad_norm": norm} for norm in (0.5, 1.5)}
    rates = {run.arm: run.config.learning_rate for run in expand(spec(arms=ARMS | arms))}
    assert rates == {"constant": 3e-4, "cosine": 3e-4, "sgd0.5": 0.03, "sgd1.5": 0.03}  # one changes no other


def test_arms_go_over_data_sets_these_over_base_and_tuned_rates_over_all():
    careful = {"dataset_name": "moons", "learning_rate": 1e-4, "max_grad_norm": 0.5}
    study = spec(
        base={**BASE, "learning_rate": 1e-3, "max_grad_norm": 1.0}, arms={"plain": {}, "own": {"learning_rate": 1e-5}},
        datasets={"dino": {}, "careful": careful}, seeds=1,
    )  # fmt: skip
    cells = [(arm, dataset) for arm in study.arms for dataset in study.datasets]
    found = {(run.arm, run.dataset): (run.config.learning_rate, run.config.max_grad_norm) for run in expand(study)}
    assert found == dict(zip(cells, [(1e-3, 1.0), (1e-4, 0.5), (1e-5, 1.0), (1e-5, 0.5)], strict=True))
    chosen = dict(zip(cells, [1.0, 2.0, 3.0, 4.0], strict=True))
    assert {(run.arm, run.dataset): run.config.learning_rate for run in expand(study, chosen)} == chosen


def test_a_study_and_its_folder_can_be_moved_together(tmp_path):
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "a" / "model" / "config.json").write_text(json.dumps(TINY))
    datasets.Dataset.from_dict({"x": [[0.0, 1.0]] * 3}).save_to_disk(tmp_path / "a" / "points")
    (tmp_path / "link").symlink_to("a")
    options = {
        "arms": {"a": {"model_config_name_or_path": "model"}},
        "datasets": {"mine": {"dataset_name": "points", "data_kind": "points"}},
        "seeds": 1,
    }
    study = read_spec(options, "study", tmp_path / "a")
    StudyFolder(tmp_path / "link" / "out").write_spec(study, "command")
    before = expand(study)[0].id
    (tmp_path / "a").rename(tmp_path / "b")
    again = load_spec(str(tmp_path / "b" / "out" / "spec.yaml"))
    ((run,), (other,)) = expand(again), expand(read_spec(options, "study", tmp_path / "b"))
    assert run.id == other.id == before
    assert run.config.dataset_name == str(tmp_path / "b" / "points")
    assert run.model["hidden_size"] == TINY["hidden_size"]
    assert (run.fields["model_config_name_or_path"], run.fields["dataset_name"]) == ("model", "points")
    assert str(tmp_path) not in (tmp_path / "b" / "out" / "spec.yaml").read_text()
    assert located({"dataset_name": "dino", "train_data_dir": "./points"}, again.folder) == {
        "dataset_name": "dino",
        "train_data_dir": str(tmp_path / "b" / "points"),
    }


def test_what_is_kept_of_a_study_is_read_with_the_same_care(capsys, tmp_path):
    """People may edit it, as they may edit the first one."""
    kept = tmp_path / "kept"
    StudyFolder(kept).write_spec(spec(tune=TUNE), "command")
    text = yaml.safe_load((kept / "spec.yaml").read_text())
    assert spec_from_dict(text["spec"], kept) == spec(tune=TUNE)
    text["spec"]["arms"]["../../evil"] = {}
    (kept / "spec.yaml").write_text(yaml.safe_dump(text))
    assert main(["study", "run", str(kept / "spec.yaml"), f"--out={tmp_path / 'out'}"]) == 2
    assert "the name '../../evil' of an arm: must be" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- identities ------------------------------------------------------------------------------------------------------

# How a run is done and where it goes, which changes nothing of what comes out.
WITHOUT_EFFECT = set(
    "output_dir overwrite_output_dir save_images_epochs save_model_epochs checkpointing_steps checkpoints_total_limit "
    "resume_from_checkpoint logger logging_dir push_to_hub hub_token hub_model_id hub_private_repo dry_run local_rank "
    "keep_every cache_dir in_memory_limit_mb dataloader_num_workers log_timestep_bins timestep_grad_every preflight "
    "plugins".split()
)


def other_value(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "other": 1}
    return value + 1 if isinstance(value, (int, float)) else f"{value}-other"


@pytest.fixture(scope="module")
def a_run():
    return expand(spec())[0]


# Of a file of a model, what is in it decides: see below.
@cases("name", [field.name for field in dataclasses.fields(TrainingConfig) if field.name != "model_config_name_or_path"])
def test_which_fields_decide(a_run, name):
    value = other_value(getattr(a_run.config, name))
    given = {key: value if key == name else old for key, old in a_run.given.items()}
    config = copy.copy(a_run.config)
    object.__setattr__(config, name, value)  # whatever its type
    other = dataclasses.replace(a_run, config=config, given=given)
    assert (other.id == a_run.id) == (name in WITHOUT_EFFECT)


def test_the_identity_is_of_what_decides(a_run, monkeypatch):
    """The hash is written down: results that people have keep their names, also when an option is added."""
    assert a_run.id == "constant--dino--0--69d45f93c944"
    assert dataclasses.replace(a_run, metrics=a_run.metrics[::-1]).id == a_run.id
    assert dataclasses.replace(a_run, metrics=("energy_distance",)).digest != a_run.digest
    some = ids(spec(datasets=["moons"], seeds=[1], arms={"cosine": ARMS["cosine"]}))  # others change nothing
    assert some.items() <= ids(spec()).items()
    before, fields = a_run.digest, a_run.fields
    new = Option(help="New.", role=UPDATE)
    monkeypatch.setattr(spec_module, "options_of", lambda config: {**options_of(config), "new": new})
    monkeypatch.setattr(spec_module, "defaults_of", lambda config: {**defaults_of(config), "new": False})
    for value in (False, True):
        monkeypatch.setattr(RunSpec, "fields", {**fields, "new": value})
        assert (dataclasses.replace(a_run).digest == before) is not value


def test_the_model_decides_not_its_place(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(TINY))

    def of(place):
        return ids(spec(base={**BASE, "model_config_name_or_path": str(tmp_path / place)}))

    assert of("here") == of("there") != ids(spec())
    (tmp_path / "there" / "config.json").write_text(json.dumps({**TINY, "hidden_size": 17}))
    assert not {*of("here").values()} & {*of("there").values()}


def test_what_is_written_elsewhere_is_the_same():
    """In the arm or in base, as an option or as a spec string, with or without a description and a title."""
    plain = ids(spec())
    arms = {name: {**fields, "max_train_steps": 30, "description": "words"} for name, fields in ARMS.items()}
    base = {key: value for key, value in BASE.items() if key != "max_train_steps"}
    assert ids(spec(arms=arms, base=base, title="Words", baseline="cosine")) == plain
    assert ids(spec(datasets={"dino": {"dataset_name": "dino"}, "moons": {}}, seeds=[1, 0])) == plain
    assert ids(spec(base={**BASE, "learning_rate": "3e-4", "max_grad_norm": 1})) == plain


def test_controls_are_arms_of_the_same_rate_and_change_no_run():
    """The baseline is none, with which every arm is compared; at another rate, it is one like any other."""
    arms = {**ARMS, "linear": {"lr_scheduler": "linear"}}
    with_controls = {**arms, "linear": {"lr_scheduler": "linear", "controls": "cosine"}}
    assert controlled(spec(arms=with_controls).arms) == [("linear", "cosine")]
    assert ids(spec(arms=with_controls)) == ids(spec(arms=arms))
    several = spec(arms=with_controls, learning_rates=[1e-3, 1e-2])
    assert controlled(several.arms) == [("linear@0.001", "cosine@0.001"), ("linear@0.01", "cosine@0.01")]
    kept = json.loads(json.dumps(several.to_dict()))
    assert spec_from_dict(kept, Path()).arms == several.arms
    with_controls["cosine"] = {"lr_scheduler": "cosine", "controls": "constant"}
    several = spec(arms=with_controls, learning_rates=[1e-3, 1e-2])
    assert [control for arm, control in controlled(several.arms) if arm.startswith("cosine")] == ["constant@0.01"]
    assert controlled(spec(arms=with_controls).arms) == [("linear", "cosine")]
