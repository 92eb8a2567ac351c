"""The ways into the training program: scripts, `lrlab`, modules and Python; and what the record says of the one taken."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import started
from registrations import restored

from diffusers_lrlab import LabError, TrainingConfig, train
from diffusers_lrlab.cli import main as cli
from diffusers_lrlab.core import plugins
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.config import as_call

HOST_SCRIPT = Path(__file__).parents[1] / "scripts" / "host_script.py"
SCHEDULE = """
from diffusers_lrlab.schedules.registries import SCHEDULERS

@SCHEDULERS.register("NAME", description="falls by the square", source="a test")
def falling(progress):
    return (1 - progress.fraction) ** 2
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return [*runs.tiny_arguments(tmp_path_factory.mktemp("model")), "--max_train_steps=2", "--log_timestep_bins=0"]


@pytest.mark.slow
def test_every_door_leads_to_the_same_run(tmp_path, quick):
    doors = {
        "script": ([runs.SCRIPT], "accelerate launch training_scripts/train_ddpm.py"),
        "lrlab": (["-m", "diffusers_lrlab", "train"], "lrlab train"),
        "module": (["-m", "diffusers_lrlab.train"], "accelerate launch -m diffusers_lrlab.train"),
    }
    rows = []
    for name, (door, command) in doors.items():
        status, _, stderr = started.run(*door, *quick, f"--output_dir={tmp_path / name}", env=runs.environment())
        assert status == 0, stderr
        rows.append(runs.read_metrics(tmp_path / name))
        record = runs.read_record(tmp_path / name)
        assert record["run"]["command"].startswith(f"{command} --model_config"), record["run"]["command"]
        assert record["run"]["call"] is None
    assert rows[0] == rows[1] == rows[2]


def test_help_and_errors_are_the_same_at_each_door(capsys):
    status, text, _ = started.run("-m", "diffusers_lrlab.train", "--help", env=runs.environment())
    assert status == 0
    assert text.startswith("usage: accelerate launch -m diffusers_lrlab.train [")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    of_command = capsys.readouterr().out
    assert of_command.startswith("usage: lrlab train [")
    assert text.partition("\n\n")[2] == of_command.partition("\n\n")[2]
    for command in ("train", "find-lr"):
        assert cli.main([command, "--lr_schedulr", "cosine"]) == 2
        told = "error: Unknown argument '--lr_schedulr' in the command line. Did you mean '--lr_scheduler'? See --help.\n"
        assert capsys.readouterr().err == told


def test_the_module_can_be_called_when_somebody_imports_it():
    code = "import diffusers_lrlab.train; from diffusers_lrlab import train; train(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=runs.environment())
    assert "TrainingConfig" in done.stderr.splitlines()[-1]


def test_a_run_from_python_shows_how_to_repeat_it(tmp_path, quick):
    """Neither the notebook's kernel nor the program of somebody else is a command that repeats the run."""
    folder = tmp_path / "run"
    config = parse_arguments([*quick, f"--output_dir={folder}", "--lr_scheduler=rex:d=0.8"], "")
    train(config)
    record, card = runs.read_record(folder), (folder / "README.md").read_text()
    assert record["run"]["command"] == record["run"]["call"] == as_call(config)
    assert "their code is not in this record" in card
    assert "```bash" not in card
    block = re.search(r"```python\n(from diffusers_lrlab import TrainingConfig.*?)```", card, re.DOTALL)[1]
    made = []
    exec(block.replace("import TrainingConfig, train", "import TrainingConfig"), {"train": made.append})
    assert made == [config]


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        TrainingConfig(learning_rate="auto", seed=3),
        TrainingConfig(lr_scheduler="step", lr_scheduler_kwargs={"gamma": 0.5}, preflight=False, streaming=True),
        TrainingConfig(dataset_name="it's a folder", output_dir="a b", hub_token="hf_secret", push_to_hub=True),
    ],
)
def test_a_call_asks_for_the_same_without_the_token(config):
    without_token = dataclasses.replace(config, hub_token=None)
    assert eval(as_call(config), {"train": lambda config: config, "TrainingConfig": TrainingConfig}) == without_token
    assert "hf_secret" not in as_call(config)


@pytest.mark.slow
def test_code_of_ones_own_is_recorded_and_needed_again(tmp_path, quick):
    """Trained with, and resumed with another one: what the code was is known, and it is never run unasked."""
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(SCHEDULE.replace("NAME", "falls_by_the_square"))
    arguments = [*quick, "--lr_scheduler=falls_by_the_square", f"--output_dir={folder}"]
    assert "Unknown learning-rate schedule 'falls_by_the_square'" in runs.run(*arguments, expect=2)
    runs.run(*arguments, f"--import={file}")
    rows, _ = runs.read_metrics(folder)
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 0.25e-3], rel=1e-9)
    (plugin,) = runs.read_record(folder)["meta"]["plugins"]
    assert plugin["name"] == str(file)
    file.write_text(file.read_text() + "\n# changed\n")
    stderr = runs.run(*arguments, f"--import={file}", "--resume_from_checkpoint=latest", "--checkpointing_steps=1")
    assert "warning: the code that --import loads has changed since this run began" in stderr


def test_a_study_takes_code_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(SCHEDULE.replace("NAME", "falls_in_a_study"))
    spec = tmp_path / "study.yaml"
    spec.write_text(
        "base: {plugins: mine.py, max_train_steps: 4, train_batch_size: 8}\n"
        "arms: {mine: {lr_scheduler: falls_in_a_study}, cosine: {lr_scheduler: cosine}}\n"
        "datasets: {dino: {dataset_name: dino}}\nseeds: 2\nmetrics: [validation_loss]\n"
    )
    with restored(SCHEDULERS, plugins._loaded):
        assert len(expand(load_spec(str(spec)))) == 4


def test_a_launched_script_takes_code_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(SCHEDULE.replace("NAME", "falls_in_a_launched_script"))
    own = [HOST_SCRIPT, "--lr_scheduler=falls_in_a_launched_script", "--lr_warmup_steps=0", f"--output_dir={tmp_path}"]
    launch = ("-m", "diffusers_lrlab.launch", "--import", tmp_path / "mine.py")
    status, _, stderr = started.run(*launch, *own, env={**runs.environment(), "ACCELERATE_USE_CPU": "true"})
    assert status == 0, stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * (1 - update / 48) ** 2 for update in range(48)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": "1e-4"}, "learning_rate='1e-4' of TrainingConfig(): must be a number"),
        ({"train_batch_size": 0}, "train_batch_size=0: must be a whole number in [1, 1e7], got 0."),
        ({"dataset_name": "a/b", "train_data_dir": "c"}, "dataset_name='a/b' and train_data_dir='c' are both given"),
        ({"resume_from_checkpoint": "a", "output_dir": "none"}, "resume_from_checkpoint='a': must be a checkpoint"),
    ],
    ids=str,
)
def test_errors_from_python_name_the_argument(options, message):
    with pytest.raises(LabError) as error:
        train(TrainingConfig(**options))
    assert str(error.value).startswith(message)
