"""`lrlab push` and `pull` against `hub_server`: uploads, downloads, and everything that can go wrong between."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import started
from chromium import PROGRAM, Chromium, needs_chromium
from core.test_plain_yaml import GROWING
from hub_server import Fault, HubServer, metadata_errors
from made_up_studies import made_up_study
from published import ROOT, lrlab, run_folder

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.manifest import find_damage
from diffusers_lrlab.hub.cards import space_card
from diffusers_lrlab.hub.dataset_folder import export_toy_dataset
from diffusers_lrlab.hub.fetch import check_files
from diffusers_lrlab.hub.schedule_folder import write_schedule_folder
from diffusers_lrlab.study.analysis.runs_table import write_runs
from diffusers_lrlab.study.report.report import write_report

STUDY = ROOT / "model_cards" / "lr-study-2d"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One of each kind."""
    folder = tmp_path_factory.mktemp("folders")
    run_folder(folder / "run")
    export_toy_dataset("dino", folder / "dino", n=1000, n_test=100)
    write_schedule_folder(folder / "schedule", "wsd:num_decay_steps=0.3", "demon")
    shutil.copytree(STUDY, folder / "card")
    results, summary = made_up_study(("a", "b"), ("dino",), 2)
    (folder / "study" / "runs").mkdir(parents=True)
    write_report(folder / "study", results, summary)
    (folder / "study" / "summary.json").write_text(json.dumps(summary))
    for name in ("summary.parquet", "spec.yaml"):
        shutil.copyfile(STUDY / name, folder / "study" / name)
    (folder / "study" / "runs" / "a--dino--0--0.json").write_text("{}")
    write_runs(results, {}, folder / "study")
    (folder / "study" / "weights").mkdir()
    (folder / "study" / "weights" / "a.safetensors").write_bytes(b"weights")
    return folder


def python(code, hub, cwd, *arguments):
    """Runs code in a process that knows this Hub, and returns what it prints."""
    status, shown, error = started.run("-c", code, *arguments, env=hub.env, cwd=cwd)
    assert status == 0, error
    return shown


# --- uploads ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_a_run_only_what_a_user_needs_goes_up(folders, hub, tmp_path):
    result = lrlab("push", folders / "run", "--repo_id", "digits", "--private", env=hub.env, cwd=tmp_path)
    repo = hub.model("user/digits")
    assert repo.private
    assert re.search(r"Uploaded and verified 12 files.*http://127.0.0.1:\d+/user/digits/commit/[0-9a-f]{40}", result.stdout)
    assert {path.split("/")[0] for path in repo.files} == {
        ".gitattributes",
        "README.md",
        "lrlab",
        "manifest.json",
        "model_index.json",
        "unet",
    }
    assert b'from_pretrained("user/digits")' in repo.files["README.md"]
    assert repo.messages == [
        "initial commit",
        "2408 updates: accelerate launch training_scripts/train_ddpm.py --lr_scheduler cosine",
    ]
    # Weights go the way of large files, and are the same there.
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert repo.files[weights] == (folders / "run" / weights).read_bytes()
    assert hub.count(r"^PUT /lfs/") == 2
    assert hub.count(r"^POST .*/commit/main") == 1


@pytest.mark.slow
def test_checkpoints_go_up_if_asked_for(folders, hub, tmp_path):
    options = ("--include_checkpoints", "--message", "All of it")
    lrlab("push", folders / "run", "--repo_id", "user/digits", *options, env=hub.env, cwd=tmp_path)
    repo = hub.model("user/digits")
    assert "checkpoint-100/optimizer.bin" in repo.files
    assert "logs/events" not in repo.files
    assert repo.messages[-1] == "All of it"


@pytest.mark.slow
def test_what_is_stale_goes_and_what_is_not_ours_stays(folders, hub, tmp_path):
    hub.put("user/digits", {"LICENSE": b"mine", "denoiser/old.safetensors": b"old", "lrlab/old.png": b"old"})
    lrlab("push", folders / "run", "--repo_id", "user/digits", env=hub.env, cwd=tmp_path)
    files = hub.model("user/digits").files
    assert "LICENSE" in files
    assert not {"denoiser/old.safetensors", "lrlab/old.png"} & set(files)


