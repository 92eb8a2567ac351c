"""A Hub that lies about the files of a repository: nothing is kept, and the message says what is wrong and what to do."""

import json
import re

import pytest
from published import lrlab, run_folder

from diffusers_lrlab.core.manifest import manifest_text, sums_of_bytes
from diffusers_lrlab.hub.contents import run_files

WEIGHTS, LOG, INDEX = "unet/diffusion_pytorch_model.safetensors", "lrlab/metrics.jsonl", "model_index.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of a whole run, without a manifest."""
    folder = run_folder(tmp_path_factory.mktemp("run") / "run", megabytes=0)
    (folder / "unet" / "config.json").write_text("{}")
    (folder / INDEX).write_text('{"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}')
    return {name: path.read_bytes() for name, path in run_files(folder).items()}


def changed(name, **values):
    """An answer about a repository in which one file is described by other values."""

    def lie(siblings):
        return [one | values if one["rfilename"] == name else one for one in siblings]

    return lie


def without(*names):
    return lambda siblings: [one for one in siblings if one["rfilename"] not in names]


def also(**sibling):
    return lambda siblings: [*siblings, sibling]


def served(name, change):
    return lambda path, content: change(content) if path == name else content


SHA = {"sha256": "0" * 64, "size": 80, "pointerSize": 130}
# What is told in place of the truth, and what is said of it.
LIES = {
    "a smaller size": ({"siblings": changed(LOG, size=7)}, "metrics.jsonl.*the Hub announced 7"),
    "a larger size": ({"siblings": changed(LOG, size=10**7)}, "metrics.jsonl.*the Hub announced 10000000"),
    "a negative size": ({"siblings": changed(LOG, size=-1)}, "metrics.jsonl' has -1 bytes"),
    "a size that is a text": ({"siblings": changed(LOG, size="7")}, "metrics.jsonl' has '7' bytes"),
    "a size that is a fraction": ({"siblings": changed(LOG, size=7.5)}, "metrics.jsonl' has 7.5 bytes"),
    "another hash of weights": ({"siblings": changed(WEIGHTS, lfs=SHA)}, "safetensors'.*SHA-256 is not the one"),
    "another hash of a text": ({"siblings": changed(LOG, blobId="0" * 40)}, "metrics.jsonl'.*hash is not the one"),
    "weights that are not listed": ({"siblings": without(WEIGHTS)}, "unet' has no weights"),
    "a part that is not listed": ({"siblings": without(WEIGHTS, "unet/config.json")}, "unet' is missing"),
    "no list at all": ({"siblings": lambda siblings: None}, "holds something else"),
    "a list that is a text": ({"siblings": lambda siblings: "text"}, "is not from the Hub"),
    "a sibling without a name": ({"siblings": also(size=3)}, "is not from the Hub"),
    "a name that is a number": ({"siblings": also(rfilename=7, size=3)}, "the Hub says that 7 has 3 bytes"),
    "a sibling that is not there": (
        {"siblings": also(rfilename="lrlab/more.json", size=3)},
        "lists it but does not have it",
    ),
    "a name that leads out": ({"siblings": also(rfilename="lrlab/../../more.json", size=3)}, "leads out of its folder"),
    "a shorter file": ({"content": served(LOG, lambda content: content[:-9])}, "metrics.jsonl"),
    "a longer file": ({"content": served(LOG, lambda content: content + b"{}\n")}, "metrics.jsonl"),
    "shorter weights": ({"content": served(WEIGHTS, lambda content: content[:-9])}, "safetensors"),
    "other weights": ({"content": served(WEIGHTS, lambda content: content[:-1] + b"\7")}, "safetensors'.*SHA-256 is not"),
    "no content": ({"content": served(LOG, lambda content: b"")}, "metrics.jsonl"),
    "a length that is too short": (
        {"headers": lambda path, headers: headers | ({"X-Linked-Size": "7"} if path == WEIGHTS else {})},
        "safetensors",
    ),
}


QUICK = (
    "a smaller size",
    "a size that is a text",
    "a sibling without a name",
    "a sibling that is not there",
    "other weights",
)
QUICK += ("weights are gone", "the card was edited")


def quick_or_slow(table):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in table]


@pytest.mark.parametrize("lie", quick_or_slow(LIES))
def test_a_lie_is_found(hub, tmp_path, files, lie):
    hub.put("user/run", files)
    told, said = LIES[lie]
    hub.lies = told
    error = lrlab("pull", "user/run", "--out", "new", env=hub.env, cwd=tmp_path, status=2).stderr
    assert not (tmp_path / "new").exists()
    assert re.search(said, error, re.DOTALL), error
    hub.lies = {}
    lrlab("pull", "user/run", "--out", "new", env=hub.env, cwd=tmp_path)
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == files[WEIGHTS]


def with_manifest(files, **other):
    sums = {name: sums_of_bytes(content) for name, content in files.items()}
    return files | {"manifest.json": manifest_text(sums | other).encode()}


# What happened to a repository since it was uploaded, and what is said of it; `None` if it may.
CHANGES = {
    "a file is gone": (lambda files: files.pop("lrlab/loss.png"), "loss.png' is missing"),
    "weights are gone": (lambda files: files.pop(WEIGHTS), "safetensors' is missing"),
    "a file has changed": (lambda files: files.update({LOG: files[LOG].replace(b"1", b"2")}), "metrics.jsonl' is damaged"),
    "the record says that it goes on": (
        lambda files: files.update({"lrlab/run.json": files["lrlab/run.json"].replace(b'"finished"', b'"running"')}),
        "run.json' has",
    ),
    "the manifest is cut": (lambda files: files.update({"manifest.json": files["manifest.json"][:-9]}), "manifest.json"),
    "the manifest is a list": (lambda files: files.update({"manifest.json": b"[]"}), "manifest.json' is damaged"),
    "the manifest leads out": (
        lambda files: files.update(with_manifest(files, **{"../x.json": {}})),
        "manifest.json' is dam",
    ),
    "the card was edited": (lambda files: files.update({"README.md": files["README.md"] + b"\nmine\n"}), None),
    "a file was added": (lambda files: files.update({"more.json": b"{}"}), None),
}


@pytest.mark.parametrize("change", quick_or_slow(CHANGES))
def test_a_download_is_held_against_the_manifest_in_it(hub, tmp_path, files, change):
    changed_files = with_manifest(files)
    act, said = CHANGES[change]
    act(changed_files)
    hub.put("user/run", changed_files)
    error = lrlab("pull", "user/run", "--out", "new", env=hub.env, cwd=tmp_path, status=2 if said else 0).stderr
    assert (said or "") in error
    assert (tmp_path / "new").exists() == (said is None)
    assert ("the card" in error) == (change == "the card was edited")
    if said is None:
        found = lrlab("check", "new", "--json", env=hub.env, cwd=tmp_path)
        assert json.loads(found.stdout)["is_whole"]
