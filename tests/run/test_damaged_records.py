"""Runs whose files or records are damaged, in every command that reads them: one error that names the file, no traceback."""

import copy
import json
import random
import shutil

import pytest
from continued_runs import new_run
from faults.injected import DAMAGE

from diffusers_lrlab import extend
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.manifest import MANIFEST
from diffusers_lrlab.hub.contents import contents_of
from diffusers_lrlab.models.loading import find_start_weights
from diffusers_lrlab.run.averages import run_snapshots
from diffusers_lrlab.run.check import check_folder
from diffusers_lrlab.training.run_folder import RunFolder

RECORD, WEIGHTS = "lrlab/run.json", "denoiser/diffusion_pytorch_model.safetensors"
ODD = (None, True, -1, 10**18, 1e308, "", "²", "../../x", "x" * 10_000, [], [1], [[]], {}, {"a": {"b": [1]}})
UNREADABLE = ("NaN", "Infinity", "1" + "0" * 400, "[" * 100 + "]" * 100, "\\u0000", "{")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return new_run(tmp_path_factory.mktemp("runs"), "run", "constant_with_warmup", 10, ema="posthoc:snapshots=2")


def start_from(folder, part=""):
    find_start_weights(str(folder / part), None, "MLPDenoiser", "denoiser")


READERS = {
    "extend": lambda folder: extend(folder, 20, dry_run=True),
    "ema": run_snapshots,
    "--pretrained_model_name_or_path": start_from,
    "its model": lambda folder: start_from(folder, "denoiser"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_run_is_not_used(run, tmp_path, reader):
    folder, read = shutil.copytree(run, tmp_path / "run"), READERS[reader]
    (folder / "README.md").write_text("my own card")
    (folder / "notes.txt").write_text("mine")
    read(folder)
    for name, how in {RECORD: None, "lrlab/metrics.jsonl" if reader == "extend" else WEIGHTS: "bit"}.items():
        content = (folder / name).read_bytes()
        damaged = content.replace(b'"num_updates": 10', b'"num_updates": 12') if how is None else DAMAGE[how](content)
        assert damaged != content
        (folder / name).write_bytes(damaged)
        with pytest.raises(LabError, match=rf"{name}' is damaged \(its SHA-256 has changed\)\. Hint: restore .*lrlab check"):
            read(folder)
        (folder / name).write_bytes(content)
    read(folder)


def leaves(data, *path):
    """The paths of all values in a record, mappings and lists included."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from leaves(value, *path, key)


def with_value(record, path, value):
    if not path:
        return value
    changed = copy.deepcopy(record)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


READ = (
    *(run_snapshots, start_from, check_folder, lambda folder: contents_of(folder, "user/run")),
    *(lambda folder: extend(folder, 20, dry_run=True), lambda folder: RunFolder(folder).read_record()),
)


def read_all(folder):
    """What readers of a record raise; only a `LabError` may come of what it holds."""
    told = []
    for read in READ:
        try:
            read(folder)
        except LabError as error:
            told.append(str(error))
    return told


PARENT = {"folder": "x", "git_commit": None, "version": "1", "update": 2, "num_updates": 4, "schedule": "rex"}


@pytest.fixture
def unverified(run, tmp_path):
    """A folder without a manifest, and its record, with a parent."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / MANIFEST).unlink()
    record = json.loads((folder / RECORD).read_text())
    record["run"]["parent"] = PARENT
    (folder / RECORD).write_text(json.dumps(record))
    assert not read_all(folder)
    return folder, record


def test_a_record_with_any_value_damaged_causes_no_traceback(unverified, capsys):
    folder, record = unverified
    jobs = [(path, odd) for path in leaves(record) for odd in ODD]
    for path, odd in random.Random(0).sample(jobs, 60):
        (folder / RECORD).write_text(json.dumps(with_value(record, path, odd)))
        read_all(folder)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("run.parent", {"schedule": "rex"}, "run.parent has no 'folder'"),
        ("config.learning_rate", "fast", "config.learning_rate must be a number or None, got 'fast'"),
    ],
)
def test_the_damaged_field_is_named(unverified, path, value, problem):
    folder, record = unverified
    (folder / RECORD).write_text(json.dumps(with_value(record, path.split("."), value)))
    text = f"'{folder / RECORD}' is damaged ({problem}). Hint: "
    assert [error[: len(text)] for error in read_all(folder)] == [text] * 4


def test_a_record_that_is_no_json_is_named(unverified):
    folder, record = unverified
    for text in UNREADABLE:
        (folder / RECORD).write_text(json.dumps(record).replace('"num_updates": 10', f'"num_updates": {text}', 1))
        errors = read_all(folder)
        assert len(errors) == 4, (text, errors)
        assert all("run.json' is damaged (" in error for error in errors)


def test_a_run_with_a_metric_that_is_not_finite_goes_on(unverified):
    folder, record = unverified
    record["train"]["results"]["mine"] = float("nan")
    (folder / RECORD).write_text(json.dumps(record))
    assert RunFolder(folder).read_record()["run"]["status"] == "finished"
    with pytest.raises(LabError, match="NaN is not a number"):
        contents_of(folder, "user/run")
