"""The loss of held-out rows in third-party scripts."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from test_launch import launch

from diffusers_lrlab import launch as launcher
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.streams import SPLIT_SEED, split_rows, stream_seed
from diffusers_lrlab.diffusers_plugin import hook_options

SCRIPTS = {name: Path(__file__).parents[2] / "scripts" / f"{name}_script.py" for name in ("ddpm", "flow", "resume")}


def options_of(**given):
    """Those of the launcher."""
    return argparse.Namespace(**vars(launcher.make_parser().parse_args(["script.py"])) | given)


@pytest.mark.parametrize(
    ("fraction", "steps", "message"),
    [
        (0.1, None, "no effect without --validation_steps"),
        (None, 3, "no effect without"),
        *((fraction, 3, f"{fraction}: must be") for fraction in (-0.1, 0.0, 0.5, 1.0, float("nan"))),
        (0.1, 0, "--validation_steps 0: must be"),
    ],
)
def test_options_that_are_refused(fraction, steps, message):
    with pytest.raises(LabError, match=message):
        hook_options.check(options_of(validation_fraction=fraction, validation_steps=steps))


def test_a_range_test_looks_at_each_update(capsys):
    hook_options.check(options_of(validation_fraction=0.1, find_lr=True))
    with pytest.raises(LabError, match=r"0.5: must be"):
        hook_options.check(options_of(validation_fraction=0.5, find_lr=True))
    left = hook_options.options_of_test(options_of(validation_fraction=0.1, validation_steps=2, find_lr=True))
    assert (left.validation_fraction, left.validation_steps) == (0.1, None)
    assert "does not train: --validation_steps has no effect on the test" in capsys.readouterr().err


# --- launched ------------------------------------------------------------------------------------------------------------


def run(folder, script, *arguments, steps, options=(), **how):
    """What the script wrote in each process, the held-out losses by update, and what the launcher said."""
    folder.mkdir(exist_ok=True)
    asked = ["--validation_fraction=0.1", f"--validation_steps={steps}", "--strict"] if steps else []
    stderr = launch(script, f"--output_dir={folder}", *arguments, options=[*asked, *options], **how)
    path = folder / "lrlab" / "validation.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    losses = {row["update"]: row["validation_loss"] for row in rows}
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rows-*.json"))], losses, stderr


def changed(name, folder, *replacements):
    """A script of the tests with other words."""
    text = SCRIPTS[name].read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = folder / f"changed_{name}.py"
    path.write_text(text)
    return path


def model_and_data():
    """As `ddpm_script.py` makes them."""
    torch.manual_seed(0)
    return torch.nn.Linear(2, 2), torch.randn(2048, 2)


def loss_by_hand(model, data, batch_size=8, draws=1, rank=0):
    """Of these rows, as `ddpm_script.py` computes it; what it draws is drawn from the stream of the validations."""
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    total = 0.0
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(stream_seed(SPLIT_SEED, "validation", rank) % 2**32)
        torch.empty((), dtype=torch.int64).random_()  # a loader draws a seed for its workers
        for images in data.split(batch_size):
            for _ in range(draws):
                noise, timesteps = torch.randn_like(images), torch.randint(0, 1000, (len(images),))
                total += F.mse_loss(model(scheduler.add_noise(images, noise, timesteps)), noise).item() * len(images)
    return total / (len(data) * draws)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddpm", "flow"])
def test_validations_leave_no_trace(tmp_path, name):
    """With accumulation: the training is that of the bare script on the rows that are left."""
    trained = split_rows(2048, 205)[1]
    reduced = changed(name, tmp_path, ("torch.randn(2048, 2)", f"torch.utils.data.Subset(torch.randn(2048, 2), {trained})"))
    arguments = ["--gradient_accumulation_steps=2", "--max_train_steps=5"]
    (bare,), _, _ = run(tmp_path / "bare", reduced, *arguments, steps=None)
    (validated,), losses, stderr = run(tmp_path / "run", SCRIPTS[name], *arguments, steps=2)
    assert validated == bare
    assert [*losses] == [0, 2, 4, 5]
    assert len({*losses.values()}) == 4
    assert "the held-out loss (205 of 2048 rows) was" in stderr
    if name == "ddpm":
        model, data = model_and_data()
        assert losses[0] == pytest.approx(loss_by_hand(model, data[split_rows(2048, 205)[0]]), rel=1e-6)


@pytest.mark.slow
def test_a_schedule_that_follows_the_loss(tmp_path):
    """By itself it would be an error; here it is shown each held-out loss, the same in both processes, after warm-up."""
    spec = "reduce_lr_on_plateau:patience=0,factor=0.5,threshold=0.5"
    clock = "num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes, num_training_steps=6"
    parsed = ('parser.add_argument("--draw_twice"', 'parser.add_argument("--lr_warmup_steps", type=int, default=2)\n')
    script = changed(
        "ddpm",
        tmp_path,
        (parsed[0], parsed[1] + parsed[0]),
        ('"constant", optimizer', f'"{spec}", optimizer, {clock}'),
        ('"after":', '"lr": optimizer.param_groups[0]["lr"], "after":'),
    )
    options = ["--timestep_sampler=uniform", "--strict_lr_audit"]
    ranks, losses, stderr = run(tmp_path / "run", script, steps=1, processes=2, options=options)
    for rank in ranks:
        # The loss after warm-up is the best so far; none after it is 50 % better.
        np.testing.assert_allclose([row["lr"] for row in rank["rows"]], [0, 5e-4, 1e-3, 5e-4, 2.5e-4, 1.25e-4])
    assert [*losses] == list(range(7))
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert "LR audit: 6 updates, every value that follows the clock was as expected. It follows a loss: the" in stderr
    assert "learning rate was at most 0.001, and 0.000125 at the last update" in stderr


@pytest.mark.slow
def test_with_all_other_hooks_killed_and_resumed(tmp_path):
    """
    The same bits, held-out losses included; in functions of the script, too, which hooks see in the training alone. Two of
    its 14 updates are left out, as with fp16: it counts them, the losses' updates do not.
    """
    saves = "class Model(torch.nn.Sequential):\n    def save_pretrained(self, folder):\n        (folder / 'model').touch()\n"
    function = f"{saves}def loss_of(prediction, noise):\n    return F.mse_loss(prediction, noise)\ndef main(args):"
    script = changed(
        "resume",
        tmp_path,
        ("def main(args):", function),
        ("model = torch.nn.Sequential(", "model = Model("),
        ('F.mse_loss(prediction.float(), noise.float(), reduction="mean")', "loss_of(prediction.float(), noise.float())"),
    )
    others = ["--timestep_sampler=logit_normal", "--loss_weighting=min_snr", "--log_timesteps", "--ema=constant:decay=0.5"]
    own = ["--resume_from_checkpoint=latest", "--dataloader_num_workers=2", "--checkpointing_steps=3", "--skipped_updates"]
    ends, found = [], []
    for name, steps, kills in (("whole", 2, ()), ("killed", 2, (5, 6)), ("seldom", 100, ())):
        folder, how = tmp_path / name, {"options": [*others, "--exact_resume"], "steps": steps}
        for kill in kills:
            run(folder, script, *own, f"--kill_at={kill}", expect=-9, **how)
        _, losses, stderr = run(folder, script, *own, **how)
        ends.append([(folder / "end.json").read_text(), (folder / "lrlab" / "timesteps.parquet").read_bytes()])
        found.append(losses)
        assert "rows, of the weights, not of their average) was" in stderr
    assert [*found[0]] == [0, 2, 4, 6, 8, 10, 12]
    assert found[0] == found[1]
    assert ends[0] == ends[1] == ends[2]
    assert found[2] == {update: found[0][update] for update in (0, 12)}


IDS = (
    "    rows, global_step = [], 0\n",
    "    ids = torch.zeros(1, 2).repeat(args.train_batch_size, 1)\n    rows, global_step = [], 0\n",
)
IN_BATCHES = ("prediction = model(noisy)", "prediction = model(torch.cat([noisy[None], ids[None]]).sum(0))")


@pytest.mark.parametrize("is_told", [True, False])
def test_a_fixed_batch_size_in_a_tensor(tmp_path, is_told):
    """Whole batches are held back where the text tells it; where not, the message names the statement."""
    made = IDS if is_told else (IDS[0], IDS[1].replace("args.train_batch_size", "*size_of(args)"))
    script = changed(
        "ddpm",
        tmp_path,
        made,
        IN_BATCHES,
        ("def main(", "def size_of(args):\n    return [args.train_batch_size]\n\n\ndef main("),
    )
    how = {"steps": 3, "expect": 0 if is_told else 2}
    _, losses, stderr = run(tmp_path / "run", script, "--train_batch_size=16", **how)
    if is_told:
        assert [*losses] == [0, 3, 6]
        assert "the held-out loss (208 of 2048 rows)" in stderr  # 205 would be a tenth
    else:
        line = script.read_text().splitlines().index(f"                {IN_BATCHES[1]}") + 1
        assert f"cannot be computed at its line {line}, `{IN_BATCHES[1]}` (RuntimeError: " in stderr
        assert "latents" not in stderr
