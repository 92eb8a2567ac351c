"""The learning rate range test on the updates of a third-party script."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import started
import torch
from hosts import HAS_TRAINING
from launched_here import script_of
from runs import environment
from test_launch import launch

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.hooks.find_lr import FindLrHook
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.finder.find import ScriptTest
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.finder.result import minimum_tenth

SCRIPT = Path(__file__).parents[2] / "scripts" / "two_models_script.py"


def find(folder, *arguments, processes=1):
    """What was found, and everything that lies in the script's folder afterwards."""
    command = ["-m", "diffusers_lrlab.launch", "--find_lr", *arguments, f"--output_dir={folder}"]
    env = {**environment(), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    folder.mkdir()
    if processes == 1:
        status, stdout, stderr = started.run(*command, env=env | {"TMPDIR": str(folder)})
    else:
        status, stdout, stderr = started.run_ranks(*command, processes=processes, env=env)
    assert status == 0, stdout[-2000:] + stderr[-3000:]
    found = json.loads((folder / "lrlab" / "lr_finder.json").read_text())
    return found, sorted(path.name for path in folder.rglob("*")), stdout, stderr


def losses_by_hand(lrs):
    """The script's own updates, at these rates."""
    torch.manual_seed(0)
    text_encoder = torch.nn.Linear(3, 4)
    unet = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    groups = [{"params": unet.parameters()}, {"params": text_encoder.parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99), weight_decay=1e-2, eps=1e-7)
    batches = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).split(4)
    losses = []
    for update, lr in enumerate(lrs):
        batch = batches[update % 16]
        loss = torch.nn.functional.mse_loss(unet(text_encoder(batch)), batch.roll(1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*unet.parameters(), *text_encoder.parameters()], 0.5)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = lr, lr / 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_and_the_suggestion_are_those_of_the_finder(tmp_path):
    """Groups keep the ratios of their rates; of checkpoints, trackers and files of the script nothing stays."""
    arguments = ["--fix_lr_clock", str(SCRIPT), "--checkpointing_steps=5", "--report_to=tensorboard"]
    found, files, stdout, stderr = find(tmp_path / "run", *arguments)
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    (sweep,) = found["sweeps"]
    lrs = FinderConfig(start_lr=1e-7, end_lr=1e-2).lrs()
    np.testing.assert_array_equal(sweep["lrs"], lrs[: len(sweep["lrs"])])
    assert len(sweep["lrs"]) >= 200
    np.testing.assert_allclose(sweep["losses"], losses_by_hand(sweep["lrs"]), rtol=1e-5)
    assert found["suggestion"]["lr"] == minimum_tenth(sweep["lrs"], sweep["losses"]).lr
    assert found["suggestion"].keys() == {"lr", "reason", "interval"}
    assert "1 test from 1e-07 to 0.01 in 200 updates" in stdout
    assert f"Wrote {tmp_path / 'run' / 'lrlab'}/lr_finder.json and .png; the test left no other" in stdout
    assert "--find_lr does not train: --fix_lr_clock has no effect on the test." in stderr
    assert "LR audit" not in stderr


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    """Each sees half of the batches; both stop at the same update."""
    arguments = ["--optimizer=lion", str(SCRIPT), "--gradient_accumulation_steps=2"]
    found, files, _, _ = find(tmp_path / "run", *arguments, processes=2)
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    assert found["settings"]["end_lr"] == 2e-3
    assert found["sweeps"][0]["num_updates"] >= 200


@pytest.mark.skipif(not HAS_TRAINING, reason="--find_lr needs diffusers_lrlab[train]")
@pytest.mark.parametrize(
    ("first", "arguments", "message"),
    [
        ("", ["--resume_from_checkpoint=latest"], "Remove --resume_from_checkpoint."),
        ("", ["--learning_rate=0"], "all learning rates of the script are 0"),
        ("import sys\nsys.exit(0)\n", [], "--find_lr: the script ended before its first update"),
    ],
    ids=["resume", "no_rate", "exits"],
)
def test_what_is_refused(tmp_path, first, arguments, message):
    (tmp_path / "script.py").write_text(first + SCRIPT.read_text())
    output = tmp_path / "out"
    assert message in launch(tmp_path / "script.py", f"--output_dir={output}", *arguments, options=["--find_lr"], expect=2)
    assert not output.exists()


def test_what_is_refused_before_the_script_starts(tmp_path):
    script = script_of(tmp_path, "optimizer = SGD(p, lr=1)\nloss.mean()\n")
    with pytest.raises(LabError, match=r"--find_lr cannot be used in this script: it does not call accelerator.backward"):
        FindLrHook(script, HostRun(), ScriptTest())


def test_a_script_that_ends_before_its_test():
    assert ScriptTest("sgd").lr == pytest.approx(1e-5)
    test = ScriptTest()
    test.add(1.0)
    assert test.result().sweeps[0].ended == "the script ended after 1 of 200 updates"


@pytest.mark.slow
def test_what_is_said(tmp_path, capsys):
    """In terms of the script's option, where the optimizer's rate is a multiple of it (--scale_lr)."""

    def loss(lr):
        x = np.log10(lr)
        return 1 - 0.6 / (1 + np.exp(-3 * (x + 4.5))) + 10 ** (2 * (x + 2.2))

    test, ended = ScriptTest(), []
    while test.add(loss(test.lr)):
        pass
    hook = SimpleNamespace(run=SimpleNamespace(lab_folder=tmp_path / "lrlab"), lr_per_option=4.0)
    hook.end = lambda: ended.append(True)
    test.finish(hook)
    lr = test.result().lr
    assert 1e-5 < lr < 1e-3
    assert f"start the script without --find_lr and with --learning_rate {lr / 4:.2g}." in capsys.readouterr().out
    assert ended
    test = ScriptTest(num_updates=20)
    assert len(test.lrs) == 27
    while test.add(1 + 0.5 * (-1) ** test.done):
        pass
    test.finish(hook)
    said = capsys.readouterr().out
    assert "the loss does not fall between 1e-07 and" in said
