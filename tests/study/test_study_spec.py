"""Specifications of studies: what is refused before anything is written, and what decides the identity of a run."""

import copy
import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import datasets
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases, rows

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.options import UPDATE, Option, defaults_of, options_of
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec import spec as spec_module
from diffusers_lrlab.study.spec.expansion import expand, expand_tuning, located
from diffusers_lrlab.study.spec.reading import load_spec, num_runs, preset_names, read_spec, spec_from_dict
from diffusers_lrlab.study.spec.spec import RunSpec, controlled
from diffusers_lrlab.training.config import TrainingConfig

TINY = {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 16, "embedding_size": 8, "num_layers": 1}
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


def refused(capsys, folder, text, *options):
    """The line in which `lrlab study run` refuses a specification, with nothing written."""
    (folder / "study.yaml").write_text(text)
    before = sorted(folder.rglob("*"))
    assert main(["study", "run", str(folder / "study.yaml"), f"--out={folder / 'out'}", *options]) == 2
    out, error = capsys.readouterr()
    assert sorted(folder.rglob("*")) == before
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1 or "not valid YAML" in error
    return error


# --- what is refused -------------------------------------------------------------------------------------------------


def with_base(**fields):
    return {"base": {**BASE, **fields}}


def with_arm(**fields):
    return {"arms": {**ARMS, "a": fields}}