def test_a_second_push_of_the_same_is_no_commit(folders, hub, tmp_path):
    for _ in range(2):
        lrlab("push", folders / "schedule", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path)
    assert len(hub.model("user/mine").messages) == 2


def test_branches_and_pull_requests(folders, hub, tmp_path):
    def push(*options):
        return lrlab("push", folders / "schedule", "--repo_id", "user/mine", *options, env=hub.env, cwd=tmp_path)

    push("--revision", "draft")
    repo = hub.model("user/mine")
    assert "schedule.json" not in repo.files
    assert "schedule.json" in repo.commits[repo.branches["draft"]]
    # Somebody else's repository takes proposals.
    hub.put("else/theirs", {"README.md": b"theirs"})
    result = lrlab(
        "push", folders / "schedule", "--repo_id", "else/theirs", "--create_pr", env=hub.env, cwd=tmp_path
    )  # fmt: skip
    theirs = hub.model("else/theirs")
    assert theirs.files == {"README.md": b"theirs"}
    assert "schedule.json" in theirs.commits[theirs.branches["refs/pr/1"]]
    assert "/discussions/1" in result.stdout


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
@pytest.mark.parametrize("folder", ["study", "card"])
def test_a_study_is_a_data_set_of_its_summary(folders, hub, tmp_path, folder):
    lrlab("push", folders / folder, "--repo_id", "user/study", env=hub.env, cwd=tmp_path)
    files = hub.dataset("user/study").files
    assert {"README.md", "summary.json", "summary.parquet", "spec.yaml", "loss.png"} <= set(files)
    assert ("runs/a--dino--0--0.json" in files) == (folder == "study")
    assert not any(path.startswith("weights") for path in files)
    example = re.search(r"## Use\n\n```python\n(.*?)```", files["README.md"].decode(), re.DOTALL)[1]
    rows = len(json.loads((STUDY / "summary.json").read_text())["rows"])
    assert python(f"{example}\nprint(len(summary))", hub, tmp_path).strip() == str(rows)
    if folder == "study":
        code = 'from datasets import load_dataset\nprint(len(load_dataset("user/study", "runs", split="runs")))'
        assert python(code, hub, tmp_path).strip() == "4"
        lrlab("push", folders / folder, "--repo_id", "user/study", "--include_checkpoints", env=hub.env, cwd=tmp_path)
        assert "weights/a.safetensors" in hub.dataset("user/study").files


def test_a_study_is_a_page(folders, hub, tmp_path):
    lrlab("push", folders / "study", "--repo_id", "user/page", "--space", env=hub.env, cwd=tmp_path)
    space = hub.space("user/page")
    assert space.sdk == "static"
    assert set(space.files) == {
        ".gitattributes",
        "README.md",
        "index.html",
        "curves.csv",
        "seeds.csv",
        "summary.json",
        "spec.yaml",
    }
    card = space.files["README.md"].decode()
    assert metadata_errors(card, "space") == []
    links = re.findall(r"\]\((.*?)\)", card)
    place = "https://huggingface.co/spaces/user/page"
    assert links[0] == place
    assert {link.removeprefix(f"{place}/blob/main/") for link in links[1:5]} <= {*space.files}


def test_a_page_with_its_card_is_a_space(hub, tmp_path):
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<!DOCTYPE html><title>A page</title>", encoding="utf-8")
    (page / "README.md").write_text(space_card("A page", "What it shows."), encoding="utf-8")
    push = ("push", page, "--repo_id", "user/shown", "--space")
    stopped = lrlab(*push, "--include_checkpoints", env=hub.env, cwd=tmp_path, status=2)
    assert "--include_checkpoints has no effect" in stopped.stderr
    lrlab(*push, env=hub.env, cwd=tmp_path)
    space = hub.space("user/shown")
    assert space.sdk == "static"
    assert set(space.files) == {".gitattributes", "README.md", "index.html"}
    assert "What it shows." in space.files["README.md"].decode()


@pytest.mark.slow
@needs_chromium
def test_the_page_of_a_space_opens_from_what_lies_in_the_repository(folders, hub, tmp_path):
    lrlab("push", folders / "study", "--repo_id", "user/page", "--space", env=hub.env, cwd=tmp_path)
    for name, content in hub.space("user/page").files.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_bytes(content)
    with Chromium(PROGRAM) as browser:
        browser.open(tmp_path / "site" / "index.html")
        assert browser.evaluate("document.images.length") >= 3
        assert browser.errors == []


