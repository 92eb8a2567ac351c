"""`lrlab push` against `hub_server`: what goes up, what is refused, and what a failure leaves."""

import json
import re

import pytest
import started
from hub_server import Fault, metadata_errors
from published import ROOT, lrlab, lrlab_each, run_folder

STUDY = ROOT / "model_cards" / "lr-study-2d"


def python(code, hub, cwd, *arguments):
    """Runs code in a process that knows this Hub, and returns what it prints."""
    status, shown, error = started.run("-c", code, *arguments, env=hub.env, cwd=cwd)
    assert status == 0, error
    return shown


# --- uploads ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_stale_goes_and_what_is_not_ours_stays(folders, hub, tmp_path):
    hub.put("user/digits", {"LICENSE": b"mine", "denoiser/old.safetensors": b"old", "lrlab/old.png": b"old"})
    lrlab("push", folders / "run", "--repo_id", "user/digits", env=hub.env, cwd=tmp_path)
    files = hub.model("user/digits").files
    assert "LICENSE" in files
    assert not {"denoiser/old.safetensors", "lrlab/old.png"} & set(files)


def test_a_branch_is_made_and_an_upload_of_the_same_is_no_commit(folders, hub, tmp_path):
    command = ["push", folders / "dino", "--repo_id", "user/dino", "--revision", "draft"]
    assert [status for status, *_ in lrlab_each([command, command], hub.env, tmp_path)] == [0, 0]
    repo = hub.dataset("user/dino")
    assert len(repo.messages) == 2
    assert "data/train-00000-of-00001.parquet" not in repo.files
    assert "data/train-00000-of-00001.parquet" in repo.commits[repo.branches["draft"]]


def test_points_are_a_data_set_that_loads_and_streams(folders, hub, tmp_path):
    lrlab("push", folders / "dino", "--repo_id", "user/dino", env=hub.env, cwd=tmp_path)
    code = """
import numpy as np
from datasets import load_dataset
here, there = load_dataset("parquet", data_files=SOURCE, split="train"), load_dataset("user/dino", split="train")
streamed = np.array([row["x"] for row in load_dataset("user/dino", split="train", streaming=True)], np.float32)
assert len(streamed) == 1000 and np.array_equal(here["x"][:], there["x"][:]) and np.array_equal(streamed, here["x"][:])
"""
    python(f"SOURCE = {str(folders / 'dino' / 'data' / 'train-*.parquet')!r}\n{code}", hub, tmp_path)
    card = hub.dataset("user/dino").files["README.md"].decode()
    example = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert '"user/dino"' in example
    assert python(f"{example}\nprint(points.dtype, points.shape)", hub, tmp_path).strip() == "float32 (1000, 2)"


@pytest.mark.slow
def test_a_study_is_a_data_set_of_its_summary(folders, hub, tmp_path):
    lrlab("push", folders / "study", "--repo_id", "user/study", env=hub.env, cwd=tmp_path)
    files = hub.dataset("user/study").files
    assert {"README.md", "summary.json", "summary.parquet", "spec.yaml", "loss.png"} <= set(files)
    assert "runs/a--dino--0--0.json" in files
    assert not any(path.startswith("weights") for path in files)
    example = re.search(r"## Use\n\n```python\n(.*?)```", files["README.md"].decode(), re.DOTALL)[1]
    rows = len(json.loads((STUDY / "summary.json").read_text())["rows"])
    assert python(f"{example}\nprint(len(summary))", hub, tmp_path).strip() == str(rows)
    code = 'from datasets import load_dataset\nprint(len(load_dataset("user/study", "runs", split="runs")))'
    assert python(code, hub, tmp_path).strip() == "4"


def test_every_committed_card_is_valid_and_its_links_lead_somewhere(folders):
    for card in [*ROOT.glob("model_cards/*/README.md"), folders / "dino" / "README.md"]:
        text = card.read_text(encoding="utf-8")
        assert metadata_errors(text) == [], card
        for link in re.findall(r"\]\(([^)#]+?)\)", text):
            assert link.startswith("https://") or (card.parent / link).is_file(), (card, link)