# Changes of the study, and what the message must contain.
REFUSED = [
    ({"seed": 3}, "no 'seed' in the study 'study'. Did you mean 'seeds'? Known: title, base"),
    (with_base(learning_rat=1e-3), "'learning_rat' in base. Did you mean 'learning_rate'?"),
    (with_arm(lr_schedule="cosine"), "'lr_schedule' in the arm 'a'. Did you mean 'lr_scheduler'?"),
    ({"datasets": {"a": {"dataset_nam": "dino"}}}, "'dataset_nam' in the data set 'a'. Did you mean 'dataset_name'?"),
    (with_base(output_dir="x"), "base has output_dir, which a study sets itself. Leave it out"),
    (with_base(train_batch_size="many"), "In the arm 'constant' on 'dino': --train_batch_size"),
    (with_base(learning_rate=-1), "In the arm 'constant' on 'dino': learning_rate=-1.0: must be"),
    (with_arm(lr_scheduler=None), "lr_scheduler: None"),
    (with_arm(lr_scheduler="cosin"), "In the arm 'a' on 'dino'"),
    (with_arm(lr_scheduler="step:gamma=2"), "gamma=2"),
    (with_base(lr_warmup_steps=5), "--lr_warmup_steps 5"),
    ({"base": {"num_epochs": 1, "num_validation_images": 200}}, "give max_train_steps, not num_epochs"),
    (with_arm(lr_scheduler="cosine", description="other words"), "'cosine' on 'dino' is the same as 'a' on 'dino'"),
    ({"arms": {"a": {"learning_rates": [1e-3, 1e-2]}, "a@0.001": {}}}, "Two arms would be called 'a@0.001'"),
    ({"seeds": [0, 1, 0]}, "seeds: 0 is listed twice"),
    (with_arm(ema="posthoc"), "ema='posthoc': must be an average that needs no snapshots"),
    (with_arm(distance_samples=100),
     "energy_distance cannot be compared between arms with different numbers of samples (100"),
    ({"arms": {shift: {"objective": f"flow_matching:shift={shift},num_steps=100"} for shift in "13"}},
     "validation_loss_ema cannot be compared between arms that differ in objective (shift=1.0, shift=3.0 on 'dino')"),
    ({"base": {"max_train_steps": 20}, "arms": {"none": {}, "told": {"label_column": "label"}}, "datasets": ["digits"],
      "metrics": ["validation_loss"]}, "arms that differ in label_column (None, label on 'digits')"),
    ({"datasets": {"a": {"dataset_name": "dino"}, "b": {"dataset_name": "dino"}}},
     "on 'a' is the same as 'constant' on 'b'"),
    (with_arm(dataset_name="dino"), "The arm 'a' has dataset_name, but arms are compared on the same data. Add a data set"),
    ({"metrics": []}, "metrics=[]: must be a list of one or more names"),
    ({"title": [1]}, "title=[1]: must be text"),
    ({"learning_rates": 5}, "learning_rates=5: must be numbers above 0"),
    (with_arm(learning_rates=[0]), "learning_rates of 'a' [0]: must be numbers above 0"),
    ({"learning_rates": ["1e-3", 0.001]}, "learning_rates: 0.001 is listed twice"),
    (with_arm(learning_rate=1e-3, learning_rates=[1e-3, 1e-2]),
     "'a' has learning_rate and learning_rates. Give one of them"),
    ({"baseline": "cosin"}, "The baseline 'cosin' is not an arm. Did you mean 'cosine'? They are constant, cosine"),
    (with_arm(controls=["cosin"]),
     "The control 'cosin' of 'a' is not another arm. Did you mean 'cosine'? They are constant"),
    (with_arm(controls=["a"]), "The control 'a' of 'a' is not another arm"),
    (with_arm(controls=["cosine", "cosine"]), "controls of 'a': 'cosine' is listed twice"),
    (with_arm(controls=[3]), "controls=[3] of 'a': must be names of arms"),
    ({"metrics": ["kll"]}, "metrics: there is no metric 'kll'. Did you mean 'kl'?"),
    ({"metrics": ["FID"]}, "there is no metric 'FID'. Did you mean 'frechet_distance'?"),
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
    ({"speedup_metric": "kl"}, "speedup_metric='kl': must be validation_loss_ema or validation_loss"),
    ({"arms": {"a/b": {}}}, "the name 'a/b' of an arm: must be text of letters, digits"),
    ({"arms": {"a--b": {}}}, "the name 'a--b' of an arm: must be"),
    ({"arms": {"a" * 65: {}}}, "of an arm: must be"),
    ({"arms": {256: {}}}, "the name 256 of an arm: must be"),
    ({"datasets": {"..": {"dataset_name": "dino"}}}, "the name '..' of a data set: must be"),
    ({"arms": ["cosine"]}, "arms=['cosine']: must be a mapping"),
    ({"arms": {"a": "cosine"}}, "the arm 'a' 'cosine': must be a mapping"),
    ({"arms": {}}, "The study 'study' has no arms. Add them"),
    ({"datasets": 3}, "datasets=3: must be a mapping of names to values"),
    ({"seeds": 0}, "seeds=0: must be a number of seeds from 1 to 1,000, or a list of them"),
    ({"seeds": [0.5]}, "seeds=[0.5]: must be"),
    ({"evaluation_points": 0}, "evaluation_points=0: must be a whole number in [1, 1e9]"),
    ({"datasets": {"mine": {"train_data_dir": "nowhere"}}}, "'nowhere' does not exist"),
    (with_base(model_config_name_or_path="study.yaml"), "study.yaml'. Hint: it cannot be read"),
    ({"arms": {"a": {"learning_rates": [1e-3, 1e-2]}}, "tune": {}}, "tune takes either learning_rates or factors"),
]  # fmt: skip

TUNE = {"learning_rates": [1e-3, 1e-2], "seeds": [10], "metric": "energy_distance"}
TUNINGS = [
    ({"seeds": [1, 7]}, {}, "tune: seeds [1] are also those of the comparison"),
    ({"factors": [1, 2]}, {}, "tune takes either learning_rates or factors"),
    ({}, {"learning_rates": [1e-3, 1e-2]}, "learning_rates and tune exclude each other"),
    ({"metric": "density"}, {}, "metric='density' of tune: must be a metric of which smaller values are better"),
    ({"metric": "frechet_distance"}, {}, "tune: metric: 'frechet_distance' is for images"),
    ({"learning_rate": 1}, {}, "no 'learning_rate' in tune. Did you mean 'learning_rates'?"),
    ({"learning_rates": []}, {}, "tune: learning_rates []: must be numbers above 0"),
    ({"extensions": 21}, {}, "extensions=21 of tune: must be a whole number in [0, 20]"),
    ({}, {"arms": {"a": {"learning_rate": 1e-3}, "b": {"learning_rate": 1e-4}}},
     "'a' on 'dino' is the same as 'b' on 'dino' at learning rate 0.001 of tune"),
]  # fmt: skip


