"""What the command line says when something cannot be done: short, with the value, what is allowed and the remedy."""

import contextlib
import functools
import importlib.util
import io
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import typing
from dataclasses import dataclass

import pytest
import started
import torch
from accelerate.state import AcceleratorState
from helpers import image_folder
from runs import SCRIPT, TINY_UNET, environment
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.options import options_of
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder

SMALL = (
    "--max_train_steps=3 --train_batch_size=4 --distance_samples=0 --eval_batch_size=2 --num_inference_steps=2 "
    "--num_validation_images=8 --validation_steps=1 --checkpointing_steps=2"
).split()


@dataclass
class Outcome:
    status: int
    stdout: str
    stderr: str


def load_script():
    spec = importlib.util.spec_from_file_location("train_ddpm", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def call(monkeypatch):
    """Calls the script's `main` in this process, which spares the seconds of starting another."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = load_script().main()
        AcceleratorState._reset_state(reset_partial_state=True)
        return Outcome(status, stdout.getvalue(), stderr.getvalue())

    return run


def start(*arguments, **options):
    """Runs the script as a user does."""
    return Outcome(*started.run(SCRIPT, *arguments, env=environment(), **options))


def assert_told(outcome, *parts):
    """One message that a person can act on, and nothing besides."""
    assert outcome.status == 2, outcome
    assert "Traceback" not in outcome.stderr
    assert len(outcome.stderr.splitlines()) < 25
    message = outcome.stderr[outcome.stderr.index("error: ") :]
    for part in parts:
        assert part in message


def substitute(texts, folder):
    """Texts of the tables below with the folder of the test in the place of TMP."""
    return [text.replace("TMP", str(folder)) for text in texts]


def contents(folder):
    """Every file of a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- options ---------------------------------------------------------------------------------------------------------

# name -> (arguments, what the message must contain)
OPTIONS = {
    "warm-up longer than the run": (
        ["--max_train_steps=5", "--lr_warmup_steps=10"],
        ["Warm-up of 10 updates", "run of 5 updates", "Use at most 4", "0.05"],
    ),
    "warm-up with constant": (
        ["--lr_scheduler=constant", "--lr_warmup_steps=10"],
        ["--lr_warmup_steps 10", "'constant'", "use --lr_scheduler constant_with_warmup"],
    ),
    "all of one's files": (["--dataset_name=~"], ["all of your files"]),
    "more inference steps than steps": (
        ["--ddpm_num_steps=10", "--num_inference_steps=20"],
        ["--num_inference_steps 20: must be at most 10, the timesteps"],
    ),
    "resolution": (["--resolution=30"], ["--resolution 30", "divisible by 4", "use 28 or 32"]),
    "both lengths": (
        ["--num_epochs=1", "--max_train_steps=3"],
        ["has no effect with --max_train_steps", "leave one of them out"],
    ),
    "two data sets": (["--dataset_name=digits", "--train_data_dir=TMP"], ["'digits'", "TMP", "leave one of them out"]),
    "name of a data set": (["--dataset_name=digit"], ["'digit'", "Did you mean 'digits'?", "USER/NAME"]),
    "missing folder": (["--train_data_dir=TMP/missing"], ["TMP/missing", "does not exist", "folder of images"]),
    "stream without a length": (
        ["--dataset_name=user/name", "--streaming"],
        ["--max_train_steps None: must be given with --streaming"],
    ),
    "plateau without validation": (
        ["--lr_scheduler=reduce_lr_on_plateau", "--num_validation_images=0"],
        ["'reduce_lr_on_plateau'", "validation loss", "--num_validation_images 0"],
    ),
    "missing model": (["--model_config_name_or_path=TMP/none"], ["it cannot be read", "config.json"]),
    "missing YAML": (["--config=TMP/none.yaml"], ["TMP/none.yaml", "Give the path of a YAML file"]),
}


def _wrong_values():
    """For each option that takes not every text: a wrong value, and what its error says is allowed."""
    hints = typing.get_type_hints(TrainingConfig)
    for name, known in options_of(TrainingConfig).items():
        types = (hints[name], *typing.get_args(hints[name]))
        literals = next((typing.get_args(each) for each in types if typing.get_origin(each) is typing.Literal), ())
        if known.range is not None:
            yield name, f"{known.range.bounds[0] - 1:g}", known.range.text
            yield name, "nan", known.range.text if float in types else "a whole number"
        elif literals:
            yield name, "zzz", str(literals[0])
        elif name.endswith("_kwargs"):
            yield name, "{", "JSON"
        elif known.registry and name != "dataset_name":
            yield name, "zzz", "Known: "


@cases("name, value, allowed", [*_wrong_values()])
def test_an_error_names_the_option_the_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(LabError) as error:
        resolve_config(parse_arguments([f"--{name}={value}"], ""))
    noun = options_of(TrainingConfig)[name].entries.noun if "Known: " in allowed else f"--{name}"
    for part in (noun, value, allowed):
        assert part in str(error.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_done_is_explained(call, tmp_path, name):
    arguments, parts = (substitute(texts, tmp_path) for texts in OPTIONS[name])
    assert_told(call(*arguments, f"--output_dir={tmp_path / 'run'}"), *parts)
    assert not (tmp_path / "run").exists()


def test_a_configuration_of_a_model_that_is_no_object_is_explained(call, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    outcome = call(f"--model_config_name_or_path={tmp_path / 'list.json'}", f"--output_dir={tmp_path / 'run'}")
    assert_told(outcome, "list.json", "cannot be read: it holds no JSON object")


def test_precision_that_the_cpu_cannot_do(call, tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("fp16 works here")
    outcome = call("--mixed_precision=fp16", f"--output_dir={tmp_path / 'run'}")
    assert_told(outcome, "fp16 needs a GPU", "use --mixed_precision bf16 or no")


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr_shedular: cosine", ["'--lr_shedular=cosine'", "run.yaml", "Did you mean '--lr_scheduler'?"]),
        ("- lr_scheduler", ["run.yaml", "mapping of options", "lr_scheduler: cosine"]),
        ("lr_scheduler: [cosine", ["run.yaml", "not valid YAML"]),
        *((text, ["run.yaml"]) for text in ("config: other.yaml", "checkpoints_total_limit: null", "seed: 1\nseed: 2")),
        ("lr_scheduler_kwargs: {d: 2026-01-01}", ["run.yaml", "lr_scheduler_kwargs", "2026, 1, 1", "not JSON"]),
        *(
            pytest.param(
                "seed: 3\n# für\n".encode(encoding),
                ["run.yaml': must be a file in UTF-8", f"in line {line}. Hint: save it as"],
                id=encoding,
            )
            for encoding, line in (("cp1252", 2), ("utf-16", 1))
        ),
    ],
    ids=str,
)
def test_a_wrong_yaml_file_is_named(call, yaml_file, tmp_path, text, parts):
    assert_told(call(f"--config={yaml_file(text)}", f"--output_dir={tmp_path / 'run'}"), *parts)


def test_the_command_line_overrides_yaml(yaml_file):
    path = yaml_file("lr_scheduler: step\nlr_scheduler_kwargs: {gamma: 0.5}\nseed: 3\ncenter_crop: true\nuse_ema: false\n")
    config = parse_arguments(["--seed=4", f"--config={path}", "--use_ema"], "")
    assert (config.lr_scheduler, json.loads(config.lr_scheduler_kwargs)) == ("step", {"gamma": 0.5})
    assert (config.seed, config.center_crop, config.use_ema) == (4, True, True)
    assert config.learning_rate is None


# --- data and models -------------------------------------------------------------------------------------------------


def test_plateau_on_too_few_images_to_hold_any_out(call, tmp_path):
    folder = image_folder(tmp_path / "images", count=4)
    arguments = ["--resolution=8", "--image_channels=1", *SMALL, f"--cache_dir={tmp_path / 'cache'}"]
    outcome = call(
        "--lr_scheduler=reduce_lr_on_plateau", f"--train_data_dir={folder}", *arguments, f"--output_dir={tmp_path / 'run'}"
    )
    assert_told(outcome, "'reduce_lr_on_plateau'", "without a validation set", "fewer than five", "more images")


FOUR_LEVELS = {
    "block_out_channels": [8] * 4,
    "down_block_types": ["DownBlock2D"] * 4,
    "up_block_types": ["UpBlock2D"] * 4,
}


@pytest.mark.parametrize(
    ("change", "arguments", "parts"),
    [
        (FOUR_LEVELS, ["--resolution=12"], ["--resolution 12", "3 times", "by 8", "use 8 or 16"]),
        ({"in_channels": 3}, [], ["in_channels=3", "must be 1, as the images have", "give --image_channels 3"]),
        ({"sample_size": 32}, [], ["sample_size=32", "must be 8, as the images have", "give --resolution 32"]),
        ({"_class_name": "UNet2DConditionModel"}, [], ["UNet2DConditionModel", "trains a UNet2DModel"]),
        ({"no_such_option": 1}, [], ["UNet2DModel does not take 'no_such_option'"]),
    ],
    ids=str,
)
def test_a_model_that_does_not_fit(call, tmp_path, change, arguments, parts):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**TINY_UNET, **change}))
    outcome = call(f"--model_config_name_or_path={path}", *arguments, f"--output_dir={tmp_path / 'run'}")
    assert_told(outcome, *parts)


