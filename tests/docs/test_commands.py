"""Commands in README and docs/ are understood by what they start, and run where that is cheap."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import latents
import printed
import pytest
import runs
import started
import tomllib
from helpers import image_folder, load_data
from tables import cases

from diffusers_lrlab.cli.main import COMMANDS, main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.plugins import ENTRY_POINTS, load_plugins
from diffusers_lrlab.study.same_command import PRESETS_FOLDER
from diffusers_lrlab.study.spec.reading import load_spec
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


@pytest.mark.slow
@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize("page", sorted({block.page for block in ONCE.values()}))
def test_printed_commands_are_understood(page):
    for words, block in ONCE.items():
        if block.page == page:
            try:
                with printed.registrations_undone():
                    if page == "docs/tutorials/own-package.md":  # as if it were installed
                        load_plugins("lab_extras.py")
                    _understand(list(words))
            except BaseException as error:
                error.add_note(f"{block}: {' '.join(words)}")
                raise


def _understand(words):
    options = printed.parse(words)
    if isinstance(options, TrainingConfig):
        tracker_packages(options.logger)  # a name that is known; it need not be installed
        resolve_config(dataclasses.replace(options, logger="none"))  # names, spec strings and what goes together


@cases("name", COMMANDS)
def test_the_example_of_a_command_is_understood(name):
    program, *words = COMMANDS[name].example.split()
    printed.parse([program, *words])


def test_there_are_commands_of_every_kind():
    starts = {" ".join(words[:2]) for _, words in printed.commands()}
    assert {f"lrlab {name}" for name in COMMANDS} - starts <= {"lrlab data", "lrlab list"}
    pages = {block.page for block, _ in printed.commands()}
    assert len(pages) > 10


def test_the_two_commands_that_make_an_environment_come_first():
    """CI takes them from the README by their place."""
    readme = [block.code for block in printed.blocks("bash") if block.page == "README.md" and "venv" in block.code]
    assert len(readme) == 2
    assert "training_scripts/train_ddpm.py" in readme[0]
    assert "-m pytest" in readme[1]


@pytest.mark.usefixtures("readers_folder")
def test_the_printed_study_can_be_read(tmp_path):
    found = {}
    for block in printed.blocks("yaml"):
        if "arms:" in block.code:
            (tmp_path / "my_study.yaml").write_text(block.code)
            with printed.registrations_undone():
                found[block.page] = load_spec(str(tmp_path / "my_study.yaml"))
    spec = found["docs/tutorials/first-study.md"]
    assert spec.baseline == "cosine"
    assert len(spec.arms) == 3


def test_the_printed_error_is_what_one_sees():
    block = printed.block_with("error: ", "")
    command, message = block.code.splitlines()
    with pytest.raises(LabError) as error:
        resolve_config(parse_arguments(command.removeprefix("$ lrlab train ").split(), ""))
    assert str(error.value).startswith(message.removeprefix("error: ").removesuffix("..."))


@pytest.mark.slow
@pytest.mark.pictures
@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize(
    "words", [words for words in ONCE if words[:2] == ("lrlab", "preview")], ids=lambda words: words[-1]
)
def test_a_preview_runs_as_printed(words):
    with printed.registrations_undone():
        if "sawtooth" in " ".join(words):  # of a package
            load_plugins("lab_extras.py")
        assert main(words[1:]) == 0
    if "--out" in words:
        assert Path(words[words.index("--out") + 1]).stat().st_size > 10_000


def test_the_printed_entry_point_is_the_one_that_is_looked_for():
    (block,) = printed.blocks("toml")
    (group,) = tomllib.loads(block.code)["project"]["entry-points"]
    assert group == ENTRY_POINTS


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
    (words,) = {tuple(words) for _, words in printed.commands() if words[:4] == ["lrlab", "study", "run", "quick"]}
    program = Path(sys.executable).parent / "lrlab"
    words = ["quick.yaml" if word == "quick" else word for word in words]
    done = subprocess.run([program, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / words[-1]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["study"]["command"] == " ".join(words)
    assert summary["study"]["runs"] == {"finished": 18, "diverged": 0}
    assert (folder / "report/index.html").stat().st_size > 100_000  # with the plots in it
    text = (folder / "report/report.md").read_text()
    for row in summary["rows"]:  # words are those of the adjusted test
        if row["p_adjusted"] is not None:
            assert 0 <= row["p"] <= row["p_adjusted"] <= 1
    assert re.match(rf"# {re.escape(summary['study']['title'])}", text)


@pytest.mark.slow
def test_the_study_of_ones_own_runs_as_printed(tmp_path):
    """The commands of the tutorial, in their order, on its study file with fewer updates, points, steps, seeds and rates."""
    text = printed.block_with("wsd-snr", "yaml").code
    for long, short in {
        "max_train_steps: 3000": "max_train_steps: 20, num_validation_images: 100, distance_samples: 100, "
        "num_inference_steps: 10",
        "seeds: 5 ": "seeds: 2 ",
        "[0.3, 1, 3]": "[1, 3]",
    }.items():
        assert long in text
        text = text.replace(long, short)
    (tmp_path / "my_study.yaml").write_text(text)
    page = [words for block, words in printed.commands() if block.page == "docs/tutorials/first-study.md"]
    mine = [words for words in page if "my_study.yaml" in words or words[:3] == ["lrlab", "study", "card"]]
    mine = [words for words in mine if "--executor" not in words]  # for more cores, GPUs or machines than there may be
    assert [words[2] for words in mine] == ["run", "run", "card"]
    for words in mine:
        status, _, error = started.run("-m", "diffusers_lrlab", *words[1:], cwd=tmp_path, env=runs.environment())
        assert status == 0, error
        assert (tmp_path / "my-study").exists() is ("--dry_run" not in words)
    summary = json.loads((tmp_path / "my-study/summary.json").read_text())
    assert {row["arm"] for row in summary["rows"]} == {"cosine", "wsd", "wsd-snr"}
    assert (tmp_path / "model_cards/my-study/README.md").read_text().count("wsd-snr") > 3


def test_the_job_for_slurm_starts_a_run(monkeypatch):
    """By the variables that tests give to the processes they start; what SLURM sets is in their place."""
    job = printed.block_with("#SBATCH", "slurm").code
    subprocess.run(["bash", "-n"], input=job, text=True, check=True)
    variables = {*re.findall(r"\b([A-Z_]+)=", job)}
    assert variables >= {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"}
    command = re.search(r"exec (python -m .*)'", job)[1]
    assert printed.parse(command.split()).resume_from_checkpoint == "latest"