@cases(("changes", "expected"), REFUSED)
def test_it_is_refused_before_anything_is_written(capsys, tmp_path, changes, expected):
    text = yaml.safe_dump({key: value for key, value in {**SPEC, **changes}.items() if value is not None}, sort_keys=False)
    assert expected in refused(capsys, tmp_path, text)


@cases(("changes", "others", "expected"), TUNINGS)
def test_tuning_that_makes_no_sense(capsys, tmp_path, changes, others, expected):
    assert expected in refused(capsys, tmp_path, yaml.safe_dump({**SPEC, **others, "tune": {**TUNE, **changes}}))


@cases(("text", "expected"), [
    ("arms:\n  a: {}\n  a: {lr_scheduler: constant}\ndatasets: [dino]\n", "twice"),
    ("arms: [", "not valid YAML"), ("- a\n- b\n", "must hold a mapping"), ("", "has no arms"),
])  # fmt: skip
def test_texts_that_are_no_study(capsys, tmp_path, text, expected):
    assert expected in refused(capsys, tmp_path, text)


GOOD = yaml.safe_dump(SPEC, sort_keys=False)
OPTIONS = [
    ("--executor=stakced", "no executor 'stakced'"),
    ("--workers=2", "--workers 2 has no effect without --executor pool or ray"),
    ("--executor=pool --workers=0", "--workers 0: must be a whole number in [1, "),
    ("--stack_size=0", "--stack_size 0: must be a whole number"), ("--executer=local", "Did you mean '--executor'?"),
    ("--seeds 5", "Unknown argument '--seeds'"), ("another.yaml", "Unknown argument 'another.yaml'. See lrlab study --help"),
]  # fmt: skip


@cases(("options", "expected"), OPTIONS)
def test_options_that_are_refused(capsys, tmp_path, options, expected):
    assert expected in refused(capsys, tmp_path, GOOD, *options.split())


def test_one_of_several_processes_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process" in refused(capsys, tmp_path, GOOD)


def test_points_that_are_read_one_by_one_cannot_be_stacked(capsys, tmp_path):
    datasets.Dataset.from_dict({"x": [[0.0, 1.0]] * 40}).save_to_disk(tmp_path / "points")
    capsys.readouterr()  # its progress bar
    mine = {"dataset_name": "points", "data_kind": "points", "in_memory_limit_mb": 0}
    base = {"max_train_steps": 2, "lr_warmup_steps": 0, "train_batch_size": 4, "num_validation_images": 4}
    text = yaml.safe_dump({**SPEC, "base": base, "datasets": {"mine": mine}, "metrics": ["validation_loss"]})
    error = refused(capsys, tmp_path, text, "--executor=stacked")
    assert "'constant' on 'mine' cannot be part of a stack: its points are not in memory. Use --executor local" in error


@cases(("arguments", "expected"), [
    ("run quick", "--out DIR is missing. Give a new folder"),
    ("run quik --out=TMP/out", "no study 'quik'. Did you mean 'quick'?"),
    ("run TMP/none.yaml --out=TMP/out", "Give a YAML file or a preset"),
    ("rum quick", "no action 'rum'. Did you mean 'run'?"),
    ("report TMP", "no study in"), ("list --out=TMP/out", "--out has no effect on `lrlab study list`. Leave it out"),
    ("run", "The form is `lrlab study run SPEC --out DIR`"),
])  # fmt: skip
def test_command_lines_that_are_refused(capsys, tmp_path, arguments, expected):
    assert main(["study", *arguments.replace("TMP", str(tmp_path)).split()]) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folders_that_are_something_else(capsys, tmp_path):
    (tmp_path / "study.yaml").write_text(GOOD)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "runs").write_text("")
    for out, parts, *more in (
        ("out", ["got one with thesis.tex and no readable spec.yaml", "new or empty"]),
        ("out", ["got one with thesis.tex and no readable spec.yaml", "new or empty"], "--dry_run"),
        ("file", ["got a file", "give another folder"]),
        ("odd", ["got one with runs and no readable spec.yaml", "give another folder"]),
    ):
        assert main(["study", "run", str(tmp_path / "study.yaml"), f"--out={tmp_path / out}", *more]) == 2
        error = capsys.readouterr().err
        for part in parts:
            assert part in error
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "study.yaml").write_text(GOOD)
    (tmp_path / "closed").mkdir(mode=0o500)
    assert main(["study", "run", str(tmp_path / "study.yaml"), f"--out={tmp_path / 'closed' / 'out'}"]) == 2
    assert "cannot be made" in capsys.readouterr().err


