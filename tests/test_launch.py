"""Unmodified scripts under `diffusers_lrlab.launch`, in this process and in real ones."""

import contextlib
import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import started
from launched_here import launch_here
from runs import environment
from tables import cases

from diffusers_lrlab import lr_curve
from diffusers_lrlab.schedules.expected import schedule_curves
from diffusers_lrlab.schedules.schedule import resolve_schedule

HOST_SCRIPT = Path(__file__).parent / "scripts" / "host_script.py"
LR, BETA1, WARMUP = 1e-3, 0.95, 2
SCHEDULES = [
    "rex",
    "warmup_stable_decay:num_decay_steps=0.5,decay_type=1-sqrt",
    "mdlrc",
    "join:schedules=[constant|rex:d=0.9],boundaries=[0.5]",
]


def launch(script, *arguments, options=(), processes=1, expect=0):
    """Runs a script under the launcher, in this process if it is one; returns what it wrote to stderr."""
    if processes == 1:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
            status = launch_here(script, *arguments, options=options)
        stdout, stderr = out.getvalue(), error.getvalue()
    else:
        env = {**environment(), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        command = ["-m", "diffusers_lrlab.launch", *options, script, *arguments]
        status, stdout, stderr = started.run_ranks(*command, processes=processes, env=env)
    assert status == expect, stdout[-2000:] + stderr[-4000:]
    return stderr


def host_run(tmp_path, *arguments, accumulation=1, **how):
    """A run of the script of our own; returns its rows and stderr."""
    accumulating = f"--gradient_accumulation_steps={accumulation}"
    stderr = launch(HOST_SCRIPT, f"--output_dir={tmp_path}", accumulating, *arguments, **how)
    rows = json.loads((tmp_path / "rows.json").read_text()) if (tmp_path / "rows.json").exists() else []
    return rows, stderr


def promised(spec, num_updates):
    return schedule_curves(resolve_schedule(spec), LR, BETA1, WARMUP, num_updates)


# 64 examples in batches of 4, three epochs.
@pytest.mark.parametrize(
    ("spec", "processes", "accumulation", "num_updates"),
    [
        (SCHEDULES[0], 1, 4, 12),
        (SCHEDULES[1], 2, 1, 24),
        (SCHEDULES[2], 2, 4, 6),
        (SCHEDULES[3], 1, 1, 48),
    ],
)
def test_with_the_clock_fixed_the_curve_is_the_promised_one(tmp_path, spec, processes, accumulation, num_updates):
    rows, stderr = host_run(
        tmp_path, f"--lr_scheduler={spec}", options=["--fix_lr_clock"], processes=processes, accumulation=accumulation
    )
    lrs, momenta = promised(spec, num_updates)
    assert [row["update"] for row in rows] == list(range(num_updates))
    np.testing.assert_allclose([row["lr"] for row in rows], lrs, rtol=1e-12, atol=1e-18)
    np.testing.assert_allclose([row["beta1"] for row in rows], momenta, rtol=1e-12)
    # What such a script logs is the rate of the next update.
    np.testing.assert_allclose([row["logged"] for row in rows][:-1], lrs[1:], rtol=1e-12, atol=1e-18)
    assert f"now takes {num_updates} updates, 2 of them warm-up" in stderr
    assert f"LR audit: {num_updates} updates, every value that follows the clock was as expected" in stderr


@pytest.mark.parametrize("spec", ["rex", "cosine"])
def test_without_it_the_deviation_is_told_before_and_after(tmp_path, spec):
    rows, stderr = host_run(tmp_path, f"--lr_scheduler={spec}", accumulation=4)
    # The script counts 48 micro-batches and 8 of warm-up; accelerate steps once per update.
    expected = lr_curve(spec, LR, 8, 48)[:12]
    np.testing.assert_allclose([row["lr"] for row in rows], expected, rtol=1e-12)
    asked = lr_curve(spec, LR, 2, 12)
    assert "this script does 12 updates" in stderr
    assert f"{expected[-1]:.4g} at the last update instead of {asked[-1]:.4g}" in stderr
    assert "highest at update 8 instead of 2" in stderr
    assert f"off by up to {np.abs(expected - asked).max() / LR:.3g} of its peak" in stderr


def test_strict_stops_before_the_first_update(tmp_path):
    rows, stderr = host_run(tmp_path, "--lr_scheduler=rex", accumulation=4, options=["--strict_lr_audit"], expect=2)
    assert not rows
    assert "error: --strict_lr_audit: this script does 12 updates" in stderr


def test_resumed_scripts_are_audited_from_where_they_go_on(tmp_path):
    how = {"accumulation": 4, "options": ["--fix_lr_clock", "--strict_lr_audit"]}
    host_run(tmp_path, "--lr_scheduler=mdlrc", "--stop_after=5", **how)
    rows, stderr = host_run(tmp_path, "--lr_scheduler=mdlrc", "--resume", **how)
    lrs, momenta = promised("mdlrc", 12)
    np.testing.assert_allclose([row["lr"] for row in rows], lrs[5:], rtol=1e-12)
    np.testing.assert_allclose([row["beta1"] for row in rows], momenta[5:], rtol=1e-12)
    assert "LR audit: 7 updates, every value" in stderr


def test_max_train_steps_and_num_updates_set_the_length(tmp_path):
    rows, _ = host_run(tmp_path, "--lr_scheduler=rex", "--max_train_steps=9", options=["--fix_lr_clock"])
    np.testing.assert_allclose([row["lr"] for row in rows], lr_curve("rex", LR, 2, 9), rtol=1e-12)
    rows, _ = host_run(tmp_path, "--lr_scheduler=rex", options=["--fix_lr_clock", "--num_updates=96"])
    np.testing.assert_allclose([row["lr"] for row in rows], lr_curve("rex", LR, 2, 96)[:48], rtol=1e-12)


def changed_host_script(folder, *changes):
    """The script of our own with other lines in place of some of its own."""
    text = HOST_SCRIPT.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "script.py").write_text(text)
    return folder / "script.py"


