"""The learning rate range test on the updates of a third-party script."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import started
import torch
from diffusers import DDPMScheduler
from runs import environment
from test_launch import launch
from test_validation_hook import SCRIPTS, loss_by_hand, model_and_data

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.streams import split_rows
from diffusers_lrlab.diffusers_plugin.hooks.find_lr import FindLrHook, recognise
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.finder.script_test import ScriptTest
from diffusers_lrlab.finder.suggestions import RULES

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
def test_losses_and_rules_are_those_of_the_finder(tmp_path):
    """Groups keep the ratios of their rates; of checkpoints, trackers and files of the script nothing stays."""
    arguments = ["--fix_lr_clock", str(SCRIPT), "--checkpointing_steps=5", "--report_to=tensorboard"]
    found, files, stdout, stderr = find(tmp_path / "run", *arguments)
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    (sweep,) = found["sweeps"]
    lrs = FinderConfig(mode="classic", start_lr=1e-7, end_lr=1e-2).lrs()
    np.testing.assert_array_equal(sweep["lrs"], lrs[: len(sweep["lrs"])])
    assert len(sweep["lrs"]) >= 200
    np.testing.assert_allclose(sweep["losses"], losses_by_hand(sweep["lrs"]), rtol=1e-5)
    for name, rule in RULES.items():
        assert found["suggestions"][name]["lr"] == rule(sweep["lrs"], sweep["losses"]).lr
        assert found["suggestions"][name].keys() == {"lr", "reason", "interval"}
    assert "1 test from 1e-07 to 0.01 in 200 updates" in stdout
    assert f"Wrote {tmp_path / 'run' / 'lrlab'}/lr_finder.json and .png; the test left no other" in stdout
    assert "--find_lr does not train: --fix_lr_clock has no effect on the test." in stderr
    assert "LR audit" not in stderr


def held_out_losses_by_hand(lrs, num_held_out, draws):
    """Of `ddpm_script.py`, which trains on the other rows: before its first update, and after one at each of these rates."""
    model, data = model_and_data()
    held_out, trained = split_rows(2048, num_held_out)
    scheduler, optimizer = DDPMScheduler(num_train_timesteps=1000), torch.optim.AdamW(model.parameters())
    torch.empty((), dtype=torch.int64).random_()  # its loader draws a seed for its workers
    losses = [loss_by_hand(model, data[held_out], draws=draws)]
    for lr, images in zip(lrs, data[trained].split(8), strict=False):
        noise, timesteps = torch.randn_like(images), torch.randint(0, 1000, (len(images),))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(scheduler.add_noise(images, noise, timesteps)), noise).backward()
        torch.rand(1)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        losses.append(loss_by_hand(model, data[held_out], draws=draws))
    return losses


@pytest.mark.slow
def test_losses_of_held_out_rows(tmp_path):
    """
    Of one row, with 64 draws of timesteps and noise that are always the same; the training does not notice them. A test of
    20 updates reads after every second one, and after the last.
    """
    options = [
        "--validation_fraction=0.0005",
        "--validation_steps=5",
        "--num_updates=20",
        "--ema=constant",
        "--ema_swap=final",
    ]
    found, files, stdout, stderr = find(tmp_path / "run", *options, str(SCRIPTS["ddpm"]))
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    (sweep,) = found["sweeps"]
    lrs = FinderConfig(start_lr=1e-7, end_lr=1e-2, num_updates=20).lrs()
    assert sweep["lrs"][0] == pytest.approx(lrs[0] ** 2 / lrs[1])
    done = sorted({*range(2, sweep["num_updates"] + 1, 2), sweep["num_updates"]})
    np.testing.assert_array_equal(sweep["lrs"][1:], lrs[np.array(done) - 1])
    by_hand = np.array(held_out_losses_by_hand(lrs[: sweep["num_updates"]], 1, 64))
    np.testing.assert_allclose(sweep["losses"], by_hand[[0, *done]], rtol=1e-6)
    assert found["settings"]["mode"] == "probe"
    probe = "the loss of 1 of 2048 rows, which are not trained on, with 64 fixed draws of timesteps and noise for each"
    assert found["about"]["probe"] == probe
    assert f"Probe: {probe}." in stdout
    assert "--find_lr does not train: --ema, --ema_swap, --validation_steps has no effect on the test." in stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flow", "resume"])
def test_losses_of_held_out_rows_repeat(tmp_path, name):
    """Two tests at batch 1 are equal to the bit; in data with random numbers of their own, too. The curve is smooth."""
    options = ["--validation_fraction=0.1", str(SCRIPTS[name]), "--train_batch_size=1"]
    one, files, _, _ = find(tmp_path / "one", *options)
    other, _, _, _ = find(tmp_path / "other", *options)
    assert one["sweeps"] == other["sweeps"]
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    assert one["suggestions"]["valley"]["lr"] is not None
    losses = np.array(one["sweeps"][0]["losses"][:37])  # of 148 updates
    assert np.abs(np.diff(losses)).max() < 0.03 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("num_held_out", "draws"), [(1, 64), (3, 22)])
def test_two_processes_read_the_same(tmp_path, num_held_out, draws):
    """Also where one of them holds no row back; different readings would end the test at different updates."""
    options = [f"--validation_fraction={num_held_out / 2048}", str(SCRIPTS["ddpm"]), "--train_batch_size=4"]
    found, files, _, _ = find(tmp_path / "run", *options, processes=2)
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    model, data = model_and_data()
    held_out = split_rows(2048, num_held_out)[0]
    shares = [data[held_out[rank::2]] for rank in (0, 1)]
    sums = [len(rows) and len(rows) * loss_by_hand(model, rows, 4, draws, rank) for rank, rows in enumerate(shares)]
    assert found["sweeps"][0]["losses"][0] == pytest.approx(sum(sums) / num_held_out, rel=1e-6)
    assert found["sweeps"][0]["num_updates"] >= 200


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    """Each sees half of the batches; both stop at the same update."""
    arguments = ["--optimizer=lion", str(SCRIPT), "--gradient_accumulation_steps=2"]
    found, files, _, _ = find(tmp_path / "run", *arguments, processes=2)
    assert files == ["lr_finder.json", "lr_finder.png", "lrlab"]
    assert found["settings"]["end_lr"] == 2e-3
    assert found["sweeps"][0]["num_updates"] >= 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume_from_checkpoint=latest"], "Remove --resume_from_checkpoint."),
        (["--learning_rate=0"], "all learning rates of the script are 0"),
    ],
)
def test_what_is_refused(tmp_path, arguments, message):
    assert message in launch(SCRIPT, f"--output_dir={tmp_path}", *arguments, options=["--find_lr"], expect=2)
    assert not [*tmp_path.iterdir()]


def test_a_script_that_exits_before_its_first_update_is_an_error(tmp_path):
    (tmp_path / "script.py").write_text(f"import sys\nsys.exit(0)\n{SCRIPT.read_text()}")
    stderr = launch(tmp_path / "script.py", f"--output_dir={tmp_path / 'out'}", options=["--find_lr"], expect=2)
    assert "--find_lr: the script ended before its first update" in stderr


def test_what_is_refused_before_the_script_starts(tmp_path):
    with pytest.raises(LabError, match="'prodigy' finds its learning rate by itself"):
        ScriptTest("prodigy")
    (tmp_path / "script.py").write_text("optimizer = SGD(p, lr=1)\nloss.mean()\n")
    script = HostScript(str(tmp_path / "script.py"))
    with pytest.raises(NotRecognised, match=r"it does not call accelerator.backward"):
        recognise(script)
    with pytest.raises(LabError, match="--find_lr cannot be used in this script: it does not call"):
        FindLrHook(script, HostRun(), ScriptTest())
    reason = "its training loop does not iterate over a DataLoader"
    with pytest.raises(
        LabError, match=f"--validation_fraction cannot be used in this script: .*{reason}.*: --find_lr works"
    ):
        FindLrHook(HostScript(str(SCRIPT)), HostRun(), ScriptTest(mode="probe"), 0.1)


@pytest.mark.slow
def test_data_that_cannot_be_held_back_are_refused_before_the_first_update(tmp_path):
    options = ["--find_lr", "--validation_fraction=0.1"]
    stderr = launch(SCRIPTS["resume"], f"--output_dir={tmp_path}", "--stream", options=options, expect=2)
    assert "cannot be used in this script: its data are a stream" in stderr
    assert "--find_lr works without it, from the losses of batches." in stderr
    assert not [*tmp_path.iterdir()]


def test_a_test_that_ends_early():
    test = ScriptTest("sgd")
    assert test.lr == pytest.approx(1e-5)
    assert all(test.add(1.0) for _ in range(20))
    assert not test.add(float("nan"))
    assert "the loss was not finite at a rate of" in test.result().sweeps[0].ended
    test = ScriptTest(mode="probe")
    test.start(1.0)
    assert not test.add(float("inf"))
    result = test.result("the loss of a row")
    assert "the loss was not finite at a rate of 1e-07" in result.sweeps[0].ended
    assert "Probe: the loss of a row." in result.describe()
    assert result._figure().axes[0].get_ylabel() == "loss of the probe: held-out rows"
    test = ScriptTest()
    test.add(1.0)
    assert test.result().sweeps[0].ended == "the script ended after 1 of 200 updates"
    test.fail()
    assert "no fp16 gradient was finite" in test.result().sweeps[0].ended


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_held_out_rows_without_a_finite_loss_end_the_test_before_its_first_update(loss):
    hook = FindLrHook(HostScript(str(SCRIPT)), HostRun(), ScriptTest(mode="probe"))
    hook.held_out = SimpleNamespace(num_seen=0, compute=lambda: loss)
    with pytest.raises(LabError, match=f"the loss of held-out rows is {loss} before the first update"):
        hook._before_update(SimpleNamespace(param_groups=[]))


@pytest.mark.slow
def test_what_is_said(tmp_path, capsys, monkeypatch):
    """In terms of the script's option, where the optimizer's rate is a multiple of it (--scale_lr)."""
    test, ended = ScriptTest(), []
    goes_on = True
    while goes_on:
        x = np.log10(test.lr)
        goes_on = test.add(1 - 0.6 / (1 + np.exp(-3 * (x + 4.5))) + 10 ** (2 * (x + 2.2)))
    hook = SimpleNamespace(
        run=SimpleNamespace(lab_folder=tmp_path / "lrlab"), lr_per_option=4.0, probe=None, can_hold_rows_back=False
    )
    hook.end = lambda: ended.append(True)
    test.finish(hook)
    lr = test.result().lr
    assert 1e-5 < lr < 1e-3
    assert f"start the script without --find_lr and with --learning_rate {lr / 4:.2g}." in capsys.readouterr().out
    assert ended
    test = ScriptTest(num_updates=20)
    assert test.most_updates == 27
    while test.add(1 + 0.5 * (-1) ** test.done):
        pass
    test.finish(hook)
    said = capsys.readouterr().out
    assert "the loss does not fall between 1e-07 and" in said
    assert "For half the noise, add --num_updates 80 before the script's name, or use a batch four times as large" in said
    hook.can_hold_rows_back = True
    test.finish(hook)
    said = capsys.readouterr().out
    assert "To avoid the noise of batches, add --validation_fraction 0.1 before the script's name" in said
    assert "Or, for half the noise, add --num_updates 80" in said
    hook.probe = "the loss of 1 of 8 rows"
    test.finish(hook)
    said = capsys.readouterr().out
    assert "The updates themselves are too noisy: use a batch four times as large" in said
    assert "--num_updates" not in said
    hook.probe = None
    monkeypatch.setattr("diffusers_lrlab.finder.result.FinderResult.save", lambda *_: None)  # a second each
    for loss in (lambda x: -x, lambda x: float("nan")):  # falls to the end, and is no number: neither is for more updates
        test = ScriptTest(num_updates=20)
        while test.add(loss(np.log10(test.lr))):
            pass
        test.finish(hook)
        assert "noise" not in capsys.readouterr().out
    with pytest.raises(LabError, match="ended before its first update, or without a loss"):
        ScriptTest().finish(hook)
