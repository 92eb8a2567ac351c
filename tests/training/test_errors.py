"""What the command line says when something cannot be done: short, with the value, what is allowed and the remedy."""

import functools
import json
import re
import resource
import shutil
import signal
import typing

import pytest
import started
import torch
from accelerate.state import AcceleratorState
from helpers import image_folder
from runs import SCRIPT, TINY_UNET, environment
from tables import cases

from diffusers_lrlab.cli.main import main
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


@pytest.fixture
def refused(monkeypatch, capsys):
    """The message of a command, in this process, that ends with one error and nothing besides."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments):
        status = main(["train", *map(str, arguments)])
        AcceleratorState._reset_state(reset_partial_state=True)
        return told(status, capsys.readouterr().err)

    return run


def start(*arguments, **options):
    """Runs the script as a user does."""
    return started.run(SCRIPT, *arguments, env=environment(), **options)


def told(status, stderr):
    """One message that a person can act on."""
    assert status == 2, stderr
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) < 25
    return stderr[stderr.index("error: ") :]


def contents(folder):
    """Every file of a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- options ---------------------------------------------------------------------------------------------------------

# Arguments, and what the message must contain; TMP is the folder of the test.
OPTIONS = [
    ("--max_train_steps=5 --lr_warmup_steps=10", "would never be reached. Use at most 4, or a fraction such as 0.05"),
    ("--lr_scheduler=constant --lr_warmup_steps=10", "'constant', which has no warm-up; use --lr_scheduler constant_with"),
    ("--dataset_name=~", "all of your files"),
    ("--ddpm_num_steps=10 --num_inference_steps=20", "--num_inference_steps 20: must be at most 10, the timesteps"),
    ("--resolution=30", "halves images 2 times; use 28 or 32"),
    ("--num_epochs=1 --max_train_steps=3", "has no effect with --max_train_steps. Hint: leave one of them out"),
    ("--dataset_name=digits --train_data_dir=TMP", "--train_data_dir 'TMP' are both given. Hint: leave one of them out"),
    ("--dataset_name=digit", "Did you mean 'digits'?"),
    ("--train_data_dir=TMP/missing", "'TMP/missing' does not exist. Give the path of a folder of images"),
    ("--dataset_name=user/name --streaming", "--max_train_steps None: must be given with --streaming"),
    ("--lr_scheduler=reduce_lr_on_plateau --num_validation_images=0", "follows the validation loss; it cannot run with"),
    ("--model_config_name_or_path=TMP/unet.json --resolution=9", "halves images once; use 8 or 10"),
    ("--model_config_name_or_path=TMP/none", "it cannot be read"),
    ("--model_config_name_or_path=TMP/list.json", "cannot be read: it holds no JSON object"),
    ("--config=TMP/none.yaml", "Give the path of a YAML file"),
    ("--lr_scheduler=cosine_annealing:eta_min=0.1", "above --learning_rate"),
    ("--logger=tensorboard --logging_dir=../elsewhere", "inside --output_dir"),
]


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


@cases("arguments, part", OPTIONS)
def test_an_option_that_cannot_be_done_is_explained(refused, tmp_path, arguments, part):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "unet.json").write_text(json.dumps(TINY_UNET))
    error = refused(*arguments.replace("TMP", str(tmp_path)).split(), f"--output_dir={tmp_path / 'run'}")
    assert part.replace("TMP", str(tmp_path)) in error
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="fp16 works here")
def test_precision_that_the_cpu_cannot_do(refused, tmp_path):
    error = refused("--mixed_precision=fp16", f"--output_dir={tmp_path / 'run'}")
    assert "fp16 needs a GPU, and this machine has none. Hint: use --mixed_precision bf16 or no" in error


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("lr_shedular: cosine", "Did you mean '--lr_scheduler'?"),
        ("- lr_scheduler", "must hold a mapping of options to values, such as 'lr_scheduler: cosine'"),
        ("lr_scheduler: [cosine", "is not valid YAML: while parsing"),
        ("config: other.yaml", "A file cannot include another one"),
        ("checkpoints_total_limit: null", "Remove the line to get the default"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("lr_scheduler_kwargs: {d: 2026-01-01}", "2026, 1, 1)}, which is not JSON"),
        ("seed: 3\n# für\n".encode("cp1252"), "must be a file in UTF-8, got another encoding in line 2. Hint: save it as"),
    ],
    ids=str,
)
def test_a_wrong_yaml_file_is_named(refused, yaml_file, tmp_path, text, part):
    error = refused(f"--config={yaml_file(text)}", f"--output_dir={tmp_path / 'run'}")
    assert "run.yaml" in error
    assert part in error


