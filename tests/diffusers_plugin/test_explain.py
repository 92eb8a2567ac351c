"""What the launcher tells of a script from its text: what each option acts on, and what the script does wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffusers_lrlab.diffusers_plugin.explain import explain, recognisers
from diffusers_lrlab.diffusers_plugin.script.source import HostScript

SCRIPTS = Path(__file__).parents[1] / "scripts"
RESUMES = "resume_step = args.resume_from_checkpoint\n"


def script_of(folder, text):
    (folder / "script.py").write_text(RESUMES + text)
    return HostScript(str(folder / "script.py"))


DRAW = "torch.randint(0, scheduler.config.num_train_timesteps, (bsz,))"


@pytest.mark.parametrize(
    "draw", [f"t = {DRAW}.repeat(2)", f"t = {DRAW}\nt = t.long().repeat(2)", f"t = {DRAW}\nt = t.repeat(2)"]
)
def test_two_losses_of_one_timestep_are_not_promised(tmp_path, draw):
    """As of the two images of a preference, in research_projects/diffusion_dpo."""
    text = f"{draw}\nlosses = F.mse_loss(prediction, target, reduction='none').chunk(2)\n"
    found = explain(script_of(tmp_path, text))
    not_here = [line.split()[0] for line in found.splitlines() if "uses each timestep for several images" in line]
    assert not_here == ["--loss_weighting", "--log_timesteps"]
    assert "--timestep_sampler  torch.randint draws" in found


@pytest.mark.parametrize(("name", "expected"), [("ddpm", ["--ema"]), ("flow", ["--log_timesteps", "--ema"])])
def test_scripts_of_both_forms_are_recognised(name, expected):
    """They save no weights, and one does not show the losses of images."""
    text = explain(HostScript(str(SCRIPTS / f"{name}_script.py")))
    not_here = [line.split()[0] for line in text.splitlines() if "not here" in line]
    assert not_here == expected
    assert all(f"  {option} " in text for option in recognisers())


def test_a_script_that_does_none_of_it(tmp_path):
    text = explain(script_of(tmp_path, "print('hello')"))
    assert text.count("not here: it ") == len(recognisers()) - 1  # --lr_scheduler acts in modules, too
    assert "has no known fault" in text


@pytest.mark.slow
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
