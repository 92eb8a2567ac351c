"""The loss of held-out rows in scripts that are not ours: its code by their text, and (slow) launched."""

import argparse
import ast
import json
from pathlib import Path
from types import SimpleNamespace

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
from diffusers_lrlab.diffusers_plugin.host.held_out_rows import HeldOutRows
from diffusers_lrlab.diffusers_plugin.script.loss_code import find_loss_code
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

SCRIPTS = {name: Path(__file__).parents[1] / "scripts" / f"{name}_script.py" for name in ("ddpm", "flow", "resume")}
LOOP = """
loader = DataLoader(data)
for step, batch in enumerate(loader):
    {first}
    with accelerator.accumulate(model):
        {before}
        loss = x.square().mean()
        accelerator.backward(loss)
        optimizer.step()
"""


class Repeated(torch.utils.data.Dataset):
    """As in textual inversion: more rows than images."""

    def __init__(self, num_images):
        self.num_images = num_images

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index % self.num_images


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([1, 2])


def code_of(folder, first="pass", before="x = batch * 2", text=LOOP):
    (folder / "script.py").write_text(text.format(first=first, before=before))
    return find_loss_code(HostScript(str(folder / "script.py")))


@pytest.mark.parametrize(
    ("first", "before"),
    [
        ("pass", "x = batch * factor"),
        ("y = batch * factor", "x = y; total += 3"),
        ("if step < 3: continue", "x = batch.clone(); x *= factor; shown.append(x)"),
        ("def double(of): return factor * of", "x = double(batch); accelerator.log(1)"),
        ("pass", "batch *= 2; x = batch; x.mul_(factor / 2)"),
        ("parts = []", "parts.append(batch); parts.extend([]); x = parts[0] * factor"),
        ("pass", "x = batch * 1; x.view(-1).mul_(factor)"),
        ("import torch", "x = torch.empty(2); torch.mul(batch, factor, out=x)"),
        ("import torch", "x = torch.empty(2); torch.mul(batch, factor, out=x.view(-1))"),
        ("from torch.nn import functional as F", "x = batch * factor - 1; F.relu(x, inplace=True); x.add_(1)"),
        ("import torch", "x = batch - 4; torch.nn.init.zeros_(x); torch.relu_(x); x += batch * factor"),
        ("import torch", "x, i = torch.empty(2), torch.empty(2).long(); torch.sort(batch * factor, out=(x, i))"),
    ],
)
def test_the_code_of_a_loss(tmp_path, first, before):
    """It is what the loss follows from, and nothing else."""
    code = code_of(tmp_path, first, before)
    assert (code.batch, code.counter) == ("batch", "step")
    variables = {"batch": torch.tensor([1.0, 3.0]), "factor": 2}
    exec(code.statements, variables)
    assert eval(code.loss, variables) == 20


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"before": "x = batch; accelerator.backward(x)"}, "calls accelerator.backward 2 times"),
        (
            {"text": "loader = make()\nfor batch in loader: accelerator.backward(batch)"},
            "takes no batches from a DataLoader",
        ),
        ({"before": "x = mean = mean_of(batch); x -= 1; old += x; x = old"}, "follows from the batch before .old, line 6"),
        ({"before": "x = batch.mean(); mean.mul_(0.9).add_(x); x = x - mean"}, "follows from the batch before .mean."),
        ({"before": "x = batch; state.last = x; x = x - state.last"}, "follows from the batch before .state.last, line 6"),
        ({"before": "kept.view(-1).mul_(0.9); x = batch + kept"}, "follows from the batch before .kept.view"),
        ({"before": "x = torch.mul(batch, 2, out=kept)"}, "follows from the batch before .kept, line 6"),
        ({"before": "torch.relu_(kept); x = batch + kept"}, "follows from the batch before .kept, line 6"),
        ({"before": "seen.append(batch); x = sum(seen)"}, "an effect of its own .append, line 6"),
        ({"before": "seen.update(x=batch); x = seen['x']"}, "an effect of its own .update, line 6"),
        ({"before": "x = accelerator.gather(batch)"}, "an effect of its own .gather, line 6"),
        ({"before": "for x in batch: break"}, "does not run straight through"),
        ({"text": LOOP.replace("DataLoader(data)", "DataLoader(data, batch_sampler=own)")}, "a sampler of the script's own"),
        ({"text": LOOP.replace("step, batch", "step, (batch, y)")}, "takes its batches apart"),
        ({"text": LOOP.replace("accelerator.accumulate(model)", "other()")}, "is not a statement of"),
    ],
)
def test_loops_that_are_refused(tmp_path, how, reason):
    with pytest.raises(NotRecognised, match=reason):
        code_of(tmp_path, **how)


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


WHOLE = """
def ids():
    return torch.ones(1, 2).repeat(args.train_batch_size, 1)
fixed = {made}
{loop}"""


