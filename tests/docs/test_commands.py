"""Commands in README and docs/ are understood by what they start, and run where that is cheap."""

import dataclasses
import json
import re
import subprocess

import latents
import printed
import pytest
import runs
import started
from helpers import image_folder, load_data
from tables import cases

from diffusers_lrlab.cli.main import COMMANDS
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.plugins import load_plugins
from diffusers_lrlab.data.toy2d import TOY_DATASETS
from diffusers_lrlab.study.shown_command import PRESETS_FOLDER
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training import resolve
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.trackers import tracker_packages

# Every flag of diffusers' examples/unconditional_image_generation/train_unconditional.py, with a value for it.
UPSTREAM_FLAGS = """
dataset_name=user/name dataset_config_name=default model_config_name_or_path=unet train_data_dir=images output_dir=out
overwrite_output_dir cache_dir=cache resolution=64 center_crop random_flip train_batch_size=16 eval_batch_size=16
dataloader_num_workers=0 num_epochs=100 save_images_epochs=10 save_model_epochs=10 gradient_accumulation_steps=1
learning_rate=1e-4 lr_scheduler=cosine lr_warmup_steps=500 adam_beta1=0.95 adam_beta2=0.999 adam_weight_decay=1e-6
adam_epsilon=1e-08 use_ema ema_inv_gamma=1.0 ema_power=0.75 ema_max_decay=0.9999 push_to_hub hub_token=token
hub_model_id=user/name hub_private_repo logger=tensorboard logging_dir=logs local_rank=-1 mixed_precision=no
prediction_type=epsilon ddpm_num_steps=1000 ddpm_num_inference_steps=1000 ddpm_beta_schedule=linear
checkpointing_steps=500 checkpoints_total_limit=1 resume_from_checkpoint=latest
enable_xformers_memory_efficient_attention preserve_input_precision
""".split()


@cases("flag", UPSTREAM_FLAGS)
def test_every_flag_of_upstream_is_understood(flag):
    name, _, value = flag.partition("=")
    name = "num_inference_steps" if name == "ddpm_num_inference_steps" else name  # whose alias it is
    given = getattr(parse_arguments([f"--{flag}"], ""), name)
    assert given is True if not value else given == type(given)(value)


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    """A clone with what the pages take for the reader's own: images, latents, a recipe, a schedule."""
    for name in ("photos", "shapes-32"):
        image_folder(tmp_path / name, count=2)
    for name in ("photos-latents", "digits-latents"):
        latents.write_record(tmp_path / name)
    (tmp_path / "recipe.yaml").write_text("lr_scheduler: rex\n")
    (tmp_path / "quick.yaml").write_text(printed.block_with("logger:", "yaml").code)
    files = {"stairs": "def stairs", "gated": "class GatedDenoiser", "lab_extras": "def sawtooth"}
    for name, text in {**files, "image_metrics": "def thumbnails"}.items():
        (tmp_path / f"{name}.py").write_text(printed.block_with(text, "python").code)
    for name in ("training_scripts", "model_cards"):
        (tmp_path / name).symlink_to(printed.ROOT / name)
    monkeypatch.chdir(tmp_path)


ONCE = {tuple(words): block for block, words in reversed(printed.commands())}


@pytest.mark.usefixtures("readers_folder")
def test_printed_commands_and_examples_of_help_are_understood(monkeypatch):
    monkeypatch.setattr(resolve, "has_points", lambda config: config.dataset_name in TOY_DATASETS)  # would ask the Hub
    examples = {tuple(command.example.split()): name for name, command in COMMANDS.items()}
    for words, block in (ONCE | examples).items():
        try:
            with printed.registrations_undone():
                if "own-package.md" in str(block):  # as if it were installed
                    load_plugins("lab_extras.py")
                _understand(list(words))
        except BaseException as error:
            error.add_note(f"{block}: {' '.join(words)}")
            raise
    starts = {" ".join(words[:2]) for words in ONCE}
    assert {f"lrlab {name}" for name in COMMANDS} - starts <= {"lrlab data", "lrlab list"}


def _understand(words):
    options = printed.parse(words)
    if isinstance(options, TrainingConfig):
        tracker_packages(options.logger)  # a name that is known; it need not be installed
        resolve_config(dataclasses.replace(options, logger="none"))  # names, spec strings and what goes together


def test_the_two_commands_that_make_an_environment_come_first():
    """CI takes them from the README by their place."""
    train, test = (block.code for block in printed.blocks("bash") if block.page == "README.md" and "venv" in block.code)
    assert "training_scripts/train_ddpm.py" in train
    assert "-m pytest" in test


@pytest.mark.usefixtures("readers_folder")
def test_printed_studies_can_be_read(tmp_path):
    for block in printed.blocks("yaml"):
        if "arms:" in block.code:
            (tmp_path / "my_study.yaml").write_text(block.code)
            with printed.registrations_undone():
                spec = load_spec(str(tmp_path / "my_study.yaml"))
            assert block.page != "docs/tutorials/first-study.md" or (spec.baseline, len(spec.arms)) == ("cosine", 3)


def test_the_printed_error_is_what_one_sees():
    block = printed.block_with("error: ", "")
    command, message = block.code.splitlines()
    with pytest.raises(LabError) as error:
        resolve_config(parse_arguments(command.removeprefix("$ lrlab train ").split(), ""))
    assert str(error.value).startswith(message.removeprefix("error: ").removesuffix("..."))


@pytest.mark.slow
def test_the_plan_is_what_one_sees():
    """But for what a probe measures, which follows below it."""
    block = printed.block_with("micro-batch x", "")
    config = resolve_config(parse_arguments(["--lr_scheduler=cosine"], ""))
    assert describe_plan(make_plan(config, load_data(config), None)).rstrip() == block.code.rstrip()


@pytest.mark.slow
def test_the_first_study_runs_as_printed(tmp_path):
    """With fewer updates and points, in a file of the preset's name."""
    text = (PRESETS_FOLDER / "quick.yaml").read_text()
    for long, short in {"max_train_steps: 400": "max_train_steps: 20", ": 2000": ": 100", "points: 10": "points: 2"}.items():
        assert long in text
        text = text.replace(long, short)
    (tmp_path / "quick.yaml").write_text(text)
    (words,) = {tuple(words) for words in ONCE if words[:4] == ("lrlab", "study", "run", "quick")}
    words = ["quick.yaml" if word == "quick" else word for word in words]
    command, how = ["-m", "diffusers_lrlab.cli.main", *words[1:]], {"cwd": tmp_path, "env": runs.environment()}
    status, _, error = started.run(*command, pictures=True, **how)
    assert status == 0, error
    folder = tmp_path / words[-1]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["study"]["command"] == " ".join(words)
    assert summary["study"]["runs"] == {"finished": 18, "diverged": 0}
    assert (folder / "report/index.html").stat().st_size > 100_000  # with the plots in it


def test_the_job_for_slurm_starts_a_run(monkeypatch):
    """By the variables that tests give to the processes they start; what SLURM sets is in their place."""
    job = printed.block_with("#SBATCH", "slurm").code
    subprocess.run(["bash", "-n"], input=job, text=True, check=True)
    variables = {*re.findall(r"\b([A-Z_]+)=", job)}
    assert variables >= {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"}
    command = re.search(r"exec (python -m .*)'", job)[1]
    assert printed.parse(command.split()).resume_from_checkpoint == "latest"
