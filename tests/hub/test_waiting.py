"""A Hub that is silent, slow, or asks for patience: everything ends, and says why; and what its errors may show."""

import contextlib
import socket
import threading
import time

import pytest
from hub_server import Fault, HubServer
from published import end_of_lrlab, lrlab, run_folder, start_lrlab
from started import run

from diffusers_lrlab.core.hub_client import without_tokens
from diffusers_lrlab.core.manifest import MANIFEST, manifest_text, sums_of_bytes
from diffusers_lrlab.hub.schedule_folder import write_schedule_folder

# The limits are 2 s for one answer and 5 s for all.
SECONDS, HASTY = 12, {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}
AT_ONCE = 4  # commands that wait, each for a Hub of its own
COMMIT = r"^POST .*/commit/"
PREVIEW = ["preview", "--lr_scheduler", "hub:user/mine", "--num_training_steps", "9", "--json"]


def silence(**where):
    return Fault(".", delay=1000, times=10**6, **where)


@pytest.fixture
def mine(hub, tmp_path):
    """A schedule in a folder and on the Hub."""
    write_schedule_folder(tmp_path / "mine", "rex")
    lrlab("push", "mine", "--repo_id", "user/mine", env=hub.env, cwd=tmp_path)
    hub.requests.clear()


def in_time(*arguments, hub, tmp_path, seconds=SECONDS, env=HASTY, **how):
    begin = time.monotonic()
    result = lrlab(*arguments, env=hub.env | env, cwd=tmp_path, **how)
    assert time.monotonic() - begin < seconds
    return result


@pytest.mark.slow
def test_a_silent_hub_ends_a_command_that_says_why(mine, hub, tmp_path):
    hub.faults.append(silence())
    error = in_time("pull", "user/mine", "--out", "new", hub=hub, tmp_path=tmp_path, status=2).stderr
    assert "Looking at the repository: no answer from the Hub; again in 1 s" in error
    assert "The Hub cannot be reached for lrlab pull" in error
    assert "The limit is 2 s for an answer, which is twice HF_HUB_DOWNLOAD_TIMEOUT." in error


@pytest.mark.slow
def test_a_published_schedule_is_taken_from_the_cache_when_the_hub_is_silent(mine, hub, tmp_path):
    hub.faults.append(silence())
    error = in_time(*PREVIEW, hub=hub, tmp_path=tmp_path, status=2).stderr
    assert "The Hub cannot be reached" in error
    hub.faults.clear()
    lrlab(*PREVIEW, env=hub.env, cwd=tmp_path)
    hub.faults.append(silence())
    assert "is taken from the cache" in in_time(*PREVIEW, hub=hub, tmp_path=tmp_path).stderr


@pytest.mark.parametrize("where", [r"/whoami", r"/preupload/", COMMIT])
def test_a_wait_of_days_is_not_obeyed(mine, hub, tmp_path, where):
    hub.faults.append(Fault(where, 429, times=99, headers={"Retry-After": "100000"}))
    error = in_time("push", "mine", "--repo_id", "user/new", hub=hub, tmp_path=tmp_path, status=2).stderr
    assert "asks to wait 100000 s; the limit is 120 s" in error


def test_a_commit_that_is_made_after_its_connection_broke_is_ours(mine, hub, tmp_path):
    """The first attempt is cut off before it counts, and made while the second one is under way."""
    lrlab("push", "mine", "--repo_id", "user/new", "--message", "first", env=hub.env, cwd=tmp_path)
    write_schedule_folder(tmp_path / "other", "wsd:num_decay_steps=0.3")
    lrlab("push", "other", "--repo_id", "user/like", env=hub.env, cwd=tmp_path)
    wanted = {name: text.replace(b"user/like", b"user/new") for name, text in hub.model("user/like").files.items()}
    sums = {name: sums_of_bytes(text) for name, text in wanted.items() if name not in (".gitattributes", MANIFEST)}
    wanted[MANIFEST] = manifest_text(sums).encode()
    hub.faults += [Fault(COMMIT, cut="during"), Fault(COMMIT, then=lambda: hub.model("user/new").commit(wanted, "late"))]
    result = lrlab("push", "other", "--repo_id", "user/new", env=hub.env, cwd=tmp_path)
    assert "Uploaded and verified" in result.stdout
    assert hub.model("user/new").messages == ["initial commit", "first", "late"]