def test_what_diffusers_has_for_pushing_works_on_our_classes(hub, tmp_path):
    code = """
import torch
from diffusers import DDPMScheduler, DiffusionPipeline
from diffusers_lrlab import MLPDenoiser, PointDDPMPipeline
model = MLPDenoiser(hidden_size=16)
scheduler = DDPMScheduler(num_train_timesteps=4, clip_sample=False)
model.push_to_hub("user/model")
scheduler.push_to_hub("user/scheduler")
PointDDPMPipeline(model, scheduler).push_to_hub("user/pipeline", private=True)
again = MLPDenoiser.from_pretrained("user/model")
assert all(one.equal(other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
assert DDPMScheduler.from_pretrained("user/scheduler").config.num_train_timesteps == 4
points = DiffusionPipeline.from_pretrained("user/pipeline")(num_points=3, num_inference_steps=4).points
print(tuple(points.shape))
"""
    assert python(code, hub, tmp_path).strip() == "(3, 2)"
    assert hub.model("user/pipeline").private
    assert {"pipeline.py", "denoiser/diffusers_lrlab.py"} <= set(hub.model("user/pipeline").files)


def test_every_committed_card_is_valid_and_its_links_lead_somewhere(folders):
    cards = [*ROOT.glob("model_cards/*/README.md"), *(folders / name / "README.md" for name in ("dino", "schedule"))]
    assert len(cards) >= 4
    for card in cards:
        text = card.read_text(encoding="utf-8")
        kind = "dataset" if (card.parent / "summary.json").exists() else "model"
        assert metadata_errors(text, kind) == [], card
        for link in re.findall(r"\]\(([^)#]+?)\)", text):
            assert link.startswith("https://") or (card.parent / link).is_file(), (card, link)


# --- what is refused before anything is sent --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is not a folder"),
        (["empty"], "holds no run (lrlab/run.json), study (spec.yaml), exported dataset"),
        (["run", "--repo_id", "user/a b"], "--repo_id 'user/a b' is not a valid id"),
        (["run", "--space"], "--space makes a page of a study's report"),
        (["card", "--space"], "has no report. Make one with `lrlab study report"),
        (["schedule", "--include_checkpoints"], "--include_checkpoints has no effect"),
        (["schedule", "--unfinished"], "--unfinished is for runs"),
        (["stopped"], "is not finished (status: cancelled). Continue it with --resume_from_checkpoint latest"),
        (["no-weights"], "holds no pipeline yet (model_index.json)"),
        (["killed"], "is not finished (status: running). Continue it with --resume_from_checkpoint latest"),
        (["damaged"], "cannot be read as JSON"),
        (["link"], "is a link to a file outside"),
        (["run", "--create_pr", "--private"], "Leave one of them out"),
        (["run", "--create_pr", "--revision", "x"], "Leave one of them out"),
        (["run", "--message", " "], "--message '' is empty"),
        (["run", "--repo_id", "somebody/else"], "may not write"),
        (["run", "--repo_id", "else/theirs"], "may not write"),
        (["run", "--repo_id", "user/nothing", "--create_pr"], "no such repository"),
        (["run", "--repo_id", "user/public", "--private"], "exists and is public"),
        (["schedule", "--repo_id", "user/public"], "holds a run, and this is a schedule"),
        (["run", "--message", "look: hf_" + "a" * 34], "message of the commit holds a token"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refuses_before_anything_is_sent(folders, hub, tmp_path, arguments, message):
    for name in ("run", "schedule", "card"):
        (tmp_path / name).symlink_to(folders / name)
    (tmp_path / "empty").mkdir()
    run_folder(tmp_path / "stopped", status="cancelled", megabytes=0)
    run_folder(tmp_path / "no-weights", megabytes=0)
    (tmp_path / "no-weights" / "model_index.json").unlink()
    run_folder(tmp_path / "killed", status="running", megabytes=0)
    (tmp_path / "killed" / "model_index.json").unlink()
    run_folder(tmp_path / "damaged", megabytes=0)
    (tmp_path / "damaged" / "lrlab" / "run.json").write_text('{"run": ')
    run_folder(tmp_path / "link", megabytes=0)
    (tmp_path / "secret.png").write_text("of another folder")
    (tmp_path / "link" / "lrlab" / "more.png").symlink_to(tmp_path / "secret.png")
    hub.put("else/theirs", {"README.md": b""})
    hub.put("user/public", {"lrlab/run.json": b"{}"})
    given = arguments if "--repo_id" in arguments else [*arguments, "--repo_id", "user/x"]
    error = lrlab("push", *given, env=hub.env, cwd=tmp_path, status=2).stderr
    assert message in error
    assert hub.count(r"/(preupload|commit)/|^PUT") == 0


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "needs a token with write permission. Run `hf auth login`"),
        ("hf_wrong", "does not accept the token"),
        ("hf_reader", "the token 'for reading' of 'user' is read-only"),
    ],
)
def test_tokens_are_looked_at_first(folders, tmp_path, token, message):
    with HubServer(tmp_path / "home", {"hf_writer": "user", "hf_reader": "user"}) as hub:
        hub.read_only.add("hf_reader")
        env = hub.env | {"HF_TOKEN": token}
        error = lrlab("push", folders / "run", "--repo_id", "user/x", env=env, cwd=tmp_path, status=2).stderr
        assert message in error
        assert not token or token not in error
        assert hub.repos == {}


