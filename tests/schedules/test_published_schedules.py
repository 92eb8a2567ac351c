"""A schedule as a file of data, and `--lr_scheduler hub:USER/NAME`."""

import json
import math

import numpy as np
import pytest
import started
from published import lrlab
from tables import cases

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.progress import Progress
from diffusers_lrlab.hub.schedule_folder import write_schedule_folder
from diffusers_lrlab.schedules.published import read_schedule_file, schedule_as_json
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.resolve import merge_spec, resolve_schedule
from diffusers_lrlab.schedules.schedule import Schedule


@cases("name", list(SCHEDULERS))
def test_every_schedule_is_read_back_as_it_was(tmp_path, name):
    file = tmp_path / "schedule.json"
    given = {key: value for key, value in SCHEDULERS[name].resolve({}).items() if value is not None and key != "min_lr"}
    spec = Schedule(name, {key: value for key, value in given.items() if key != "min_lr_ratio"})
    file.write_text(schedule_as_json(spec))
    published = read_schedule_file(file)
    assert (published.name, published.kwargs) == (name, json.loads(json.dumps(spec.kwargs)))
    if "feedback" not in SCHEDULERS[name].traits:
        clock = Progress(np.arange(100), 100, 0 if "no_warmup" in SCHEDULERS[name].traits else 5)
        wanted, found = (
            resolve_schedule(name, kwargs).at(clock, 1e-3, 0.9)[0] for kwargs in (spec.kwargs, published.kwargs)
        )
        np.testing.assert_array_equal(wanted, found)


@pytest.mark.pictures
def test_a_folder_has_data_picture_and_card(tmp_path):
    write_schedule_folder(tmp_path / "mine", "join:schedules=[constant|rex:d=0.9],boundaries=[0.5]")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"schedule.json", "schedule.png", "README.md"}
    data = json.loads((tmp_path / "mine" / "schedule.json").read_text())
    assert data["lr_scheduler"] == "join"
    assert data["lr_scheduler_kwargs"]["schedules"] == ["constant", "rex:d=0.9"]
    assert "hub:USER/NAME" in (tmp_path / "mine" / "README.md").read_text()


