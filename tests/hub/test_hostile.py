"""A hundred records and a hundred repositories of somebody who means harm: nothing outside is touched, nothing hangs."""

import json
import random
import shutil
import time

import pytest
import started
from core.test_plain_yaml import GROWING
from published import run_folder

from diffusers_lrlab.hub.contents import run_files

SECONDS, GIGABYTES = 60, 3
ODD = [
    *("../canary", "/etc/passwd", "canary/../../canary", "~", "", "\x00", "\x1b[2J", "a" * 100_000, "hub:user/x", "é\u202e"),
    *(10**30, -(10**12), 10**12, 1e308, 0, -1, True, None, [], {}, [[]], {"a": {"b": []}}, ["../canary"] * 1000),
]
PATHS = ["../canary.json", "lrlab/../../canary.json", "/canary.json", "lrlab\\..\\x.json", "C:x.json", "x/" * 300 + "x.json"]
CONTENTS = {
    "README.md": [
        *(f"---\n{GROWING}---\n", "---\n" + "\n" * 2_000_000, "---\n" + "[" * 100_000, "\x1b[2J"),
        "---\na: !!python/x y\n---\n",
    ],
    "spec.yaml": [GROWING, "[" * 200_000, "- a\n" * 250_000, "a: {<<: {<<: {b: 1}}}", "1:" * 100_000 + "1", "a: &a [*a]"],
    "lrlab/metrics.jsonl": [
        *("1" * 5_000_000, '{"update": 1}\n' * 2_000_000, "[" * 100_000 + "\n", '{"update": 1e400}\n', "\n" * 10**6),
    ],
    "lrlab/run.json": [
        *("[" * 1_000_000, "[" * 60 + "]" * 60, "[[],[]," * 10**6, '{"a": ' + "9" * 10**6 + "}", "null"),
        b"\xed\xa0\x80",
    ],
    "model_index.json": ['{"../x": ["a", "b"], "/etc": [1, 2]}', "[]", '{"' + "a" * 10**6 + '": []}'],
    "unet/diffusion_pytorch_model.safetensors": [
        b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}", (90 << 20).to_bytes(8, "little"),
    ],
    "lrlab/timesteps.parquet": [b"PAR1" + b"\xff" * 100 + b"PAR1", b"", b"PAR1PAR1"],
}  # fmt: skip


@pytest.fixture
def place(hub, tmp_path):
    """A folder to work in, with canaries around and in it."""
    work = tmp_path / "outside" / "work"
    work.mkdir(parents=True)
    for folder in (tmp_path / "outside", work):
        (folder / "canary").mkdir()
        for name in ("canary.json", "canary/run.json", "canary/model_index.json"):
            (folder / name).write_text("alive")
    return work


def assert_untouched(place):
    """The canaries live, and nothing has come to where they are."""
    for folder in (place.parent, place):
        wanted = {"canary", "canary.json"} | ({"work"} if folder == place.parent else set())
        assert wanted <= {path.name for path in folder.iterdir()} <= wanted | {"new", "record"}
        assert {path.name for path in (folder / "canary").iterdir()} == {"run.json", "model_index.json"}
        assert all(path.read_text() == "alive" for path in (*folder.glob("canary/*"), folder / "canary.json"))


def bounded():
    """Of memory; and few updates go into the forecasts of --dry_run."""
    import resource

    from diffusers_lrlab.preflight import forecast

    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    forecast._UPDATES = 2


def survives(place, hub, *command):
    """Runs the command; it ends in time, without a traceback, and has touched nothing."""
    begin = time.monotonic()
    status, out, error = started.run("-m", "diffusers_lrlab.cli.main", *command, env=hub.env, cwd=place, before=bounded)
    assert time.monotonic() - begin < SECONDS, command
    assert "Traceback" not in error, error
    assert status in (0, 2), (status, error)
    assert "\x1b[2J" not in out + error
    assert_untouched(place)
    return status


@pytest.mark.slow
def test_a_hundred_hostile_repositories(hub, place, tmp_path):
    draw = random.Random(0)
    run_folder(tmp_path / "good", megabytes=0)
    good = {name: path.read_bytes() for name, path in run_files(tmp_path / "good").items()}
    cases = [{name: text} for name, texts in CONTENTS.items() for text in texts] + [{path: "{}"} for path in PATHS]
    while len(cases) < 100:
        names = draw.sample(list(CONTENTS), 2)
        cases.append(
            {name: draw.choice(CONTENTS[name]) for name in names} | {draw.choice(["x.json", "LICENSE", *PATHS]): "{}"}
        )
    refused = 0
    for number, case in enumerate(cases):
        files = {name: text if isinstance(text, bytes) else text.encode() for name, text in case.items()}
        hub.put(f"bad/run-{number}", good | files)
        refused += survives(place, hub, "pull", f"bad/run-{number}", "--out", "new") == 2
        shutil.rmtree(place / "new", ignore_errors=True)
    assert refused >= 80


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_hostile_records(hub, place, seed):
    draw = random.Random(seed)
    for number in range(25):
        shutil.rmtree(place / "record", ignore_errors=True)
        run_folder(place / "record", megabytes=0)
        file = place / "record" / "lrlab" / "run.json"
        record = json.loads(file.read_text())
        for _ in range(draw.choice([1, 1, 3])):
            section = draw.choice(["config", "config", "config", "train", "meta", "run"])
            record[section][draw.choice(sorted(record[section]))] = draw.choice(ODD)
        file.write_text(json.dumps(record))
        command = ["push", "--repo_id", "user/x"] if number % 3 == 0 else ["rerun", "--out", "new", "--dry_run"]
        survives(place, hub, command[0], "record", *command[1:])
        shutil.rmtree(place / "new", ignore_errors=True)