# --- the output folder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A run of three updates with a checkpoint at the second; tests copy it or leave it as it is."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    outcome = start(*SMALL, f"--output_dir={folder}")
    assert outcome.status == 0, outcome.stderr
    return folder


FOREIGN = {"notes.txt": b"mine", "checkpoint-of-mine/a.bin": b"mine", "pipeline/b.bin": b"mine", "images/c.png": b"mine"}


@pytest.fixture
def run_with_foreign_files(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    for name, data in FOREIGN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.slow
def test_overwriting_replaces_the_run_and_nothing_else(run_with_foreign_files):
    folder = run_with_foreign_files
    (folder / "lrlab" / "left-over.txt").write_text("of the old run")
    (folder / "lrlab" / "lr_finder.json").write_text("{}")  # of no run
    arguments = ["--seed=1", "--checkpointing_steps=5", "--overwrite_output_dir", f"--output_dir={folder}"]
    outcome = start(*SMALL, *arguments)
    assert outcome.status == 0, outcome.stderr
    after = contents(folder)
    assert {name: after.get(name) for name in FOREIGN} == FOREIGN
    assert "lrlab/left-over.txt" not in after
    assert after["lrlab/lr_finder.json"] == b"{}"
    assert not (folder / "checkpoint-2").exists()
    assert json.loads(after["lrlab/run.json"])["config"]["seed"] == 1
    assert len(after["lrlab/metrics.jsonl"].splitlines()) == 1 + 3


def write_record(folder, **options):
    sections = {"run": {"status": "finished", "command": ""}, "train": {"num_updates": 1, "global_batch": 1}}
    config = {"output_dir": "run", "lr_scheduler": "constant", "logger": "tensorboard", **options}
    (folder / "lrlab" / "run.json").write_text(json.dumps({**sections, "config": config, "meta": {"versions": {}}}))


@pytest.mark.parametrize("logging_dir", ["TMP/outside", "../outside", ".", "photos"])
def test_a_record_cannot_delete_what_is_not_of_its_run(tmp_path, logging_dir):
    """The record of a run may be somebody else's."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for path in (folder / "lrlab", folder / "photos", folder / "logs" / "diffusers_lrlab", outside):
        path.mkdir(parents=True)
        (path / "file").write_text("mine")
        (path / ".tmp-mine").write_text("mine")
    directory = logging_dir.replace("TMP", str(tmp_path)) if isinstance(logging_dir, str) else logging_dir
    write_record(folder, logging_dir=3)
    with pytest.raises(LabError, match="config.logging_dir must be a text or None, got 3"):
        RunFolder(folder).clear()
    assert (folder / "lrlab" / "file").exists()
    write_record(folder, logging_dir=directory)
    RunFolder(folder).clear()
    assert (outside / "file").read_text() == (folder / "photos" / "file").read_text() == "mine"
    assert (outside / ".tmp-mine").exists()
    assert (folder / "photos" / ".tmp-mine").exists()
    assert not (folder / "lrlab").exists()
    assert (folder / "logs").exists() == (logging_dir == "photos")  # else where logs of trackers are by default


def test_a_run_is_not_replaced_by_one_that_cannot_start(call, run_with_foreign_files):
    before = contents(run_with_foreign_files)
    outcome = call("--train_batch_size=5000", "--overwrite_output_dir", f"--output_dir={run_with_foreign_files}")
    assert_told(outcome, "batch of 5000")
    assert contents(run_with_foreign_files) == before


# --- resuming --------------------------------------------------------------------------------------------------------


def test_resuming_another_run_says_what_differs_and_changes_nothing(call, finished_run):
    before = contents(finished_run)
    change = ["--lr_scheduler=linear", "--max_train_steps=9"]
    outcome = call(*SMALL, *change, "--resume_from_checkpoint=latest", f"--output_dir={finished_run}")
    differences = "'cosine' then, 'linear' now", "--max_train_steps: 3 then, 9 now"
    assert_told(outcome, str(finished_run / "checkpoint-3"), *differences, "Resume with the settings", "start a new one")
    assert "--lr_scheduler_kwargs" not in outcome.stderr  # follows from the schedule
    assert contents(finished_run) == before


# --- a full disk -----------------------------------------------------------------------------------------------------


def limit_files(num_bytes):
    """Makes every file longer than this fail to be written, which to the writer is like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_a_full_disk_leaves_what_was_there(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    before = contents(folder)
    outcome = start(
        *SMALL, "--resume_from_checkpoint=latest", f"--output_dir={folder}", before=functools.partial(limit_files, 2**20)
    )
    assert_told(outcome, "No room to write", "Free some space")
    after = contents(folder)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= {
        "lrlab/run.json",
        "lrlab/metrics.jsonl",
        "manifest.json",
    }
    assert json.loads(after["lrlab/run.json"])["run"]["status"] == "failed"


# --- real command lines ----------------------------------------------------------------------------------------------


def test_a_real_command_line_prints_the_message_alone(tmp_path):
    outcome = start("--train_batch_size=5000", f"--output_dir={tmp_path / 'run'}")
    assert_told(outcome, "batch of 5000", "Use at most --train_batch_size 1541")
    assert outcome.stderr.startswith("error: ")
    assert outcome.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--lr_scheduler=cosin"], 2), (["--help"], 0)],
    ids=str,
)
def test_a_typing_error_does_not_wait_for_torch(arguments, status):
    code = f"""
import runpy, sys
sys.argv = [{str(SCRIPT)!r}, *{arguments!r}]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit as end:
    print("status", end.code)
print("loaded", {{"torch", "diffusers", "datasets", "accelerate"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=True)
    assert result.stdout.splitlines()[-2:] == [f"status {status}", "loaded set()"]


# --- configurations made in Python -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"learning_rate": "1e-4"}, "learning_rate='1e-4' of TrainingConfig(): must be a number"),
        ({"seed": True}, "seed=True of TrainingConfig(): must be a whole number"),
        ({"lr_scheduler_kwargs": [1]}, "lr_scheduler_kwargs=[1] of TrainingConfig(): must be"),
        ({"lr_scheduler": "cosine_annealing:eta_min=0.1"}, "above --learning_rate"),
        ({"distance_samples": 1}, "at least 2"),
        ({"logging_dir": "../elsewhere"}, "inside --output_dir"),
    ],
    ids=str,
)
def test_python_gets_the_same_checks(options, part):
    with pytest.raises(LabError, match=re.escape(part)):
        resolve_config(TrainingConfig(**{"logger": "tensorboard"} | options))