# --- what is refused before anything is sent --------------------------------------------------------------------------


REFUSED = [
    (["nothing"], "'nothing' is not the folder of a run"),
    (["stopped"], "is not finished (status: cancelled). Continue it with --resume_from_checkpoint latest"),
    (["no-weights"], "holds no pipeline (model_index.json)"),
    (["damaged"], "cannot be read as JSON"),
    (["link"], "is a link to a file outside"),
    (["run", "--repo_id", "else/theirs"], "You have no right to"),
    (["run", "--repo_id", "user/public", "--private"], "exists and is public"),
    (["dino", "--repo_id", "user/study"], "holds a study, and this is a dataset"),
]


def test_refuses_before_anything_is_sent(folders, hub, tmp_path):
    for name in ("run", "dino"):
        (tmp_path / name).symlink_to(folders / name)
    run_folder(tmp_path / "stopped", status="cancelled", megabytes=0)
    run_folder(tmp_path / "no-weights", megabytes=0)
    (tmp_path / "no-weights" / "model_index.json").unlink()
    run_folder(tmp_path / "damaged", megabytes=0)
    (tmp_path / "damaged" / "lrlab" / "run.json").write_text('{"run": ')
    run_folder(tmp_path / "link", megabytes=0)
    (tmp_path / "secret.png").write_text("of another folder")
    (tmp_path / "link" / "lrlab" / "more.png").symlink_to(tmp_path / "secret.png")
    hub.put("else/theirs", {"README.md": b""})
    hub.put("user/public", {"lrlab/run.json": b"{}"})
    hub.put("user/study", {"spec.yaml": b""}, kind="datasets")
    commands = [["push", *(given if "--repo_id" in given else [*given, "--repo_id", "user/x"])] for given, _ in REFUSED]
    for (given, message), (status, _, error) in zip(REFUSED, lrlab_each(commands, hub.env, tmp_path), strict=True):
        assert status == 2, given
        assert message in error, given
    assert hub.count(r"/(preupload|commit)/|^PUT") == 0


def test_a_token_is_asked_for_first(folders, hub, tmp_path):
    env = hub.env | {"HF_TOKEN": ""}
    error = lrlab("push", folders / "run", "--repo_id", "x", env=env, cwd=tmp_path, status=2).stderr
    assert "needs a token with write permission. Run `hf auth login`" in error
    assert hub.requests == []


# --- faults -----------------------------------------------------------------------------------------------------------

COMMIT, LARGE_FILE = r"^POST .*/commit/", r"^PUT /lfs/"


@pytest.mark.parametrize("where", [COMMIT, LARGE_FILE], ids=["commit", "file"])
def test_a_token_that_expires_half_way_leaves_no_half(folders, hub, tmp_path, where):
    token = hub.env["HF_TOKEN"]
    # Late enough for the other large file, which is sent beside the refused one, to arrive.
    hub.faults.append(Fault(where, 401, delay=2, then=lambda: hub.tokens.pop(token)))
    error = lrlab("push", folders / "run", "--repo_id", "user/digits", env=hub.env, cwd=tmp_path, status=2).stderr
    assert "does not accept the token" in error
    assert token not in error
    assert "A commit appears whole or not at all" in error
    assert set(hub.model("user/digits").files) == {".gitattributes"}
    hub.tokens[token] = "user"
    sent = hub.count(LARGE_FILE)
    command = re.search(r"To go on: `lrlab (.*?)`", error)[1].split()
    lrlab(*command, env=hub.env, cwd=tmp_path)
    assert len(hub.model("user/digits").files) == 13
    # What had arrived is not sent again: both large files, or the one beside the refused one.
    assert hub.count(LARGE_FILE) - sent == (0 if where == COMMIT else 1)