@pytest.mark.parametrize(
    ("made", "before", "line"),
    [
        ("ids()", "x = torch.cat([batch, fixed])", 4),
        ("torch.zeros(args.train_batch_size, 2)", "x = batch + fixed", 4),
        ("1", "x = batch + one.expand(args.train_batch_size, 2)", 10),
        ("ids()", "x = batch", None),
        ("1", "x = batch * fixed; shown = x.repeat(args.train_batch_size)", None),
    ],
)
def test_what_is_made_for_whole_batches(tmp_path, made, before, line):
    """As `add_time_ids` of instruct_pix2pix_sdxl; what the loss does not follow from is nothing to it."""
    statement = code_of(
        tmp_path, "pass", before, text=WHOLE.replace("{loop}", LOOP).replace("{made}", made)
    ).of_whole_batches
    assert (statement and statement.lineno) == line


def test_models_that_are_switched_for_a_part_of_the_loss(tmp_path):
    """As adapters are in diffusion_dpo, for the predictions of the model without them."""
    before = "accelerator.unwrap_model({}).disable(); x = unet(batch); accelerator.unwrap_model({}).enable()"
    with pytest.raises(NotRecognised, match=r"switches a model while .*line 6.: .*unwrap_model.unet..disable.."):
        code_of(tmp_path, "pass", before.replace("{}", "unet"))
    code_of(tmp_path, "pass", before.replace("{}", "shown"))


@pytest.mark.parametrize(("size", "processes", "num"), [(1, 1, 5), (2, 1, 4), (3, 1, 6), (4, 1, 4), (2, 2, 4), (7, 1, 7)])
def test_whole_batches_are_held_back(monkeypatch, size, processes, num):
    state = SimpleNamespace(num_processes=processes, process_index=0)
    monkeypatch.setattr("accelerate.state.PartialState", lambda: state)
    whole = ast.parse("ids = torch.ones(args.train_batch_size, 2)").body[0]
    held_out, trained = held_out_rows(list(range(38)), 0.13, whole=whole, batch_size=size)
    assert (len(held_out) * processes, len(held_out) % size, len(trained)) == (num, 0, 38 - num)
    message = r"line 1: ids = torch.ones\(args.train_batch_size, 2\)\), so that whole batches .* less than one of 8"
    with pytest.raises(LabError, match=message):
        held_out_rows(list(range(38)), whole=whole, batch_size=8 // processes)


def held_out_rows(dataset, fraction=0.2, script="resume", arguments=None, most=None, whole=None, **given):
    """The rows that are held back, and those to train on."""
    run = SimpleNamespace(arguments=arguments or {})
    held_out = HeldOutRows(HostScript(str(SCRIPTS.get(script, script))), run, fraction, most, whole)
    trained = held_out.hold_back(torch.utils.data.DataLoader.__init__, dataset, **given)
    assert held_out.loader.num_workers == 0
    return held_out.loader.dataset.indices, trained.indices


def test_rows_are_the_same_for_every_seed_and_never_trained_on():
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(held_out_rows(list(range(20)), batch_size=3, num_workers=2))
    assert found[0] == found[1]
    held_out, trained = found[0]
    assert len(held_out) == 4
    assert sorted([*held_out, *trained]) == list(range(20))
    assert len(held_out_rows(list(range(20)), most=2)[0]) == 2
    assert len(held_out_rows(list(range(20)), most=5)[0]) == 4
    with pytest.raises(LabError, match="cannot hold back a row of 3"):
        held_out_rows([1, 2, 3])


def test_a_whole_batch_is_left_to_train_on():
    """A script that drops smaller ones would train on nothing, and end as if it had."""
    with pytest.raises(LabError, match="leaves 7 of 8 rows to train on: not one whole batch of 8"):
        held_out_rows(list(range(8)), batch_size=8, drop_last=True)
    assert len(held_out_rows(list(range(8)), batch_size=8)[1]) == 7
    assert len(held_out_rows(list(range(8)), batch_size=7, drop_last=True)[1]) == 7


@pytest.mark.parametrize(
    ("dataset", "how", "reason"),
    [
        (list(range(20)), {"sampler": [1]}, "a sampler of the script's own"),
        (Stream(), {}, "its data are a stream"),
        (list(range(20)), {"arguments": {"repeats": 2}}, "in several rows .--repeats 2"),
        (Repeated(5), {"script": __file__}, "in several of its 20 rows .num_images is 5"),
    ],
)
def test_data_that_are_refused(dataset, how, reason):
    with pytest.raises(NotRecognised, match=reason):
        held_out_rows(dataset, **how)


def test_rows_of_images_that_are_there_once():
    assert len(held_out_rows(Repeated(20), script=__file__)[0]) == 4


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
        assert "rows, of the weights and not of their average) was" in stderr
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
