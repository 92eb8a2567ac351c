"""Uploading a run and loading it again: the real scripts and clients, in processes of their own, against `hub_server`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import started
from hub_server import HubServer, metadata_errors
from huggingface_hub import ModelCard
from published import wait_briefly

from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.hub.card import write_model_card
from diffusers_lrlab.hub.dataset_folder import export_dataset

SCRIPT = Path(__file__).parents[2] / "training_scripts" / "train_ddpm.py"
TOKEN = "hf_nobodyMayReadThis"
TINY = (
    "--max_train_steps 3 --train_batch_size 4 --num_validation_images 8 --distance_samples 0 --eval_batch_size 2 "
    "--num_inference_steps 2 --checkpointing_steps 2 --logger tensorboard"
).split()


def run(*command, env, cwd, status=0):
    """Runs Python with these arguments, and expects this exit status."""
    returned, *output = started.run(*command, env=env, cwd=cwd, before=wait_briefly)
    result = subprocess.CompletedProcess(command, returned, *output)
    assert result.returncode == status, result.stdout + result.stderr
    return result


def run_fresh(*command, env, cwd):
    """The same in an interpreter that has imported nothing yet."""
    result = subprocess.run([sys.executable, *command], env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def example_in(card):
    """The code under "Use", which a reader would copy."""
    return re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The folder of a finished run, and the Hub that it is on."""
    folder = tmp_path_factory.mktemp("pushed")
    with HubServer(folder / "hf_home", {TOKEN: "user"}) as hub:
        push = ["--push_to_hub", "--hub_model_id", "user/digits", "--hub_private_repo", "--hub_token", TOKEN]
        env = hub.env | {"HF_TOKEN": ""}
        run(SCRIPT, *TINY, *push, "--output_dir", folder / "run", env=env, cwd=folder)
        yield folder / "run", hub


@pytest.mark.slow
def test_a_run_on_points_loads_by_its_id_with_and_without_this_package(tmp_path):
    with HubServer(tmp_path / "hf_home", {TOKEN: "user"}) as hub:
        export_dataset("circle", tmp_path / "points", n=300, n_test=0)  # a small one, whose losses take no time
        small = ["--dataset_name=points", "--max_train_steps=4", "--num_validation_images=20", "--ddpm_num_steps=4"]
        push = ["--push_to_hub", "--hub_model_id", "user/circle", "--hub_token", TOKEN, "--eval_batch_size=9"]
        run(SCRIPT, *small, *push, "--output_dir", tmp_path / "run", env=hub.env, cwd=tmp_path)
        repo = hub.model("user/circle")
        assert [message[:11] for message in repo.messages] == ["initial com", "4 updates: "]
        assert metadata_errors(repo.files["README.md"].decode()) == []
        card = ModelCard(repo.files["README.md"].decode())
        plots = {*re.findall(r"!\[.*?\]\((.*?)\)", card.text)}
        assert {"pipeline.py", "denoiser/config.json", "denoiser/diffusers_lrlab.py"} | plots <= set(repo.files)
        assert ("lrlab/trajectory.png" in plots, "points" in card.data.tags) == (True, True)
        made = []
        for load in ("import diffusers_lrlab; how = {}", "how = dict(custom_pipeline=source, trust_remote_code=True)"):
            code = f"""
import torch
from diffusers import DiffusionPipeline
source = "user/circle"
{load}
pipeline = DiffusionPipeline.from_pretrained(source, **how)
print(pipeline(num_points=3, generator=torch.Generator().manual_seed(0)).points.tolist())
"""
            made.append(run_fresh("-c", code, env=hub.env, cwd=tmp_path).stdout)
        assert made[0] == made[1]


def test_pushes_what_a_user_needs_and_nothing_else(pushed):
    folder, hub = pushed
    repo = hub.model("user/digits")
    assert repo.private
    assert set(repo.files) == {
        ".gitattributes",
        "README.md",
        "manifest.json",  # of what is uploaded
        "model_index.json",
        "scheduler/scheduler_config.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        *(f"lrlab/{name}.png" for name in ("loss", "lr", "progress", "samples", "timesteps")),
        *(f"lrlab/{name}" for name in ("metrics.jsonl", "timesteps.parquet", "run.json")),
    }
    left = " ".join({path.relative_to(folder).as_posix() for path in folder.rglob("*")} - set(repo.files))
    for name in ("checkpoint-2/", "state.pt", ".npy", "logs/"):
        assert name in left
    for path in set(repo.files) - {".gitattributes", "README.md", "manifest.json"}:
        assert repo.files[path] == (folder / path).read_bytes(), path
    assert json.loads(repo.files["lrlab/run.json"])["run"]["status"] == "finished"
    here, there = (folder / "README.md").read_text().splitlines(), repo.files["README.md"].decode().splitlines()
    assert [line for line in here if line not in there] == []
    url = "https://huggingface.co/user/digits/blob/main/lrlab/run.json"
    assert [line.strip() for line in there if line not in here] == ["source:", f"url: {url}", "name: lrlab/run.json"]


