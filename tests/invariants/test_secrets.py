"""A token is planted, and nothing that a run, a study or an upload leaves behind or shows has it."""

import re
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import started
from hub_server import HubServer
from published import wait_briefly

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by /proc")]

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


class Watch(threading.Thread):
    """Remembers the command lines and titles of all processes that are not pytest's own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen, self.stop = set(), threading.Event()

    def run(self):
        while not self.stop.is_set():
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(file.read_bytes() + file.with_name("comm").read_bytes())
                except OSError:
                    continue  # it has ended
            time.sleep(0.01)


def write_down_pickles(folder):
    """Called in the process: everything that it pickles for other processes goes to files, too."""
    from multiprocessing import reduction

    dumps = reduction.ForkingPickler.dumps.__func__

    def noted(kind, value, protocol=None):
        data = dumps(kind, value, protocol)
        (folder / f"pickle-{time.monotonic_ns()}").write_bytes(bytes(data))
        return data

    reduction.ForkingPickler.dumps = classmethod(noted)
    wait_briefly()


@pytest.fixture
def planted(tmp_path):
    """A Hub whose users have the two tokens: one in the environment, one in the file that `hf auth login` writes."""
    with HubServer(tmp_path / "home", {TOKEN: "user", OTHER: "user"}) as hub:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "token").write_text(OTHER)
        (tmp_path / "work").mkdir()
        (tmp_path / "pickles").mkdir()
        yield hub, tmp_path


def run_watched(folder, env, command):
    """What a command prints, and the processes that were there meanwhile."""
    watch = Watch()
    watch.start()
    before = partial(write_down_pickles, folder / "pickles")
    status, out, error = started.run(*command, env=env, cwd=folder / "work", before=before)
    watch.stop.set()
    watch.join()
    assert status == 0, error
    return out, error, watch


def assert_secret(folder, *shown, watch):
    found = [str(path) for path in folder.rglob("*") if path.is_file() and holds_secret(path.read_bytes())]
    assert found == []
    assert not any(holds_secret(text.encode()) for text in shown)
    assert not any(map(holds_secret, watch.seen))


def holds_secret(data):
    return any(secret in data for secret in SECRETS)


def test_a_run_that_is_pushed_leaves_no_token(planted):
    """A flag is on the command line that the user typed; there it is not looked for, but everywhere else."""
    hub, folder = planted
    command = ["-m", "diffusers_lrlab.train", *RUN, "--logger=tensorboard", "--push_to_hub", f"--hub_token={TOKEN}"]
    out, error, watch = run_watched(folder, hub.env | {"HF_TOKEN": ""}, command)
    repo = next(iter(hub.repos.values()))
    assert len(repo.files) > 5
    for name, content in repo.files.items():
        assert not holds_secret(content), name
    assert not any(map(holds_secret, map(str.encode, repo.messages)))
    assert_secret(folder / "work", out, error, watch=watch)
    assert_secret(folder / "pickles", watch=watch)
    assert list((folder / "work").rglob("events.*"))  # of the tracker
    assert re.search(r"[Uu]ploaded", out)


def test_a_study_with_its_workers_leaves_no_token(planted):
    hub, folder = planted
    (folder / "work" / "spec.yaml").write_text(STUDY)
    command = ["-m", "diffusers_lrlab.cli.main", "study", "run", "spec.yaml", "--out", "study"]
    out, error, watch = run_watched(folder, hub.env, command)
    assert len(list((folder / "work" / "study" / "runs").glob("*.json"))) == 4
    assert_secret(folder / "work", out, error, watch=watch)
    assert_secret(folder / "pickles", watch=watch)