def test_a_file_with_the_token_in_it_does_not_go_up(folders, hub, tmp_path):
    shutil.copytree(folders / "schedule", tmp_path / "mine")
    with (tmp_path / "mine" / "README.md").open("a") as file:
        file.write(f"my token is {hub.env['HF_TOKEN']}")
    error = lrlab("push", "mine", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path, status=2).stderr
    assert "'README.md' holds a token, so nothing was sent" in error
    assert hub.env["HF_TOKEN"] not in error
    assert set(hub.model("user/mine").files) == {".gitattributes"}


@pytest.mark.parametrize("token", ["the one in use", "hf_" + "a" * 34])
@pytest.mark.parametrize("before", [0, (1 << 20) - 5, 3 << 20])
def test_tokens_are_found_in_any_file_at_any_place(folders, hub, tmp_path, token, before):
    shutil.copytree(folders / "schedule", tmp_path / "mine")
    token = hub.env["HF_TOKEN"] if token == "the one in use" else token
    (tmp_path / "mine" / "schedule.png").write_bytes(b"\0" * before + token.encode() + b"\0" * 99)
    error = lrlab("push", "mine", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path, status=2).stderr
    assert "'schedule.png' holds a token, so nothing was sent" in error


# --- faults ------------------------------------------------------------------------------------------------------------

COMMIT, LARGE_FILE = r"^POST .*/commit/", r"^PUT /lfs/"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(COMMIT, 500, times=2), "status 500 from the Hub; again in 1 s"),
        (Fault(COMMIT, 429, headers={"Retry-After": "1"}), "status 429 from the Hub; again in 1 s"),
        (Fault(COMMIT, cut="during"), "no answer from the Hub; again in 1 s"),
        (Fault(COMMIT, cut="after"), "no answer from the Hub; again in 1 s"),
        (Fault(LARGE_FILE, cut="during"), None),  # the client itself tries again
        (Fault(LARGE_FILE, 503, times=2), None),
        (Fault(r"/preupload/", 500), None),
        (Fault(r"^GET .*/tree/", 502), None),
        (Fault(COMMIT, delay=2), None),
    ],
    ids=["500-twice", "429", "cut-commit", "lost-answer", "cut-file", "503-file", "500-preupload", "502-tree", "slow"],
)  # fmt: skip
def test_a_push_gets_through(folders, hub, tmp_path, fault, told):
    hub.faults.append(fault)
    result = lrlab("push", folders / "run", "--repo_id", "user/digits", env=hub.env, cwd=tmp_path)
    assert fault.times == 0
    assert told is None or told in result.stderr
    repo = hub.model("user/digits")
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert repo.files[weights] == (folders / "run" / weights).read_bytes()
    assert len(repo.messages) == 2  # also where the answer to the commit was lost


@pytest.mark.parametrize("where", [COMMIT, LARGE_FILE], ids=["commit", "file"])
def test_a_token_that_expires_half_way_leaves_no_half(folders, hub, tmp_path, where):
    token = hub.env["HF_TOKEN"]
    hub.faults.append(Fault(where, 401, then=lambda: hub.tokens.pop(token)))
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
    # What had arrived is not sent again: both large files, or the one that was under way beside the refused one.
    assert hub.count(LARGE_FILE) - sent == (0 if where == COMMIT else 1)