@pytest.mark.parametrize("where", [r"/whoami", COMMIT, r"^GET /api/models/user/mine"])
def test_a_token_that_the_hub_repeats_is_not_shown(mine, hub, tmp_path, where):
    hub.faults.append(Fault(where, 418, times=99, echo=True))
    command = PREVIEW if "mine" in where else ["push", "mine", "--repo_id", "user/new"]
    result = lrlab(*command, env=hub.env, cwd=tmp_path, status=2)
    assert "Wanted by the test: Bearer ..." in result.stderr
    assert hub.env["HF_TOKEN"] not in result.stdout + result.stderr


def test_tokens_of_others_are_not_shown_either():
    text = "Bearer eyJhb.x and hf_abcdefghijklmnopqrstuvwxyz012345 and mine and hf_hub_download"
    assert without_tokens(text, "mine") == "Bearer ... and ... and ... and hf_hub_download"


def trickle(server):
    """Answers everything with a body that never ends, a byte now and then."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_send_slowly, args=(connection,), daemon=True).start()


def _send_slowly(connection):
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    try:
        while True:
            connection.sendall(b" ")
            time.sleep(0.3)
    except OSError:
        pass


@pytest.mark.slow
def test_a_trickle_is_no_answer(hub, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=trickle, args=(server,), daemon=True).start()
        env = HASTY | {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"}
        error = in_time("pull", "user/mine", hub=hub, tmp_path=tmp_path, env=env, status=2).stderr
    assert "has sent almost nothing for 5 s" in error
    assert "HF_HUB_DOWNLOAD_TIMEOUT=2" in error


@pytest.mark.slow
def test_a_slow_upload_is_not_mistaken_for_silence(mine, hub, tmp_path):
    """A wait within the limit of one answer, at every call."""
    hub.faults.append(Fault(".", delay=0.6, times=99))
    in_time("push", "mine", "--repo_id", "user/new", hub=hub, tmp_path=tmp_path, seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["push", "pull"])
def test_silence_from_any_call_on(hub, tmp_path, name):
    run_folder(tmp_path / "run")

    def command(label, server):
        if name == "push":
            server.large.clear()  # so that it is sent again
            return ["push", "run", "--repo_id", f"user/{label}"], server.env
        server.large |= hub.large
        return ["pull", "user/known", "--out", label], server.env | {"HF_HOME": str(tmp_path / f"home-{label}")}

    lrlab("push", "run", "--repo_id", "user/known", env=hub.env, cwd=tmp_path)
    hub.requests.clear()
    arguments, env = command("a", hub)
    lrlab(*arguments, env=env, cwd=tmp_path)
    num_calls = len(hub.requests)
    assert num_calls >= 10
    for first in range(0, num_calls, AT_ONCE):
        with contextlib.ExitStack() as stack:
            begin, begun = time.monotonic(), []
            for call in range(first, min(first + AT_ONCE, num_calls)):
                server = stack.enter_context(HubServer(tmp_path / f"hf_home-{call}"))
                server.repos |= hub.repos
                server.faults.append(silence(after=call))
                arguments, env = command(f"from-{call}", server)
                begun.append(start_lrlab(*arguments, env=env | HASTY, cwd=tmp_path))
            for process in begun:
                assert "Hub" in end_of_lrlab(process, status=2).stderr
            assert time.monotonic() - begin < AT_ONCE * SECONDS
    assert not list(tmp_path.glob("from-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "env", "seconds"),
    [
        ("--push_to_hub", HASTY, SECONDS),
        ("--dataset_name=user/data", {}, 60),  # with the limits that are the default
        ("--lr_scheduler=hub:user/mine", HASTY, SECONDS),
    ],
)
def test_a_training_does_not_wait_for_a_silent_hub(hub, tmp_path, option, env, seconds):
    hub.faults.append(silence())
    begin = time.monotonic()
    command = ["-m", "diffusers_lrlab.train", "--max_train_steps=2", option, f"--output_dir={tmp_path / 'out'}"]
    status, _, error = run(*command, env=hub.env | env, cwd=tmp_path)
    assert status == 2, error
    assert "Traceback" not in error
    assert time.monotonic() - begin < seconds
