"""`lrlab pull` against `hub_server`: what comes down, and what is refused and leaves nothing behind."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from published import lrlab, lrlab_each, run_folder

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.manifest import find_damage, manifest_text, sums_of_bytes
from diffusers_lrlab.hub.contents import contents_of
from diffusers_lrlab.hub.transfer import files_to_take

WEIGHTS, LOG, INDEX = "unet/diffusion_pytorch_model.safetensors", "lrlab/metrics.jsonl", "model_index.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of a whole run, without a manifest."""
    folder = run_folder(tmp_path_factory.mktemp("run") / "run", megabytes=0)
    (folder / "unet" / "config.json").write_text("{}")
    (folder / INDEX).write_text('{"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}')
    contents = contents_of(folder, "user/run").files
    return {name: content if isinstance(content, bytes) else content.read_bytes() for name, content in contents.items()}


def test_what_was_pushed_is_pulled(folders, hub, tmp_path):
    names = ("run", "dino", "study")
    pushes = [["push", folders / name, "--repo_id", name, "--private"] for name in names]
    pulls = [["pull", f"user/{name}", "--out", f"here-{name}"] for name in names]
    results = lrlab_each(pushes + pulls, hub.env, tmp_path)
    assert [status for status, *_ in results] == [0] * 6
    assert re.search(r"Uploaded: http://127.0.0.1:\d+/user/run/commit/[0-9a-f]{40}", results[0][1])
    repo = hub.model("user/run")
    assert (repo.private, hub.count(r"^POST /api/models/.*/commit/main")) == (True, 1)
    assert repo.messages[1] == "2408 updates: accelerate launch training_scripts/train_ddpm.py --lr_scheduler cosine"
    for name, (_, out, _) in zip(names, results[3:], strict=True):
        here = tmp_path / f"here-{name}"
        assert f"Downloaded a {'dataset' if name == 'dino' else name} to here-{name}" in out
        files = hub.repos["models" if name == "run" else "datasets", f"user/{name}"].files
        pulled = {path.relative_to(here).as_posix(): path for path in here.rglob("*") if path.is_file()}
        assert find_damage(here) is None
        assert set(pulled) == set(files) - {".gitattributes"}
        assert all(path.read_bytes() == files[key] for key, path in pulled.items() if key != "manifest.json")


def test_a_full_disk_is_told(folders, hub, tmp_path):
    lrlab("push", folders / "run", "--repo_id", "user/run", env=hub.env, cwd=tmp_path)
    command = f"ulimit -f 400; exec {shlex.quote(sys.executable)} -m diffusers_lrlab.cli.main pull user/run"
    result = subprocess.run(["bash", "-c", command], env=hub.env, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "No room to write" in result.stderr
    assert "pull again" in result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hf_home"}


def with_manifest(files, **other):
    sums = {name: sums_of_bytes(content) for name, content in files.items()}
    return files | {"manifest.json": manifest_text(sums | other).encode()}


# What happened to a repository since it was uploaded, and what is said of it; `None` if it may.
CHANGES = {
    "a file has changed": (lambda files: {LOG: files[LOG].replace(b"1", b"2")}, "metrics.jsonl' is damaged"),
    "there is no manifest": (lambda files: files.pop("manifest.json") and {}, None),
    "the manifest is cut": (lambda files: {"manifest.json": files["manifest.json"][:-9]}, "manifest.json"),
    "the manifest leads out": (lambda files: with_manifest(files, **{"../x.json": {}}), "manifest.json' is dam"),
    "the card was edited": (lambda files: {"README.md": files["README.md"] + b"\nmine\n"}, None),
    "a file was added": (lambda files: {"more.json": b"{}"}, None),
}


def test_a_download_is_held_against_the_manifest_in_it(hub, tmp_path, files):
    new, whole = [change.replace(" ", "-") for change in CHANGES], with_manifest(files)
    for name, (act, _) in zip(new, CHANGES.values(), strict=True):
        there = dict(whole)
        hub.put(f"user/{name}", there | act(there))
    results = lrlab_each([["pull", f"user/{name}"] for name in new], hub.env, tmp_path)
    for name, (_, said), (status, _, error) in zip(new, CHANGES.values(), results, strict=True):
        assert status == (2 if said else 0), (name, error)
        assert (said or "") in error
        assert said is None or ".tmp-" not in error
        assert (tmp_path / name).exists() == (said is None)
        assert ("the card" in error) == (name == "the-card-was-edited")
        assert ("its files can be read but not verified" in error) == (name == "there-is-no-manifest")
    checks = [["check", name, "--json"] for name in new if (tmp_path / name).exists()]
    assert all(json.loads(out)["is_whole"] for _, out, _ in lrlab_each(checks, hub.env, tmp_path))


def test_paths_that_lead_out_are_refused_and_formats_that_run_code_are_left():
    for name in ("/outside.json", "lrlab/../../outside.json", "lrlab\\..\\outside.json", "C:outside.json"):
        with pytest.raises(LabError, match="a path that leads out of its folder. Nothing was downloaded"):
            files_to_take("somebody/run", ["lrlab/run.json", name])
    code = ["unet/diffusion_pytorch_model.bin", "lrlab/random.npy", "pipeline.py", "checkpoint-100/random.json"]
    assert files_to_take("somebody/run", ["lrlab/run.json", *code]) == ["lrlab/run.json"]


@pytest.mark.slow
def test_a_result_that_was_pulled_can_go_elsewhere(folders, hub, tmp_path):
    """Its card names the new place, on the branch that it is on; code that pull left on the Hub is not taken away."""
    lrlab("push", folders / "run", "--repo_id", "user/run", env=hub.env, cwd=tmp_path)
    hub.model("user/run").files.update({"pipeline.py": b"open('ran', 'w')", "unet/x.so": b"", "run.sh": b""})
    commands = [["pull", "user/run"], ["push", "run", "--repo_id", "user/run", "--message", "again"]]
    commands += [["push", "run", "--repo_id", "user/other", "--revision", "dev"]]
    assert [status for status, *_ in lrlab_each(commands, hub.env, tmp_path)] == [0, 0, 0]
    assert "pipeline.py" in hub.model("user/run").files
    assert not list(tmp_path.glob("run/**/*.py")) + list(tmp_path.glob("run/**/*.s[oh]"))
    assert not (tmp_path / "ran").exists()
    other = hub.model("user/other")
    card = other.commits[other.branches["dev"]]["README.md"].decode()
    assert 'from_pretrained("user/other", revision="dev")' in card
    assert "user/other/blob/dev/lrlab/run.json" in card
    assert "user/run" not in card


def test_pulls_that_cannot_work(hub, tmp_path):
    rows = [
        (["user/nothing"], "There is no model and no data set 'user/nothing'"),
        (["user/a b"], "Repo id must use alphanumeric"),
        (["user/other"], "holds something else, and not a run, a study"),
        (["user/other", "--revision", "v9"], "at 'v9'"),
        (["user/other", "--out", "full"], "exists and is not an empty folder"),
    ]
    hub.put("user/other", {"README.md": b"# something else", "config.json": b"{}"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    results = lrlab_each([["pull", *given] for given, _ in rows], hub.env, tmp_path)
    for (given, message), (status, _, error) in zip(rows, results, strict=True):
        assert status == 2, given
        assert message in error
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "hf_home"}
    assert (tmp_path / "full" / "mine").read_text() == "mine"