def test_of_two_pushes_at_once_one_is_refused(folders, hub, tmp_path):
    def meanwhile():
        repo = hub.model("user/mine")
        repo.commit({**repo.files, "README.md": b"of somebody else"}, "meanwhile")

    lrlab("push", folders / "schedule", "--repo_id", "user/mine", "--message", "first", env=hub.env, cwd=tmp_path)
    hub.faults.append(Fault(COMMIT, then=meanwhile))
    write_schedule_folder(tmp_path / "other", "rex")
    error = lrlab("push", "other", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path, status=2).stderr
    assert "The repository has a newer commit" in error
    assert hub.model("user/mine").files["README.md"] == b"of somebody else"
    lrlab("push", "other", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path)
    assert b"rex" in hub.model("user/mine").files["schedule.json"]


# A single one is sent from the main thread, by other code of the client.
@pytest.mark.parametrize("num_large", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_push_that_is_stopped_leaves_no_half(folders, hub, tmp_path, num_large):
    hub.faults.append(Fault(LARGE_FILE, delay=4))
    shutil.copytree(folders / "run", tmp_path / "run")
    if num_large == 1:
        (tmp_path / "run" / "lrlab" / "timesteps.parquet").unlink()
    command = ["-m", "diffusers_lrlab.cli.main", "push", "run", "--repo_id", "user/digits"]
    process = started.Started(*command, env=hub.env, cwd=tmp_path)
    deadline = time.monotonic() + 30
    while hub.faults[0].times and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=90)
    assert process.returncode == 143
    assert "The repository is unchanged, or has all of this commit" in error
    assert "`lrlab push" in error
    assert set(hub.model("user/digits").files) == {".gitattributes"}


def test_a_proposal_whose_answer_is_lost_is_not_made_twice(folders, hub, tmp_path):
    hub.put("else/theirs", {"README.md": b"theirs"})
    hub.faults.append(Fault(COMMIT, cut="after"))
    lrlab("push", folders / "schedule", "--repo_id", "else/theirs", "--create_pr", env=hub.env, cwd=tmp_path)
    assert [name for name in hub.model("else/theirs").branches if "pr" in name] == ["refs/pr/1"]


def test_passing_troubles_before_a_push_are_waited_for(folders, hub, tmp_path):
    hub.faults += [Fault(r"whoami", 500), Fault(r"/repos/create", 503)]  # passing troubles before anything is done
    lrlab("push", folders / "schedule", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path)
    assert [fault.times for fault in hub.faults] == [0, 0]
    assert "schedule.json" in hub.model("user/mine").files


def test_a_hub_that_stays_broken_is_told(folders, hub, tmp_path):
    hub.broken.add("commit")
    error = lrlab("push", folders / "schedule", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path, status=2).stderr
    assert error.count("again in") == 3
    assert "The Hub has an internal error" in error


# --- downloads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "dino", "schedule", "study"])
def test_what_was_pushed_is_pulled(folders, hub, tmp_path, name):
    lrlab("push", folders / name, "--repo_id", f"user/{name}", env=hub.env, cwd=tmp_path)
    result = lrlab("pull", f"user/{name}", "--out", "here", env=hub.env, cwd=tmp_path)
    assert f"Downloaded a {'dataset' if name == 'dino' else name} to here" in result.stdout
    kind = "datasets" if name in ("dino", "study") else "models"
    files = hub.repos[kind, f"user/{name}"].files
    pulled = {
        path.relative_to(tmp_path / "here").as_posix(): path for path in (tmp_path / "here").rglob("*") if path.is_file()
    }
    assert find_damage(tmp_path / "here") is None
    assert set(pulled) == set(files) - {".gitattributes"}
    assert all(path.read_bytes() == files[key] for key, path in pulled.items() if key != "manifest.json")


def test_a_download_that_breaks_off_is_gone_on_with(folders, hub, tmp_path):
    lrlab("push", folders / "run", "--repo_id", "user/run", env=hub.env, cwd=tmp_path)
    hub.faults += [Fault(r"^GET .*safetensors", cut="answer"), Fault(r"^GET /api/models/user/run", 500)]
    lrlab("pull", "user/run", env=hub.env, cwd=tmp_path)
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (folders / "run" / weights).read_bytes()


