"""`lrlab rerun`: a run beside its record, equal or not, and what it says then."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from published import RECORD, run_folder
from runs import tiny_arguments
from safetensors.torch import load_file, save_file
from started import run

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.options import defaults_of
from diffusers_lrlab.hub.recorded_options import recorded_options
from diffusers_lrlab.hub.records import read_record
from diffusers_lrlab.hub.rerun import compare_runs, repeated_options, without_replaced, write_comparison
from diffusers_lrlab.training.arguments import parse_options
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def pair(tmp_path):
    """The committed record, and a copy of it."""
    run_folder(tmp_path / "then")
    shutil.copytree(tmp_path / "then", tmp_path / "now")
    return tmp_path / "then", tmp_path / "now"


def change(folder, function):
    """Changes the record of a run."""
    file = folder / "lrlab" / "run.json"
    record = json.loads(file.read_text())
    function(record)
    file.write_text(json.dumps(record))


def change_log(folder, column, factor, at):
    file = folder / "lrlab" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["update"] == at and column in row:
            row[column] *= factor
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_equal_is_reproduced_to_the_bit(pair):
    found = compare_runs(*pair)
    assert found.is_exact
    assert found.agrees
    assert found.findings == dict.fromkeys(("learning rate", "losses", "results", "weights"), "equal")
    assert found.describe().endswith("The record is reproduced, to the bit.")


def test_another_version_is_named_and_gets_a_tolerance(pair):
    change(pair[1], lambda record: record["meta"]["versions"].update(torch="9.9"))
    change_log(pair[1], "loss", 1.001, at=9)
    found = compare_runs(*pair)
    assert found.environment == {"torch": ("2.13.0+cpu", "9.9")}
    assert found.agrees
    assert not found.is_exact
    assert "torch: '2.13.0+cpu' in the record, '9.9' now" in found.describe()
    assert "losses: different from update 9 on" in found.describe()
    assert "confirmed within 5%, in another environment; weights are exempt" in found.describe()
    assert not compare_runs(*pair, tolerance=1e-5).agrees


def test_the_same_environment_gets_none(pair):
    change_log(pair[1], "loss", 1.0000001, at=9)
    found = compare_runs(*pair)
    assert not found.agrees
    assert "NOT reproduced" in found.describe()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: change_log(folder, "lr", 1.001, at=2399),  # next to nothing of the peak, and yet another curve
        lambda folder: change_log(folder, "loss", 1.5, at=2399),
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: save_file({"weights": torch.zeros(3)}, folder / WEIGHTS),
        lambda folder: (folder / WEIGHTS).write_bytes(b"damaged"),
    ],
    ids=["lr", "late-loss", "no-weights", "other-shapes", "damaged"],
)
def test_another_version_excuses_little(pair, spoil):
    change(pair[1], lambda record: record["meta"]["versions"].update(torch="9.9"))
    spoil(pair[1])
    assert not compare_runs(*pair).agrees


def test_nothing_to_compare_confirms_nothing(pair):
    for folder in pair:
        (folder / "lrlab" / "metrics.jsonl").unlink()
        (folder / WEIGHTS).unlink()
        change(folder, lambda record: record["train"].update(results={}))
    found = compare_runs(*pair)
    assert not found.is_exact
    assert not found.agrees
    assert "nothing to confirm" in found.describe()


def test_another_number_of_processes_is_another_batch(pair):
    change(pair[1], lambda record: record["train"].update(global_batch=128))
    assert compare_runs(*pair).settings == {"images an update, over all processes": (64, 128)}


@pytest.mark.parametrize(
    "row", ["[]", "{}", '{"update": 1, "lr": "x"}', '{"update": "1"}', '{"update": 1, "lo', '{"update": NaN}']
)
def test_a_log_that_is_none_is_refused(pair, row):
    (pair[0] / "lrlab" / "metrics.jsonl").write_text('{"update": 0}\n' + row + "\n")
    with pytest.raises(LabError, match="Line 2 of .* is not a row of a log"):
        compare_runs(*pair)


def test_another_setting_is_another_run(pair):
    change(pair[1], lambda record: record["config"].update(learning_rate=2e-3))
    found = compare_runs(*pair)
    assert found.settings == {"learning_rate": (1e-3, 2e-3)}
    assert not found.agrees
    assert "learning_rate: 0.001 in the record, 0.002 now" in found.describe()


@pytest.mark.parametrize(
    ("spoil", "part", "text"),
    [
        (lambda folder: change_log(folder, "lr", 2.0, at=1209), "learning rate", "different from update 1209 on"),
        (lambda folder: (folder / "lrlab" / "metrics.jsonl").unlink(), "losses", "rows of the log in the record and 0 now"),
        (lambda folder: (folder / WEIGHTS).unlink(), "weights", "in the record only"),
        (
            lambda folder: change(folder, lambda record: record["train"]["results"].pop("frechet_distance")),
            "results",
            "frechet_distance is in the record only",
        ),
        (
            lambda folder: change(folder, lambda record: record["train"]["results"].update(frechet_distance=9.0)),
            "results",
            "frechet_distance: 2.26636 then, 9 now (3 apart, the most)",
        ),
    ],
    ids=["lr", "log", "no-weights", "missing", "changed"],
)  # fmt: skip
def test_what_differs_is_said(pair, spoil, part, text):
    spoil(pair[1])
    found = compare_runs(*pair)
    assert text in found.findings[part]
    assert not found.agrees


def test_weights_that_differ(pair):
    file = pair[1] / WEIGHTS
    weights = {name: tensor.to(torch.float64) for name, tensor in load_file(file).items()}
    for folder in pair:
        save_file(weights, folder / WEIGHTS)
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, file)
    found = compare_runs(*pair)
    assert found.largest["weights"] == pytest.approx(0.01)
    assert found.findings["weights"] == "1 of 1 tensor differs; the difference has 0.01 of their norm"


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        (ONES * float("nan"), ONES * float("nan"), "equal"),
        (ONES.to(torch.float8_e4m3fn), ONES.to(torch.float8_e4m3fn), "equal"),
        (ONES.to(torch.float8_e4m3fn), ONES, "float8_e4m3fn in the record, and torch.float32"),
        (ONES.to(torch.float8_e4m3fn), (2 * ONES).to(torch.float8_e4m3fn), "has 1 of their norm"),
        (ONES.to(torch.complex64), ONES, "w is torch.complex64 in the record, and torch.float32 now"),
        (ONES.to(torch.complex64), 1j * ONES, "has 1.4 of their norm"),
        (ONES, ONES * float("nan"), "the difference is not finite"),
        (ONES, ONES.double(), "w is torch.float32 in the record, and torch.float64 now"),
        (0 * ONES, -0.0 * ONES, "1 of 1 tensor differs"),
    ],
)  # fmt: skip
def test_weights_are_compared_bit_by_bit_whatever_their_type(pair, then, now, text):
    for folder, tensor in zip(pair, (then, now), strict=True):
        save_file({"w": tensor}, folder / WEIGHTS)
    found = compare_runs(*pair)
    assert text in found.findings["weights"]
    assert found.is_exact == (text == "equal")
    write_comparison(found, pair[1])


def test_a_record_without_weights_is_compared_by_the_rest(pair):
    (pair[0] / WEIGHTS).unlink()
    found = compare_runs(*pair)
    assert found.findings["weights"] == "the record has none"
    assert found.agrees


@pytest.mark.parametrize("folder", sorted(RECORD.parent.glob("*/lrlab")), ids=lambda path: path.parent.name)
def test_a_committed_record_says_all_that_repeats_it(folder):
    """The options that it gives resolve to what it recorded."""
    recorded = json.loads((folder / "run.json").read_text())["config"]
    config = resolve_config(parse_options(repeated_options(folder.parent) | {"output_dir": "x"}, "the record")).to_dict()
    compared = config.keys() & recorded.keys() - {"output_dir"}
    assert {name: config[name] for name in compared} == {name: recorded[name] for name in compared}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (
            ["--ddpm_num_steps", "500"],
            {"objective_kwargs": {"prediction_type": "epsilon"}, "optimizer_kwargs": {"eps": 1e-8}},
        ),
        (["--objective=ddpm"], {"optimizer_kwargs": {"eps": 1e-8}}),
        (
            ["--optimizer", "sgd", "--prediction-type=sample"],
            {"objective_kwargs": {"num_steps": 1000}},
        ),
        (
            ["--optimizer_kwargs={}"],
            {
                "objective_kwargs": {"num_steps": 1000, "prediction_type": "epsilon"},
                "optimizer_kwargs": {"eps": 1e-8},
            },
        ),
    ],
    ids=["one parameter", "objective", "optimizer and prediction", "only parameters"],
)
def test_options_take_the_place_of_recorded_parameters(arguments, options):
    parameters = {"num_steps": 1000, "prediction_type": "epsilon"}
    recorded = {"objective": "ddpm", "objective_kwargs": parameters, "optimizer": "adamw", "optimizer_kwargs": {"eps": 1e-8}}
    kept = without_replaced(recorded, arguments)
    assert kept == {"objective": "ddpm", "optimizer": "adamw"} | options


def test_a_record_of_another_version_is_refused(pair):
    change(pair[0], lambda record: record["config"].update(of_the_future=1))
    with pytest.raises(LabError, match="'of_the_future', which this version does not know"):
        repeated_options(pair[0])


def test_a_checkpoint_of_another_version_is_refused_as_its_record_is(pair):
    """Not with a `TypeError`, as `lrlab merge` once did."""
    record = read_record(pair[0])
    known = defaults_of(TrainingConfig)
    of_then = {name: value for name, value in record["config"].items() if name in known}
    left = {"gone": False, "decoding": "float"}
    assert recorded_options(record, "run", {**record["config"], **left}) == {**known, **of_then}
    with pytest.raises(LabError, match="has 'decoding', which this version does not know"):
        recorded_options(record, "run", {**record["config"], "decoding": "draft"})
    with pytest.raises(LabError, match="The record of 'run' has 'of_the_future', which this version does not know"):
        recorded_options(record, "run", {**record["config"], "of_the_future": 1})


def deep(levels):
    return {"a": deep(levels - 1)} if levels else 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"lr_scheduler_kwargs": deep(900)},
            "run.json' is damaged (it cannot be read as JSON: it is nested more than 50 levels deep)",
        ),
        ({"ddpm_num_steps": 10**12}, "--ddpm_num_steps 1000000000000: must be"),
        ({"max_train_steps": 10**12}, "--max_train_steps 1000000000000: must be"),
        ({"seed": 10**19}, "--seed 10000000000000000000: must be"),
        ({"dataset_name": "\x1b]0;mine\x07x/y\x9b2J\u202e"}, r"'\x1b]0;mine\x07x/y\x9b2J\u202e'"),
        ({"lr_scheduler": "\x1b[31mrex"}, r"\x1b[31mrex"),
    ],
    ids=["deep", "timesteps", "updates", "seed", "data", "schedule"],
)
def test_absurd_records_end_in_messages_that_do_nothing_to_a_terminal(pair, tmp_path, capsys, changed, message):
    change(pair[0], lambda record: record["config"].update({"num_epochs": None} | changed))
    assert main(["rerun", str(pair[0]), "--out", str(tmp_path / "new")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert not any(character in told for character in "\x1b\x07\x9b\u202e")


def test_what_differs_does_nothing_to_a_terminal(pair, monkeypatch, capsys):
    change(pair[0], lambda record: record["meta"].update(platform="\x1b[2J"))
    monkeypatch.setattr("diffusers_lrlab.run.train.run_training", lambda config: pair[1])
    main(["rerun", str(pair[0]), "--compare", "--out", "again"])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_done_again(tmp_path):
    """A real run, and a real one from its record with one flag changed; test_hub has one without."""
    arguments = [*tiny_arguments(tmp_path), "--max_train_steps=6", f"--output_dir={tmp_path / 'run'}", "--lr_scheduler=rex"]
    script = Path(__file__).parents[2] / "training_scripts" / "train_ddpm.py"
    status, _, error = run(script, *arguments, env=os.environ)
    assert status == 0, error
    lrlab = tmp_path / "lrlab.py"
    lrlab.write_text("import sys\nfrom diffusers_lrlab.cli.main import main\nsys.exit(main())")

    def rerun(*options, expect=0):
        done = run(lrlab, "rerun", tmp_path / "run", *options, env=os.environ)
        assert done[0] == expect, done
        return done

    _, told, _ = rerun("--compare", "--out", str(tmp_path / "other"), "--seed", "1")
    assert "seed: 0 in the record, 1 now" in told
    assert "This is another run: its settings differ." in told
    other = ("--out", str(tmp_path / "other"))
    _, _, told = rerun(*other, expect=2)
    assert (
        f"--out '{tmp_path / 'other'}' already holds a run (status: finished). Replace it with --overwrite_output_dir"
        in told
    )
    rerun(*other, "--overwrite_output_dir")
    change(tmp_path / "other", lambda record: record["run"].update(status="cancelled"))
    _, _, told = rerun(*other, expect=2)
    assert "Continue it with --resume_from_checkpoint latest" in told
    _, told, _ = rerun(*other, "--compare", "--resume_from_checkpoint", "latest")
    assert "Resumed at update 6" in told
    assert "equal" in told


def test_a_run_that_is_not_reproduced_is_an_error(pair, monkeypatch, capsys):
    """With the run that was done again in the place of training it, which the test above does."""
    change_log(pair[1], "loss", 1.5, at=1209)
    monkeypatch.setattr("diffusers_lrlab.run.train.run_training", lambda config: pair[1])
    assert main(["rerun", str(pair[0]), "--compare", "--out", "again"]) == 2
    told = capsys.readouterr()
    assert "losses: different from update 1209 on" in told.out
    assert "was not reproduced; both are kept" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is neither a folder nor a repository"),
        (["empty"], "holds no record of a run"),
        (["then", "--tolerance", "0.1"], "--tolerance has no effect without --compare"),
        (["then", "--compare", "--tolerance", "nan"], "--tolerance nan: must be"),
        (["then", "--compare", "--output_dir", "then"], "'--output_dir' has no effect on a rerun"),
        (["then", "--compare", "--config", "x.yaml"], "'--config' has no effect on a rerun"),
        (["then", "--revision", "v1"], "--revision 'v1' is for repositories"),
        (["then", "--out", "then"], "is the folder of the recorded run"),
        (["then", "--out", "now"], "already holds a run"),
        (["then", "--out", "new", "--learning_rte", "1"], "Unknown argument '--learning_rte'"),
    ],
)  # fmt: skip
def test_reruns_that_cannot_work(pair, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["rerun", *arguments]) == 2
    assert message in capsys.readouterr().err