MAKE_LOADER = "    loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=args.train_batch_size)\n"


def test_images_of_a_class_that_are_made_first_are_no_training_data(tmp_path):
    """As in the scripts of DreamBooth, which prepare a loader of prompts before they train."""
    prompts = "    for _ in accelerator.prepare(torch.utils.data.DataLoader(list(range(5)), batch_size=4)):\n        pass\n"
    script = changed_host_script(tmp_path, (MAKE_LOADER, prompts + MAKE_LOADER))
    stderr = launch(
        script, f"--output_dir={tmp_path}", "--lr_scheduler=cosine", options=["--fix_lr_clock", "--strict_lr_audit"]
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    np.testing.assert_allclose([row["lr"] for row in rows], promised("cosine", 48)[0], rtol=1e-12, atol=1e-18)
    assert "LR audit: 48 updates, every value that follows the clock was as expected" in stderr


def test_another_length_than_the_expected_one_is_reported(tmp_path):
    _, stderr = host_run(tmp_path, "--lr_scheduler=rex", options=["--num_updates=40"])
    assert "The script did 48 updates instead of the expected 40" in stderr
    options = ["--num_updates=40", "--fix_lr_clock", "--strict_lr_audit"]
    _, stderr = host_run(tmp_path, "--lr_scheduler=rex", options=options, expect=2)
    assert "error: --strict_lr_audit: the script continues after 40 updates" in stderr


FIX = ("--fix_lr_clock",)


@pytest.mark.parametrize(
    ("first", "then", "processes"),
    [
        (("cosine", ()), ("cosine", FIX), 1),
        (("cosine", ()), ("rex", FIX), 2),
        (("rex", FIX), ("cosine", ()), 2),
    ],
)
def test_a_checkpoint_of_another_schedule_or_clock(tmp_path, first, then, processes):
    how = {"accumulation": 2, "processes": processes}
    stopped, num_updates = 5, 48 // 2 // processes
    host_run(tmp_path, f"--lr_scheduler={first[0]}", f"--stop_after={stopped}", options=first[1], **how)
    rows, stderr = host_run(tmp_path, f"--lr_scheduler={then[0]}", "--resume", options=then[1], **how)
    assert f"From update {stopped} on, the learning rate follows {then[0]}" in stderr
    if then[1]:
        expected = promised(then[0], num_updates)[0]
    else:  # the script's own clock: micro-batches of one process, a step for each process at every update
        expected = schedule_curves(resolve_schedule(then[0]), LR, BETA1, 4, 48)[0][::processes][:num_updates]
    np.testing.assert_allclose([row["lr"] for row in rows], expected[stopped:], rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize(("options", "status"), [((), 0), (FIX, 2), (("--strict_lr_audit",), 2)])
def test_a_schedule_that_is_made_elsewhere_is_reported_before_training(tmp_path, options, status):
    """transformers' `get_scheduler`, in train_llada2.py; a constructor of diffusers, in the one of Cosmos."""
    elsewhere = "from transformers import get_scheduler"
    script = changed_host_script(tmp_path, ("from diffusers.optimization import get_scheduler", elsewhere))
    stderr = launch(script, f"--output_dir={tmp_path}", "--lr_scheduler=cosine", options=options, expect=status)
    assert "akes its LambdaLR without diffusers.optimization.get_scheduler" in stderr
    assert (tmp_path / "rows.json").exists() == (status == 0)


CHOICES = ', choices=["linear", "cosine", "constant"]'
HINT = "Hint: options of the launcher (--ema, --strict) go before the script's name."
# Options of the launcher and the script's arguments, and what the error says.
REFUSED = [
    ("", "--lr_scheduler=rexx", "argument --lr_scheduler: Unknown learning-rate schedule 'rexx'. Did you mean 'rex'?"),
    ("", "--lr_scheduler=rex:e=1", "'rex' does not take 'e'"),
    ("--fix_lr_clock", "--lr_scheduler=rex --lr_warmup_steps=48", "does not fit into"),
    ("", "--lr_scheduler=one_cycle:pct_start=0.2", "both set the length of the rise"),
    ("--fix_clock", "", "Unknown argument '--fix_clock' before the script's name. Did you mean '--fix_lr_clock'?"),
    ("--num_warmup_steps -1e-4", "", "--num_warmup_steps -0.0001"),
    ("", "--ema warmup_power --strict", HINT),
    ("", "--emma", "unrecognized arguments: --emma\n"),
]


@cases(("options", "arguments", "message"), REFUSED)
def test_what_is_refused_before_anything_is_loaded(tmp_path, capsys, options, arguments, message):
    """Most of diffusers' scripts have no choices: their schedules are made after models were loaded and data read."""
    script = changed_host_script(tmp_path, (CHOICES, ""), ("    torch.manual_seed(0)\n", "    print('loads')\n"))
    assert launch_here(script, f"--output_dir={tmp_path}", *arguments.split(), options=options.split()) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert ("loads" in out) == ("rise" in message or "fit" in message)  # which need the length of the run
    assert ("Hint: options" in error) == (message is HINT)


def test_a_script_that_is_not_there(capsys):
    assert launch_here("nowhere.py") == 2
    error = capsys.readouterr().err
    assert "error: Cannot read the script 'nowhere.py'" in error
    assert "LR audit" not in error


def test_a_script_may_have_schedules_of_its_own(tmp_path):
    own = "def get_scheduler(name, optimizer, **_):\n    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)\n"
    script = changed_host_script(tmp_path, (CHOICES, ""), ("from diffusers.optimization import get_scheduler\n", own))
    launch(script, f"--output_dir={tmp_path}", "--lr_scheduler=bumpy")


def test_a_script_may_handle_names_that_diffusers_lacks(tmp_path, capsys):
    """And its option may be a switch, which has no type."""
    for option, given, expected in (("", "=none", "'none'"), (", action='store_true'", "", "True")):
        (tmp_path / "script.py").write_text(
            "import argparse\nfrom diffusers.optimization import get_scheduler\nparser = argparse.ArgumentParser()\n"
            f"parser.add_argument('--lr_scheduler', default='constant'{option})\nchosen = parser.parse_args().lr_scheduler\n"
            "print('chosen', repr(chosen), chosen == 'none')\n"
        )
        assert launch_here(tmp_path / "script.py", f"--lr_scheduler{given}") == 0
        assert capsys.readouterr().out.startswith(f"chosen {expected}")


def test_the_traceback_is_the_scripts_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def main():\n    raise RuntimeError('failed on purpose')\n\n\nmain()\n")
    stderr = launch(script, expect=1)
    direct = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr
    assert stderr[stderr.index("Traceback") :].partition("diffusers_lrlab: ")[0] == direct


def test_a_script_whose_own_training_was_stopped_has_no_traceback(tmp_path):
    stopped = (
        "from pathlib import Path; from diffusers_lrlab.core.errors import Interrupted; raise Interrupted(15, Path('c-1'))"
    )
    (tmp_path / "script.py").write_text(stopped)
    stderr = launch(tmp_path / "script.py", expect=143)
    assert "Stopped by SIGTERM" in stderr
    assert "Traceback" not in stderr


PREPARE = "model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)"


@pytest.mark.parametrize(
    "instead",
    [
        "lr_scheduler = accelerator.prepare_scheduler(lr_scheduler)\n"
        "    model, optimizer = accelerator.prepare(model, optimizer)",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    ],
    ids=["by itself and before the data", "never"],
)
def test_a_scheduler_that_is_not_prepared_with_the_rest(tmp_path, instead):
    script = changed_host_script(tmp_path, (PREPARE, instead))
    arguments = [f"--output_dir={tmp_path}", "--gradient_accumulation_steps=4", "--lr_scheduler=rex", "--max_train_steps=9"]
    stderr = launch(script, *arguments, options=["--fix_lr_clock", "--strict_lr_audit"])
    rows = json.loads((tmp_path / "rows.json").read_text())
    expected = lr_curve("rex", LR, 2, 9)
    np.testing.assert_allclose([row["lr"] for row in rows], expected, rtol=1e-12, atol=1e-18)
    np.testing.assert_allclose([row["logged"] for row in rows][:-1], expected[1:], rtol=1e-12, atol=1e-18)
    assert "rex: LR audit: 9 updates, every value" in stderr


def test_the_script_finds_itself_as_if_started_directly(tmp_path):
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import pickle, sys
            import sibling

            class Here:
                pass

            print(__name__, __file__, sys.argv, sys.path[0], sibling.NAME, sys.modules["__main__"].Here is Here, __doc__)
            assert type(pickle.loads(pickle.dumps(Here()))) is Here
            sys.exit(3)
            """
        )
    )
    how = {"cwd": tmp_path, "env": environment()}
    status, shown, _ = started.run("-m", "diffusers_lrlab.launch", "script.py", "a", "--b", **how)
    direct = subprocess.run([sys.executable, "script.py", "a", "--b"], capture_output=True, text=True, check=False, **how)
    assert (status, shown) == (direct.returncode, direct.stdout)
    assert status == 3


def test_spawned_processes_import_this_package(tmp_path):
    """Which is why they know the names, as programs do that import it before diffusers."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import sys

            def is_there(name):
                return name in sys.modules

            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(is_there, ["diffusers_lrlab", "torch"]))
            """
        )
    )
    _, shown, error = started.run("-m", "diffusers_lrlab.launch", script, env=environment())
    assert shown.strip() == "[True, False]", error