def test_a_full_disk_is_told(folders, hub, tmp_path):
    lrlab("push", folders / "run", "--repo_id", "user/run", env=hub.env, cwd=tmp_path)
    command = f"ulimit -f 400; exec {shlex.quote(sys.executable)} -m diffusers_lrlab.cli.main pull user/run"
    result = subprocess.run(["bash", "-c", command], env=hub.env, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "No room to write" in result.stderr
    assert "pull again" in result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hf_home"}


def good_files(folders):
    return {
        path.relative_to(folders / "run").as_posix(): path.read_bytes()
        for path in (folders / "run").rglob("*")
        if path.is_file() and "checkpoint" not in str(path) and path.suffix not in (".npy", "")
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("../outside.json", b"{}", "a path that leads out of its folder"),
        ("lrlab/../../outside.json", b"{}", "a path that leads out of its folder"),
        ("/outside.json", b"{}", "a path that leads out of its folder"),
        ("lrlab\\..\\outside.json", b"{}", "a path that leads out of its folder"),
        ("unet/diffusion_pytorch_model.bin", b"pickled", "can run code when it is read. Only safetensors"),
        ("lrlab/random.npy", b"pickled", "can run code when it is read"),
        ("model_index.json", b'{"_class_name": ', "'model_index.json' is damaged"),
        ("lrlab/run.json", b"[" * 100_000, "'lrlab/run.json' is damaged"),
        ("lrlab/metrics.jsonl", b'{"update": 1}\n{"upd', "'lrlab/metrics.jsonl' is damaged"),
        ("lrlab/timesteps.parquet", b"PAR1 no", "'lrlab/timesteps.parquet' is damaged"),
        ("unet/diffusion_pytorch_model.safetensors", b"\xff" * 100, "safetensors' is damaged"),
        ("more.yaml", b"a: [1\nb: 2", "'more.yaml' is damaged"),
        ("more.yaml", b"a" * (2 << 20), "'more.yaml' of 2 MiB, where no more than 1"),
        ("more.yaml", b"a: !!bool x", "'more.yaml' is damaged"),
        ("more.yaml", b"a: !!timestamp foo", "'more.yaml' is damaged"),
        ("README.md", b"---\na: [1\nb: 2\n---\n", "'README.md' is damaged"),
        ("README.md", f"---\n{GROWING}---\n".encode(), "aliases are not allowed"),
        ("README.md", b"---\n" + b"\n" * (1 << 20), "many empty lines"),
        ("more.yaml", GROWING.encode(), "aliases are not allowed"),
        ("more.yaml", b"a: {<<: {b: 1}}", "merge keys are not allowed"),
        ("more.yaml", b"- a\n" * 100_000, "more than 262,144"),
        ("lrlab/metrics.jsonl", b'{"update": "' + b"1" * (2 << 20) + b'"}', "line 1: the limit is 1,000,000 lines"),
        ("more.json", b"[" * 200 + b"]" * 200, "nested more than 50 levels"),
        ("lrlab/run.json/more.json", b"{}", "as a file and as a folder"),
        ("lrlab/" + "x" * 300 + ".json", b"{}", "a file whose name has more than 200 characters"),
    ],
)
def test_what_cannot_be_trusted_is_refused_by_name(folders, hub, tmp_path, name, content, message):
    hub.put("somebody/run", good_files(folders) | {name: content})
    (tmp_path / "work").mkdir()
    error = lrlab("pull", "somebody/run", env=hub.env, cwd=tmp_path / "work", status=2).stderr
    assert message in error
    assert list((tmp_path / "work").iterdir()) == []
    assert not list(tmp_path.glob("outside*"))


def test_what_a_killed_pull_left_goes_with_the_next(folders, hub, tmp_path):
    lrlab("push", folders / "schedule", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path)
    kept = [".tmp-lrlab-new-other", ".tmp-1-mine"]
    for name in (*kept, ".tmp-lrlab-new-mine"):
        (tmp_path / name / "mine").mkdir(parents=True)
        (tmp_path / name / "mine" / "half").write_text("half")
    lrlab("pull", "user/mine", env=hub.env, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".tmp-*")) == sorted(kept)