# --- what a specification means --------------------------------------------------------------------------------------


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


def test_arms_go_over_data_sets_and_these_over_base():
    study = read_spec(
        {
            "base": {**BASE, "learning_rate": 1e-3, "max_grad_norm": 1.0},
            "arms": {"plain": {}, "own": {"learning_rate": 1e-5}},
            "datasets": {"dino": {}, "careful": {"dataset_name": "moons", "learning_rate": 1e-4, "max_grad_norm": 0.5}},
            "seeds": 1,
        },
        "study",
    )
    found = {(run.arm, run.dataset): (run.config.learning_rate, run.config.max_grad_norm) for run in expand(study)}
    assert found == {
        ("plain", "dino"): (1e-3, 1.0),
        ("plain", "careful"): (1e-4, 0.5),
        ("own", "dino"): (1e-5, 1.0),
        ("own", "careful"): (1e-5, 0.5),
    }
    assert {run.config.dataset_name for run in expand(study)} == {"dino", "moons"}


def test_tuned_rates_go_into_the_comparison():
    study = spec(tune=TUNE)
    assert {(run.stage, run.seed, run.config.learning_rate) for run in expand_tuning(study)} == {
        ("tune", 10, 1e-3),
        ("tune", 10, 1e-2),
    }
    chosen = {(arm, dataset): 1e-2 if arm == "cosine" else 1e-3 for arm in study.arms for dataset in study.datasets}
    assert {(run.arm, run.stage, run.config.learning_rate) for run in expand(study, chosen)} == {
        ("constant", "compare", 1e-3),
        ("cosine", "compare", 1e-2),
    }


def test_paths_start_from_the_file(tmp_path, monkeypatch):
    for place in ("model", "images", "points"):
        (tmp_path / "studies" / place).mkdir(parents=True)
    (tmp_path / "studies" / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "studies" / "points" / "train.csv").write_text("x\n1\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "studies" / "study.yaml").write_text(
        yaml.safe_dump(
            {
                "arms": {"a": {"model_config_name_or_path": "model"}},
                "datasets": {"mine": {"dataset_name": "points"}, "pictures": {"train_data_dir": "./images"}, "dino": {}},
            }
        )
    )
    study = load_spec("../studies/study.yaml")
    folder = tmp_path / "studies"
    # As they are written: what is kept and shown of a study says nothing of the machine.
    assert str(tmp_path) not in json.dumps([study.arms, study.datasets])
    paths = {**study.arms["a"], **study.datasets["pictures"], **study.datasets["mine"]}
    assert located(paths, study.folder) == {
        "model_config_name_or_path": str(folder / "model"),
        "train_data_dir": str(folder / "images"),
        "dataset_name": str(folder / "points"),
    }
    assert located(study.datasets["dino"], study.folder) == {"dataset_name": "dino"}


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