@cases(
    ("change", "message"),
    [
        ({"format": "something else"}, "not a schedule of this format"),
        ({"lr_scheduler": "cosin"}, "Did you mean 'cosine'"),
        ({"lr_scheduler": "hub:other/one"}, "must name a learning-rate schedule"),
        ({"lr_scheduler": "join", "lr_scheduler_kwargs": {"schedules": ["hub:a/b", "rex"]}}, "names a schedule on the Hub"),
        ({"lr_scheduler_kwargs": {"gama": 1}}, "gama"),
        ({"lr_scheduler_kwargs": [1]}, "must name a learning-rate schedule and its parameters"),
        ({"momentum_scheduler": "nothing"}, "nothing"),
        ({"momentum_scheduler_kwargs": {"a": 1}}, "momentum_scheduler_kwargs without momentum_scheduler"),
        ({"code": "import os"}, "holds 'code', which is not a field of a schedule"),
        ('{"format": ', "not valid JSON"),
        ({"lr_scheduler_kwargs": {"gamma": math.nan}}, "gamma=nan of .step.: must be a number in .0, 1."),
        ("[1, 2]", "not a schedule of this format"),
        ("[" * 60_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (" " * 70_000, "has 70000 bytes, more than the 65536"),
        ({"lr_scheduler_kwargs": {"step_size": 1e308}}, "step_size"),
    ],
    ids=(
        "another format", "unknown name", "a name on the Hub", "a part on the Hub", "unknown parameter",
        "a list of parameters", "unknown momentum", "parameters without momentum", "another key", "half of it",
        "NaN", "a list", "nested", "no text",
        "too long", "no whole number",
    ),
)  # fmt: skip
def test_a_file_that_is_no_schedule_is_refused(tmp_path, change, message):
    file = tmp_path / "schedule.json"
    if isinstance(change, dict):
        good = json.loads(schedule_as_json(Schedule("step", {"gamma": 0.5})))
        file.write_text(json.dumps(good | change))
    else:
        file.write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(LabError, match=message):
        read_schedule_file(file, "hub:user/mine@1")
    with pytest.raises(LabError, match="hub:user/mine@1"):
        read_schedule_file(file, "hub:user/mine@1")


@cases(
    ("arguments", "message"),
    [
        (["x", "--lr_scheduler", "cosin"], "Did you mean 'cosine'"),
        (["full", "--lr_scheduler", "cosine"], "exists and is not an empty folder"),
        (["x", "--lr_scheduler", "constant", "--num_warmup_steps", "5"], "warm-up"),
        (["x", "--lr_scheduler", "mdlrc", "--momentum_scheduler", "demon"], "momentum"),
    ],
)
def test_schedules_that_cannot_be_written(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    assert main(["schedule", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.fixture
def mine(hub, tmp_path):
    """A published schedule with a momentum schedule."""
    write_schedule_folder(tmp_path / "mine", "wsd:decay_type=1-sqrt,num_decay_steps=0.3", "demon")
    lrlab("push", "mine", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path)
    return hub.model("user/mine")


def test_diffusers_takes_a_published_schedule(mine, hub, tmp_path):
    """With its momentum: rate and beta1 are those of both schedules."""
    python = """
import torch, diffusers_lrlab
from diffusers.optimization import get_scheduler
from diffusers_lrlab.core.progress import Progress
from diffusers_lrlab.schedules.resolve import resolve_schedule
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 1e-3)
scheduler = get_scheduler("hub:user/mine", optimizer, num_warmup_steps=5, num_training_steps=100)
wanted = resolve_schedule("wsd:decay_type=1-sqrt,num_decay_steps=0.3", None, "demon")
for update in range(100):
    lr, beta1 = wanted.at(Progress(update, 100, 5), 1e-3, 0.9)
    group = optimizer.param_groups[0]
    assert abs(group["lr"] - lr) < 1e-12 and abs(group["betas"][0] - beta1) < 1e-12, update
    optimizer.step(); scheduler.step()
assert group["betas"][0] < 0.5
"""
    status, _, error = started.run("-c", python, env=hub.env, cwd=tmp_path)
    assert status == 0, error


def test_a_published_schedule_can_be_held_still(mine, hub, tmp_path):
    pinned = f"hub:user/mine@{mine.head}"
    mine.commit({"schedule.json": schedule_as_json(Schedule(*merge_spec("rex", None))).encode()}, "another")
    shown = [
        json.loads(
            lrlab(
                *("preview", "--lr_scheduler", spec, "--num_training_steps", "50", "--json"), env=hub.env, cwd=tmp_path
            ).stdout
        )["schedules"][0]["lr"]
        for spec in (pinned, "hub:user/mine", "rex")
    ]
    assert shown[0] != shown[1] == shown[2]


@pytest.mark.slow
@cases(
    ("spec", "message"),
    [
        ("hub:user/nothing", "no such repository"),
        ("hub:user/mine@v9", "no such repository or revision"),
        ("hub:user/mine:num_cycles=2", "is not the name of a schedule. Write hub:USER/NAME"),
        ("hub:mine", "is not the name of a schedule. Write hub:USER/NAME"),
        ("hub:", "is not the name of a schedule"),
        ("hub:user/other", "has no schedule.json"),
        ("hub:user/huge", "has 70000 bytes"),
        ("hub:user/bad", "not valid JSON"),
        ("hub:else/private", "no such repository"),
        ("join:schedules=[constant|hub:user/mine]", "join cannot take 'hub:user/mine', which may change on the Hub"),
    ],
)
def test_names_that_lead_nowhere(mine, hub, tmp_path, spec, message):
    hub.put("user/other", {"README.md": b""})
    hub.put("user/huge", {"schedule.json": b" " * 70_000})
    hub.put("user/bad", {"schedule.json": b"{"})
    hub.put("else/private", {"schedule.json": b"{}"}, private=True)
    arguments = ("preview", "--lr_scheduler", spec, "--num_training_steps", "50")
    assert message in lrlab(*arguments, env=hub.env, cwd=tmp_path, status=2).stderr
    assert hub.count("GET /user/huge/resolve") == 0  # its size is known before


def test_a_second_momentum_schedule_is_refused(mine, hub, tmp_path):
    arguments = ("preview", "--lr_scheduler", "hub:user/mine", "--momentum_scheduler", "cyclic_momentum")
    error = lrlab(*arguments, "--num_training_steps", "50", env=hub.env, cwd=tmp_path, status=2).stderr
    assert "includes the momentum schedule 'demon'" in error


@pytest.mark.slow
def test_what_would_make_another_schedule_of_it_is_refused(mine, hub, tmp_path):
    preview = ("preview", "--lr_scheduler", "hub:user/mine", "--num_training_steps", "50")
    for more in (["--lr_scheduler_kwargs", '{"decay_type": "linear"}'],):
        error = lrlab(*preview, *more, env=hub.env, cwd=tmp_path, status=2).stderr
        assert "would change the published schedule" in error
    plan = ("plan", "--lr_scheduler", "hub:user/mine")
    for more, message in (
        (["--lr_num_cycles", "3"], "--lr_num_cycles has no effect on a published schedule"),
        (["--momentum_scheduler_kwargs", '{"min_momentum": 0.5}'], "includes the momentum schedule 'demon'"),
        (["--lr_scheduler_source", "hub:somebody/else"], "is set by --lr_scheduler hub:USER/NAME, not by hand"),
    ):
        assert message in lrlab(*plan, *more, env=hub.env, cwd=tmp_path, status=2).stderr


@pytest.mark.slow
def test_a_hub_that_is_away_is_told(mine, tmp_path, hub):
    env = hub.env | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    arguments = ("preview", "--lr_scheduler", "hub:user/mine", "--num_training_steps", "50", "--json")
    assert "The Hub cannot be reached" in lrlab(*arguments, env=env, cwd=tmp_path, status=2).stderr
    there = lrlab(*arguments, env=hub.env, cwd=tmp_path).stdout
    # Once seen, it is in the cache.
    result = lrlab(*arguments, env=env, cwd=tmp_path)
    assert result.stdout == there
    assert f"is taken from the cache, commit {mine.head}" in result.stderr