def test_checkpoints_stay_on_the_hub(folders, hub, tmp_path):
    lrlab("push", folders / "run", "--repo_id", "user/run", "--include_checkpoints", env=hub.env, cwd=tmp_path)
    lrlab("pull", "user/run", env=hub.env, cwd=tmp_path)
    assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.slow
def test_a_result_that_was_pulled_can_go_elsewhere(folders, hub, tmp_path):
    """Its card names the new place, on the branch that it is on; code that pull left on the Hub is not taken away."""
    lrlab("push", folders / "run", "--repo_id", "user/run", env=hub.env, cwd=tmp_path)
    hub.model("user/run").files["pipeline.py"] = b"code"
    lrlab("pull", "user/run", env=hub.env, cwd=tmp_path)
    lrlab("push", "run", "--repo_id", "user/run", "--message", "again", env=hub.env, cwd=tmp_path)
    assert "pipeline.py" in hub.model("user/run").files
    lrlab("push", "run", "--repo_id", "user/other", "--revision", "dev", env=hub.env, cwd=tmp_path)
    other = hub.model("user/other")
    card = other.commits[other.branches["dev"]]["README.md"].decode()
    assert 'from_pretrained("user/other", revision="dev")' in card
    assert "user/other/blob/dev/lrlab/run.json" in card
    assert "user/run" not in card


def test_an_unfinished_run_says_so(folders, hub, tmp_path):
    run_folder(tmp_path / "stopped", status="running")
    lrlab("push", "stopped", "--repo_id", "user/stopped", "--unfinished", env=hub.env, cwd=tmp_path)
    card = hub.model("user/stopped").files["README.md"].decode()
    assert "not finished (status: running, 2408 of 2408 updates logged)" in card
    assert metadata_errors(card, "model") == []
    assert "model-index" not in card


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        '{"run": {"status": "finished", "command": "x"}}', "[]", "7",
        '{"run": [], "train": [], "config": [], "meta": []}',
        '{"run": {"status": 1, "command": []}, "train": {}, "config": {}, "meta": {}}',
        '{"run": {"status": "finished", "command": "x"}, "train": {"num_updates": "many"}, "config": {}, "meta": {}}',
        '{"run": NaN}', '{"run": ' + "9" * 400 + "}",
    ],
    ids=range(8),
)  # fmt: skip
def test_a_record_that_is_none_is_refused(hub, tmp_path, content):
    run_folder(tmp_path / "run", megabytes=0)
    (tmp_path / "run" / "lrlab" / "run.json").write_text(content)
    for command in (["push", "run", "--repo_id", "user/x"], ["rerun", "run"]):
        error = lrlab(*command, env=hub.env, cwd=tmp_path, status=2).stderr
        assert "run.json" in error
    assert hub.repos == {}


def test_code_stays_on_the_hub(folders, hub, tmp_path):
    hub.put("somebody/run", good_files(folders) | {"pipeline.py": b"open('ran', 'w')", "unet/x.so": b"", "run.sh": b""})
    lrlab("pull", "somebody/run", env=hub.env, cwd=tmp_path)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".py", ".so", ".sh")]
    assert not (tmp_path / "ran").exists()


def test_too_many_files_are_refused():
    with pytest.raises(LabError, match="more than 20000"):
        check_files("a/b", [(f"lrlab/{number}.png", 1) for number in range(20_001)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["user/nothing"], "There is no model and no data set 'user/nothing'"),
        (["user/a b"], "is not a valid id"),
        (["user/page"], "'user/page' is a Space, a page to look at"),
        (["user/other"], "holds something else, and not a run, a study"),
        (["user/other", "--revision", "v9"], "at 'v9'"),
        (["user/other", "--out", "full"], "exists and is not an empty folder"),
        (["user/other", "--out", "."], "exists and is not|cannot be replaced"),
    ],
)
def test_pulls_that_cannot_work(hub, tmp_path, arguments, message):
    hub.put("user/other", {"README.md": b"# something else", "config.json": b"{}"})
    hub.put("user/page", {"README.md": b""}, kind="spaces")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    error = lrlab("pull", *arguments, env=hub.env, cwd=tmp_path, status=2).stderr
    assert re.search(message if "|" in message else re.escape(message), error)
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "hf_home"}
    assert (tmp_path / "full" / "mine").read_text() == "mine"
