"""Studies that are run again: finished, changed, damaged, killed, stopped, or on a full disk."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from runs import wait_for
from small_studies import (
    BASE,
    ONE,
    assert_same_but_for_times,
    contents,
    counted_updates,
    moments,
    read_summary,
    records,
    started,
    study,
)
from tables import rows

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.files import full_disk_explained
from diffusers_lrlab.study.results import StudyFolder

pytestmark = pytest.mark.usefixtures("bare")


# --- again -----------------------------------------------------------------------------------------------------------


def test_a_finished_study_is_not_done_again(home, done):
    before = moments(done)
    (done / "summary.json").unlink()
    (done / "summary.parquet").unlink()
    study(home, done)
    assert moments(done) == before
    assert read_summary(done)["study"]["runs"] == {"finished": 8, "diverged": 0}
    assert (done / "summary.parquet").exists()


def test_a_changed_study_is_not_mixed_in(home, done, capsys):
    before = contents(done)
    study(home, done, seeds=3, datasets=["dino"])  # more seeds are added to what is there
    assert "4 of 6 runs are already finished" in capsys.readouterr().out
    assert {row["n"] for row in read_summary(done)["rows"]} == {3}
    assert before.items() <= contents(done).items()
    before = contents(done)
    study(home, done, **ONE, base={**BASE, "learning_rate": 2e-3})
    assert "10 results" in (told := capsys.readouterr().out)
    assert "belong to other studies and are ignored" in told
    after = contents(done)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2
    summary = read_summary(done)
    assert {(row["dataset"], row["n"]) for row in summary["rows"]} == {("dino", 1)}
    assert summary["study"]["runs"]["finished"] == 2


def test_a_damaged_result_is_done_again(home, done, capsys):
    """So are the runs of a damaged begun stack; a report names what is damaged; a study without its file is left alone."""
    before = moments(done)
    victim = next(iter(sorted((done / "runs").glob("cosine--moons--1*"))))
    text = victim.read_text()
    record = json.loads(text)
    victim.write_text(json.dumps({**record, "run": {**record["run"], "id": "another"}}))
    assert main(["study", "report", str(done)]) == 2
    error = capsys.readouterr().err
    assert f"{str(victim)!r} has" in error
    assert "give the command of the study again" in error
    victim.write_text(text[: len(text) // 2])
    (done / "stacks" / "begun-10").mkdir(parents=True)
    (done / "stacks" / "begun-10" / "state.pt").write_text("without a manifest")
    capsys.readouterr()
    study(home, done)
    told = capsys.readouterr().out
    assert f"damaged and are computed again: {victim.stem}" in told
    assert told.count("its runs start again") == 1
    assert not list((done / "stacks").glob("*"))
    after = moments(done)
    assert {name for name in after if before[name] != after[name]} == {f"runs/{victim.name}"}
    assert json.loads(victim.read_text())["train"]["results"] == pytest.approx(record["train"]["results"], rel=1e-3)
    (done / "spec.yaml").write_text("command: lrlab")
    assert main(["study", "report", str(done)]) == 2
    study(home, done, status=2)
    error = capsys.readouterr().err
    assert f"{str(done / 'spec.yaml')!r} is damaged" in error
    assert "and no readable spec.yaml. Hint: give another folder" in error


# --- stopped ---------------------------------------------------------------------------------------------------------

LONG = {"base": {**BASE, "max_train_steps": 60}, "datasets": ["dino"], "seeds": 2}


@pytest.fixture(scope="module")
def undisturbed(home):
    """The longer study, not stopped, by each executor."""
    return {
        executor: study(home, home / f"undisturbed-{executor}", f"--executor={executor}", **LONG)
        for executor in ("stacked", "local")
    }


# executor, what to wait for: in the middle of training, and in the middle of measuring.
MOMENTS = [
    ("stacked", "stacks/[!.]*"),
    ("stacked", "runs/[!.]*.json"),
    ("local", "runs/[!.]*.json"),
]


@pytest.mark.slow
@rows(("executor", "pattern"), MOMENTS)
def test_killed_and_started_again(home, undisturbed, tmp_path, executor, pattern):
    out = tmp_path / "out"
    with started(home, out, f"--executor={executor}", **LONG) as process:
        wait_for(lambda: any(out.glob(pattern)), process)
        process.kill()
        process.wait()
    assert len(records(out)) < 4
    assert not (out / "summary.json").exists()
    before = {name: moment for name, moment in moments(out).items() if name.startswith("runs/")}
    (out / "runs").mkdir(exist_ok=True)
    (out / "runs" / ".tmp-lrlab-1-constant.json").write_text("{")  # as of a process that was killed while it wrote
    with counted_updates() as updates:
        study(home, out, f"--executor={executor}", **LONG)
    assert_same_but_for_times(undisturbed[executor], out)
    assert before.items() <= moments(out).items()
    if (executor, pattern) == ("stacked", "runs/[!.]*.json"):
        assert not updates
    else:
        in_full = 60 * (min(4, torch.get_num_threads()) if executor == "stacked" else 4)
        assert 0 < len(updates) < in_full
    assert not list(out.rglob(".tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "pattern", "number", "status"),
    [
        ("stacked", "stacks/[!.]*", signal.SIGINT, 130),
        ("local", "local/*/checkpoint-*", signal.SIGTERM, 143),
    ],
)
def test_stopped_by_a_signal_while_another_waits(home, undisturbed, tmp_path, capsys, executor, pattern, number, status):
    out = tmp_path / "out"
    with started(home, out, f"--executor={executor}", **LONG) as process:
        wait_for(lambda: any(out.glob(pattern)), process)
        # Meanwhile somebody else wants to write there.
        os.kill(process.pid, signal.SIGSTOP)
        before = contents(out)
        study(home, out, status=2, **LONG)
        assert "is being written by another process" in capsys.readouterr().err
        assert main(["study", "report", str(out)]) == 2
        capsys.readouterr()
        assert contents(out) == before
        os.kill(process.pid, signal.SIGCONT)
        process.send_signal(number)
        _, error = process.communicate(timeout=240)
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert "The same command resumes the study" in error
    assert str(out) in error
    assert not (out / ".lock").exists()
    study(home, out, f"--executor={executor}", **LONG)
    assert_same_but_for_times(undisturbed[executor], out)


def test_a_disk_that_is_full_when_a_result_is_written(home, tmp_path, capsys, monkeypatch):
    """The weights fit, the result does not; what was trained is not lost."""
    out = tmp_path / "out"

    def full_write(folder, record):
        with full_disk_explained(folder.path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StudyFolder, "write", full_write)
    study(home, out, "--executor=stacked", status=2, **ONE)
    assert "No room to write" in capsys.readouterr().err
    assert list(out.glob("stacks/*/state.pt"))
    monkeypatch.undo()
    again = shutil.copytree(out, tmp_path / "again")
    with counted_updates() as updates:
        study(home, out, "--executor=stacked", **ONE)
    assert not updates
    assert len(records(out)) == 2

    # A worker is about to read the states when another one has replaced them.
    from_file = torch.UntypedStorage.from_file

    def replaced(*args):
        shutil.rmtree(again / "stacks", ignore_errors=True)
        return from_file(*args)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    study(home, again, "--executor=stacked", **ONE)
    assert len(records(again)) == 2