# Without the imports of the script, which take longer than the rest.
CHECK = """
import sys
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.hub.transfer import check_can_push
from diffusers_lrlab.training.config import TrainingConfig
given = dict(word.split("=") for word in sys.argv[1:])
try:
    check_can_push(TrainingConfig(push_to_hub=True, output_dir="run", dry_run=bool(given.pop("dry_run", "")), **given))
except LabError as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.parametrize(
    ("env", "argument", "message"),
    [
        ({}, "hub_token=hf_wrong", "Invalid user token"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "hub_model_id=user/digits", "cannot be reached"),
        ({}, "hub_model_id=somebody/else", "check --hub_model_id"),
    ],
    ids=["wrong-token", "unreachable", "foreign-id"],
)
def test_refuses_before_training(hub, tmp_path, env, argument, message):
    is_script = "hf_wrong" in argument
    command = [SCRIPT, *TINY, "--push_to_hub", f"--{argument}", "--output_dir=run"] if is_script else ["-c", CHECK, argument]
    result = run(*command, env=hub.env | env, cwd=tmp_path, status=2 if is_script else 1)
    assert "error: " in result.stderr
    assert message in result.stderr
    assert "--push_to_hub" in result.stderr or "--hub_model_id" in result.stderr
    assert "Traceback" not in result.stderr
    assert "hf_wrong" not in result.stdout + result.stderr
    assert not (tmp_path / "run").exists()
    assert not hub.repos


def test_a_dry_run_checks_the_token_and_creates_nothing(hub, tmp_path):
    run("-c", CHECK, "dry_run=True", env=hub.env, cwd=tmp_path)
    assert hub.requests == [("GET", "/api/whoami-v2")]


PUSH_AGAIN = """
import dataclasses, sys
from pathlib import Path
from diffusers_lrlab.hub.transfer import check_can_push, push_folder, target_of_training
from diffusers_lrlab.training.config import TrainingConfig

config = TrainingConfig(output_dir="digits", push_to_hub=True)
config = dataclasses.replace(config, hub_model_id=check_can_push(config))
push_folder(Path(sys.argv[1]), target_of_training(config))
print(config.hub_model_id)
"""


def test_completes_the_id_and_uses_a_repository_that_exists(pushed, hub, tmp_path):
    for _ in range(2):
        assert run("-c", PUSH_AGAIN, pushed[0], env=hub.env, cwd=tmp_path).stdout.strip() == "user/digits"
    assert not hub.model("user/digits").private
    assert len(hub.model("user/digits").messages) == 2  # nothing had changed, so the second upload was no commit


def test_the_card_is_valid_and_complete_and_has_the_results_of_the_run(pushed):
    folder, hub = pushed
    assert ("POST", "/api/validate-yaml") in hub.requests
    assert metadata_errors("# no metadata")  # or a card that passes would prove nothing
    card = ModelCard.load(folder / "README.md")
    assert re.search(r"\{\{ |\{%|None", card.text) is None
    assert "--hub_token ..." in card.text
    assert (card.data.library_name, card.data.pipeline_tag) == ("diffusers", "unconditional-image-generation")
    assert {"diffusers", "diffusers_lrlab", "cosine"} <= set(card.data.tags)
    for image in re.findall(r"!\[.*?\]\((.*?)\)", card.text):
        assert hub.model("user/digits").files[image].startswith(b"\x89PNG")
    results = json.loads((folder / "lrlab" / "run.json").read_text())["train"]["results"]
    assert {each.metric_name: each.metric_value for each in card.data.eval_results} == {
        METRICS[key].card_label: results[key] for key in ("validation_loss_ema", "validation_loss")
    }
    about = {(each.metric_type, each.task_type, each.dataset_type) for each in card.data.eval_results}
    assert about == {("mse", "unconditional-image-generation", "digits")}


def test_the_card_of_a_run_that_stayed_here(pushed, hub, tmp_path, monkeypatch):
    """Its example runs, and it links to a data set only where there is one."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/digits")
    shutil.copytree(pushed[0], folder)
    record = json.loads((folder / "lrlab" / "run.json").read_text())
    record["config"] |= {"push_to_hub": False, "hub_model_id": None}
    write_model_card(folder, record)
    example = example_in((folder / "README.md").read_text())
    run("-c", f"{example}\nassert len(images) == 16 and images[0].size == (8, 8)", env=hub.env, cwd=tmp_path)
    assert hub.requests == []
    Path("data/photos").mkdir(parents=True)
    for data, on_hub in (("huggan/flowers", ["huggan/flowers"]), ("data/photos", None)):
        record["config"]["dataset_name"] = data
        write_model_card(folder, record)
        card = ModelCard.load(folder / "README.md")
        assert card.data.datasets == on_hub
        assert ("https://huggingface.co/datasets/" in card.text) == bool(on_hub)
