"""A token is planted, and nothing that a run, a study or an upload leaves behind or shows has it."""

import re

import pytest
import started
from hub_server import HubServer
from published import wait_briefly

pytestmark = pytest.mark.slow

TOKEN, OTHER = "hf_plantedInTheEnvironmentToBeFound01", "hf_plantedInAFileToBeFoundOneDay0002"
SECRETS = [TOKEN.encode(), OTHER.encode()]
SMALL = "--dataset_name=circle --max_train_steps=4 --ddpm_num_steps=4 --num_validation_images=20"
RUN = [*SMALL.split(), "--checkpointing_steps=2"]
STUDY = """
datasets: [circle]
arms: {a: {lr_scheduler: rex}, b: {lr_scheduler: cosine}}
seeds: [0, 1]
metrics: [kl]
base: {max_train_steps: 4, ddpm_num_steps: 4, num_validation_images: 20}
"""


@pytest.fixture
def planted(tmp_path):
    """A Hub whose users have the two tokens: one in the environment, one in the file that `hf auth login` writes."""
    with HubServer(tmp_path / "home", {TOKEN: "user", OTHER: "user"}) as hub:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "token").write_text(OTHER)
        (tmp_path / "work").mkdir()
        yield hub, tmp_path / "work"


def run(folder, env, command):
    """Neither what a command writes nor what it prints holds a token; returns its output."""
    status, out, error = started.run(*command, env=env, cwd=folder, before=wait_briefly)
    assert status == 0, error
    assert [path for path in folder.rglob("*") if path.is_file() and holds_secret(path.read_bytes())] == []
    assert not holds_secret((out + error).encode())
    return out


def holds_secret(data):
    return any(secret in data for secret in SECRETS)


def test_a_run_that_is_pushed_leaves_no_token(planted):
    hub, folder = planted
    command = ["-m", "diffusers_lrlab.train", *RUN, "--logger=tensorboard", "--push_to_hub", f"--hub_token={TOKEN}"]
    out = run(folder, hub.env | {"HF_TOKEN": ""}, command)
    repo = next(iter(hub.repos.values()))
    assert len(repo.files) > 5
    for name, content in repo.files.items():
        assert not holds_secret(content), name
    assert not any(map(holds_secret, map(str.encode, repo.messages)))
    assert list(folder.rglob("events.*"))  # of the tracker
    assert re.search(r"[Uu]ploaded", out)


def test_a_study_with_its_workers_leaves_no_token(planted):
    hub, folder = planted
    (folder / "spec.yaml").write_text(STUDY)
    run(folder, hub.env, ["-m", "diffusers_lrlab.cli.main", "study", "run", "spec.yaml", "--out", "study"])
    assert len(list((folder / "study" / "runs").glob("*.json"))) == 4
