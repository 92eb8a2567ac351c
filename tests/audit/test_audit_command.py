"""`lrlab audit` and `python -m diffusers_lrlab.audit`, in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lrlab_command import lrlab
from runs import environment

PROGRAM = """
import hashlib, os, sys, time, torch
torch.manual_seed(0)
rank = int(os.environ.get("RANK", 0))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for update in range(40):
    for _ in range(2):
        (model(torch.randn(8, 4)).square().mean() / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if sys.argv[1:] == ["wait"] and update == 10:
        open("ready", "w").close()
        time.sleep(100)
weights = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
print(weights, torch.rand(1).item(), __name__, sys.argv[1:], sys.path[0], "diffusers_lrlab" in sys.modules)
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""
AUDIT = [sys.executable, "-m", "diffusers_lrlab.cli.main", "audit"]

pytestmark = pytest.mark.slow  # they import torch


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def run(command, folder, expect=0, **env):
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**environment(), **env}, timeout=300)
    assert done.returncode == expect, done.stderr
    return done.stdout, done.stderr


def result(folder):
    return json.loads((folder / "lr_audit.json").read_text())


def test_the_program_runs_as_it_does_alone(folder):
    """To the bit, as a script and as a module, with a `sitecustomize` of its environment."""
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("print('own sitecustomize')\n")
    path = {"PYTHONPATH": os.pathsep.join([str(folder / "own"), environment().get("PYTHONPATH", "")])}
    for program in (["train.py"], ["-m", "train"]):
        alone, _ = run([sys.executable, *program], folder, **path)
        audited, stderr = run([*AUDIT, "--", sys.executable, *program], folder, **path)
        assert audited == f"own sitecustomize\n{alone}"  # of the command itself, too
        assert alone.startswith("own sitecustomize\n")
    assert stderr.splitlines()[0] == "LR audit: AdamW (CosineAnnealingLR), 40 updates, 2 backward passes each."
    assert stderr.splitlines()[-1] == "Wrote lr_audit.png and lr_audit.json."
    assert (folder / "lr_audit.png").stat().st_size > 1000
    (optimizer,) = result(folder)["optimizers"]
    assert result(folder)["version"] == 1
    assert len(optimizer["groups"][0]["lr"]) == len(optimizer["backward_passes"]) == 40


def test_an_expectation_and_the_status_of_the_program(folder):
    own = ["--", sys.executable, "train.py"]
    _, stderr = run([*AUDIT, "--expect", "cosine", *own], folder)
    assert "Expected cosine: every update was as expected." in stderr
    _, stderr = run([*AUDIT, "--expect", "linear", *own], folder, expect=1)
    assert "Expected linear: NOT as expected from update 1 on" in stderr
    assert result(folder)["as_expected"] is False
    run([*AUDIT, "--expect", "linear", *own, "3"], folder, expect=3)
    _, stderr = run([*AUDIT, "--expect", "cosine", "--", sys.executable, "-c", "pass"], folder, expect=1)
    assert "nothing was recorded" in stderr
    _, stderr = run([*AUDIT, "--", sys.executable, "-c", "import torch"], folder)
    assert "The program made no torch optimizer and had 0 backward passes." in stderr


def test_launchers_pass_the_recorder_on(folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    stdout, stderr = run([*AUDIT, "--expect=cosine", "--", *torchrun, "train.py"], folder)
    assert stdout.count("__main__") == 2
    assert stderr.count("LR audit: AdamW") == 1
    assert "Expected cosine: every update was as expected." in stderr
    assert result(folder)["num_processes"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_program_leaves_the_audit_of_what_ran(folder, number):
    command = [*AUDIT, "--", sys.executable, "train.py", "wait"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (folder / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, number)
    elif number == signal.SIGTERM:
        process.send_signal(number)
    else:  # as the system does if memory is full
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "11 updates" in stderr
    assert f"The program ended with status {128 + number}; this is the audit of what ran." in stderr
    assert result(folder)["optimizers"][0]["num_updates"] == 11


def test_wrong_input_is_refused_before_the_program_starts(tmp_path):
    (tmp_path / "file").touch()
    script = tmp_path / "script"
    script.write_text("echo\n")
    script.chmod(0o755)
    for arguments, text in (
        ([], "Which program?"),
        (["train.py"], "Hint: lrlab audit -- python train.py"),
        (["--", "no-such-program"], "'no-such-program' cannot be started: No such file or directory."),
        (["--", str(script)], f"Hint: for a script, `lrlab audit -- python {script} ...`"),
        (["--num_updates=3", "--", "true"], "--num_updates has no effect without --expect"),
        (["--expect=reduce_lr_on_plateau", "--", "true"], "follows a loss"),
        (["--expect=cosine", "--num_updates=0", "--", "true"], "--num_updates 0: must be a whole number"),
        ([f"--out={tmp_path / 'file'}", "--", "true"], "must be a folder that can be written to, got: File exists."),
    ):
        assert text in lrlab("audit", f"--out={tmp_path}", *arguments, status=2)