def test_the_command_line_overrides_yaml(yaml_file):
    path = yaml_file("lr_scheduler: step\nlr_scheduler_kwargs: {gamma: 0.5}\nseed: 3\ncenter_crop: true\nuse_ema: false\n")
    config = parse_arguments(["--seed=4", f"--config={path}", "--use_ema"], "")
    assert (config.lr_scheduler, json.loads(config.lr_scheduler_kwargs)) == ("step", {"gamma": 0.5})
    assert (config.seed, config.center_crop, config.use_ema) == (4, True, True)
    assert config.learning_rate is None


# --- data and models -------------------------------------------------------------------------------------------------


def test_plateau_on_too_few_images_to_hold_any_out(refused, tmp_path):
    folder = image_folder(tmp_path / "images", count=4)
    arguments = ["--resolution=8", "--image_channels=1", *SMALL, f"--cache_dir={tmp_path / 'cache'}"]
    arguments += ["--lr_scheduler=reduce_lr_on_plateau", f"--train_data_dir={folder}", f"--output_dir={tmp_path / 'run'}"]
    assert "must be left out without a validation set, got fewer than five images" in refused(*arguments)


@cases(
    "change, part",
    [
        ({"sample_size": 32}, "must be 8, as the images have, got 32. Hint: give --resolution 32"),
        ({"_class_name": "UNet2DConditionModel"}, "trains a UNet2DModel"),
        ({"no_such_option": 1}, "UNet2DModel does not take 'no_such_option'"),
    ],
)
def test_a_model_that_does_not_fit(refused, tmp_path, change, part):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**TINY_UNET, **change}))
    assert part in refused(f"--model_config_name_or_path={path}", f"--output_dir={tmp_path / 'run'}")


# --- the output folder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A run of three updates with a checkpoint at the second; tests copy it or leave it as it is."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    status, _, stderr = start(*SMALL, f"--output_dir={folder}")
    assert status == 0, stderr
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
    status, _, stderr = start(*SMALL, *arguments)
    assert status == 0, stderr
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
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for path in (folder / "lrlab", folder / "photos", folder / "logs" / "diffusers_lrlab", outside):
        path.mkdir(parents=True)
        (path / "file").write_text("mine")
        (path / ".tmp-mine").write_text("mine")
    write_record(folder, logging_dir=3)
    with pytest.raises(LabError, match="config.logging_dir must be a text or None, got 3"):
        RunFolder(folder).clear()
    assert (folder / "lrlab" / "file").exists()
    write_record(folder, logging_dir=logging_dir.replace("TMP", str(tmp_path)))
    RunFolder(folder).clear()
    assert (outside / "file").read_text() == (folder / "photos" / "file").read_text() == "mine"
    assert (outside / ".tmp-mine").exists()
    assert (folder / "photos" / ".tmp-mine").exists()
    assert not (folder / "lrlab").exists()
    assert (folder / "logs").exists() == (logging_dir == "photos")  # else where logs of trackers are by default


def test_a_run_is_not_replaced_by_one_that_cannot_start(refused, run_with_foreign_files):
    before = contents(run_with_foreign_files)
    error = refused("--train_batch_size=5000", "--overwrite_output_dir", f"--output_dir={run_with_foreign_files}")
    assert "batch of 5000" in error
    assert contents(run_with_foreign_files) == before


def test_resuming_another_run_says_what_differs_and_changes_nothing(refused, finished_run):
    before = contents(finished_run)
    change = ["--lr_scheduler=linear", "--max_train_steps=9"]
    error = refused(*SMALL, *change, "--resume_from_checkpoint=latest", f"--output_dir={finished_run}")
    for part in ("'cosine' then, 'linear' now", "--max_train_steps: 3 then, 9 now", str(finished_run / "checkpoint-3")):
        assert part in error
    assert "--lr_scheduler_kwargs" not in error  # follows from the schedule
    assert contents(finished_run) == before


def limit_files(num_bytes):
    """Makes every file longer than this fail to be written, which to the writer is like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_a_full_disk_leaves_what_was_there(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    before = contents(folder)
    arguments = (*SMALL, "--resume_from_checkpoint=latest", f"--output_dir={folder}")
    status, _, stderr = start(*arguments, before=functools.partial(limit_files, 2**20))
    assert re.search("No room to write .*Free some space", told(status, stderr))
    after = contents(folder)
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"lrlab/run.json", "lrlab/metrics.jsonl", "manifest.json"}
    assert json.loads(after["lrlab/run.json"])["run"]["status"] == "failed"


def test_a_real_command_line_prints_the_message_alone(tmp_path):
    status, stdout, stderr = start("--train_batch_size=5000", f"--output_dir={tmp_path / 'run'}")
    assert told(status, stderr) == stderr
    assert "Use at most --train_batch_size 1541" in stderr
    assert stdout == ""
