"""What the launcher tells of a script from its text: what each option acts on, and what the script does wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffusers_lrlab.diffusers_plugin.explain import RECOGNISED, explain, faults
from diffusers_lrlab.diffusers_plugin.host_script import HostScript

SCRIPTS = Path(__file__).parents[1] / "scripts"
RESUMES = "resume_step = args.resume_from_checkpoint\n"


def script_of(folder, text):
    (folder / "script.py").write_text(RESUMES + text)
    return HostScript(str(folder / "script.py"))


def made(warmup, length, more=""):
    return f"{more}\nget_scheduler(name, num_warmup_steps={warmup}, num_training_steps={length})"


BY_PROCESSES = ("args.lr_warmup_steps * accelerator.num_processes", "args.max_train_steps * accelerator.num_processes")
FILTER = "layers = filter(lambda p: p.requires_grad, unet.parameters())"
LENGTH = "num_training_steps_for_scheduler"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            made(f"args.lr_warmup_steps * {'args.gradient_accumulation_steps'}", "len(train_dataloader)"),
            ["LR: accumulation"],
        ),
        (made("num_warmup_steps_for_scheduler", LENGTH), []),
        (made("num_warmup_steps_for_scheduler", LENGTH, "Accelerator(split_batches=True)"), ["LR: processes"]),
        (made(*BY_PROCESSES), ["LR: epochs"]),
        (made(*BY_PROCESSES, f"{LENGTH} = 3"), ["LR: epochs"]),
        (made("args.lr_warmup_steps", "args.max_train_steps"), ["LR: processes"]),
        (made("args.lr_warmup_steps", "args.max_train_steps", "Accelerator(split_batches=True)"), []),
        ("from transformers import get_scheduler\n" + made(*BY_PROCESSES), []),
        ("mse_loss_weights = base_weight + 1", ["weights"]),
        (f"{FILTER}\nclip_grad_norm_(layers, 1.0)", ["clipping"]),
        (f"{FILTER}\nparams_to_clip = layers\naccelerator.clip_grad_norm_(params_to_clip, 1.0)", ["clipping"]),
        (f"layers = list({FILTER.split(' = ')[1]})\nclip_grad_norm_(layers, 1.0)", []),
        (f"{FILTER}\nlayers = list(layers)\nclip_grad_norm_(layers, 1.0)", []),
        ("clip_grad_norm_(unet.parameters(), 1.0)\nclip_grad_norm_()", []),
    ],
)
def test_faults(tmp_path, text, names):
    assert [fault.name for fault in faults(script_of(tmp_path, text))] == names


def test_faults_at_a_resume(tmp_path):
    for text, names in ((RESUMES, []), ("first = args.resume_from_checkpoint", ["resume: data"]), ("", ["no resume"])):
        (tmp_path / "script.py").write_text(text)
        assert [fault.name for fault in faults(HostScript(str(tmp_path / "script.py")))] == names


@pytest.mark.parametrize("name", ["ddpm", "flow"])
def test_scripts_of_both_forms_are_recognised(name):
    text = explain(HostScript(str(SCRIPTS / f"{name}_script.py")))
    not_here = [line.split()[0] for line in text.splitlines() if "not here" in line]
    assert not_here == ["--ema", "--exact_resume"]  # they save no weights, and write no checkpoints
    assert all(f"  {option} " in text for option in RECOGNISED)


def test_a_script_that_does_none_of_it(tmp_path):
    text = explain(script_of(tmp_path, "print('hello')"))
    assert text.count("not here: it ") == len(RECOGNISED)
    assert "does nothing that is known to be wrong" in text


def test_explaining_runs_nothing(tmp_path):
    """From the command line, with the script's own arguments behind its name."""
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    command = [sys.executable, "-m", "diffusers_lrlab.launch", "--explain", str(tmp_path / "script.py"), "--its=own"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(tmp_path / "script.py"))
    command[4] = "nowhere.py"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Cannot read the script 'nowhere.py'" in done.stderr