@cases(
    ("place", "value", "part"),
    [
        (("baseline",), "nonsense", "The baseline 'nonsense' is not an arm"),
        (("arms", "../../evil"), {}, "the name '../../evil' of an arm: must be"),
        (("base", "seed"), 3, "base has seed"),
        (("baselin",), "cosine", "There is no 'baselin'"),
        (("precision",), "bf16", "There is no 'precision'"),
    ],
)
def test_what_is_kept_of_a_study_is_read_with_the_same_care(capsys, tmp_path, place, value, part):
    """People may edit it, as they may edit the first one."""
    kept = tmp_path / "kept"
    StudyFolder(kept).write_spec(spec(tune=TUNE), "command")
    text = yaml.safe_load((kept / "spec.yaml").read_text())
    assert spec_from_dict(text["spec"], kept) == spec(tune=TUNE)
    inner = text["spec"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (kept / "spec.yaml").write_text(yaml.safe_dump(text))
    assert main(["study", "run", str(kept / "spec.yaml"), f"--out={tmp_path / 'out'}"]) == 2
    assert part in capsys.readouterr().err
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


def test_a_new_option_names_no_result_anew(a_run, monkeypatch):
    """Nothing has to be said where it is declared: at its default it is left out."""
    before, fields = a_run.digest, a_run.fields
    new = Option(help="New.", role=UPDATE)
    monkeypatch.setattr(spec_module, "options_of", lambda config: {**options_of(config), "new": new})
    monkeypatch.setattr(spec_module, "defaults_of", lambda config: {**defaults_of(config), "new": False})
    for value in (False, True):
        monkeypatch.setattr(RunSpec, "fields", {**fields, "new": value})
        assert (dataclasses.replace(a_run).digest == before) is not value


def test_what_else_decides(a_run):
    changed = {
        "metrics": ("energy_distance",),
    }
    for name, value in changed.items():
        assert dataclasses.replace(a_run, **{name: value}).digest != a_run.digest
    assert dataclasses.replace(a_run, metrics=a_run.metrics[::-1]).id == a_run.id
    assert a_run.id == f"constant--dino--0--{a_run.digest}"


def test_the_model_decides_not_its_place(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(TINY))
    one, other = (spec(base={**BASE, "model_config_name_or_path": str(tmp_path / place)}) for place in ("here", "there"))
    assert ids(one) == ids(other) != ids(spec())
    (tmp_path / "there" / "config.json").write_text(json.dumps({**TINY, "hidden_size": 17}))
    assert not set(ids(one).values()) & set(ids(other).values())
    shutil.rmtree(tmp_path / "there")


def test_what_is_written_elsewhere_is_the_same():
    """In the arm or in base, as an option or as a spec string, with or without a description and a title."""
    plain = ids(spec())
    arms = {name: {**fields, "max_train_steps": 30, "description": "words"} for name, fields in ARMS.items()}
    base = {key: value for key, value in BASE.items() if key != "max_train_steps"}
    assert ids(spec(arms=arms, base=base, title="Words", baseline="cosine", speedup_metric="validation_loss_ema")) == plain
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


@functools.cache
def ids_of_many():
    return ids(
        spec(
            arms={name: {"lr_scheduler": name} for name in ("linear", "rex", "constant", "cosine")},
            datasets=["dino", "moons", "line", "circle"],
            seeds=6,
        )
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    arms=st.sets(st.sampled_from(["linear", "rex", "constant", "cosine"]), min_size=1),
    datasets=st.sets(st.sampled_from(["dino", "moons", "line", "circle"]), min_size=1),
    seeds=st.sets(st.integers(0, 5), min_size=1),
)
def test_more_arms_data_sets_and_seeds_change_no_other_run(arms, datasets, seeds):
    some = ids(spec(arms={name: {"lr_scheduler": name} for name in arms}, datasets=sorted(datasets), seeds=sorted(seeds)))
    assert some == {
        key: value for key, value in ids_of_many().items() if key[0] in arms and key[1] in datasets and key[2] in seeds
    }


def test_runs_that_choose_a_rate_are_the_same_runs_whatever_else_is_chosen_from():
    """More rates to choose from are more runs, and the old ones stay."""
    few, many = (
        {run.id for run in expand_tuning(spec(tune={**TUNE, "learning_rates": rates}))}
        for rates in ([1e-3, 1e-2], [1e-3, 1e-2, 1e-1])
    )
    assert few < many


def test_the_identity_is_of_a_version_of_the_format(a_run):
    """Written down, so that results that people have keep their names unless somebody means to change them."""
    assert isinstance(a_run, RunSpec)
    assert a_run.id == "constant--dino--0--69d45f93c944"


def test_losses_of_different_targets_stand_side_by_side_if_they_are_not_compared():
    arms = {"a": {}, "b": {"prediction_type": "v_prediction"}}
    assert len(expand(read_spec({"arms": arms, "datasets": ["dino"], "seeds": 1, "metrics": ["kl"]}, "x"))) == 2
