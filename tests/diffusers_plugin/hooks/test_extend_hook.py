"""`--extend` of the launcher: a script's run goes on past its end, with the announced rates."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from launched_here import launch_here

from diffusers_lrlab import lr_curve
from diffusers_lrlab.diffusers_plugin.host.driven_optimizer import COUNT

SCRIPT = Path(__file__).parents[2] / "scripts" / "resume_script.py"
LR = 1e-2


def run(folder, *arguments, options=()):
    folder.mkdir(exist_ok=True)
    return launch_here(SCRIPT, f"--output_dir={folder}", *arguments, options=options)


def rates(folder):
    rows = [json.loads(line) for line in (folder / "rates.jsonl").read_text().splitlines()]
    return dict(rows)


def curve(spec, num_updates, warmup=0):
    return lr_curve(spec, LR, warmup, num_updates)


def extended_rates(folder, at, expected, num_more=0):
    """The rates of the second part, update by update, but for more updates than were asked for."""
    found = rates(folder)
    for update in range(len(expected), len(expected) + num_more):
        del found[update]
    assert [*found] == list(range(at, len(expected)))
    np.testing.assert_allclose([*found.values()], expected[at:], rtol=1e-12, atol=1e-18)


@pytest.fixture
def trained(tmp_path):
    """Trains 10 updates in `tmp_path / "out"`, with a checkpoint after each second one."""

    def train(schedule, *more, options=()):
        own = (f"--lr_scheduler={schedule}", "--max_train_steps=10", "--checkpointing_steps=2", *more)
        assert run(tmp_path / "out", *own, options=options) == 0
        return tmp_path / "out", own

    return train


def test_a_constant_rate_goes_on_to_the_bit(trained, tmp_path, capsys):
    out, own = trained("constant_with_warmup", "--lr_warmup_steps=2", options=["--exact_resume"])
    before = sorted((path.relative_to(out), path.stat().st_mtime_ns) for path in out.rglob("*"))
    assert run(out, *own, options=["--extend=16", "--exact_resume", "--strict_lr_audit"]) == 0
    shown = capsys.readouterr().err
    assert "as if it had been that long from the start, to the bit" in shown
    assert "LR audit: 6 updates, every value that follows the clock was as expected" in shown
    extended_rates(tmp_path / "out-16", 10, curve("constant_with_warmup", 16, 2))
    assert before == sorted((path.relative_to(out), path.stat().st_mtime_ns) for path in out.rglob("*"))
    whole = tmp_path / "whole"
    assert run(whole, *own, "--max_train_steps=16", options=["--exact_resume"]) == 0
    end = [json.loads((folder / "end.json").read_text()) for folder in (whole, tmp_path / "out-16")]
    assert end[0] == end[1]


def test_it_goes_on_from_before_the_decay_and_after_a_stop(trained, tmp_path, capsys):
    spec = "warmup_stable_decay:num_decay_steps=4"
    out, own = trained(spec)
    assert run(out, *own, options=["--extend=14"]) == 0
    shown = capsys.readouterr().err
    assert "from its checkpoint of update 6, to 14 updates" in shown
    assert "except for data and random numbers, which the script does not continue" in shown
    longer = tmp_path / "out-14"
    extended_rates(longer, 6, curve(spec, 14))
    # As if it had been killed there: the same command goes on from the newest checkpoint.
    for update in (12, 14):
        (longer / f"checkpoint-{update}").rename(tmp_path / f"away-{update}")
    (longer / "rates.jsonl").unlink()
    assert run(out, *own, options=["--extend=14"]) == 0
    # Started within an epoch, such a script does an update too many.
    extended_rates(longer, 10, curve(spec, 14), num_more=1)
    assert run(out, *own, options=["--extend=14", "--then=linear"]) == 2
    assert "continues the run in another way (then None)" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--fix_lr_clock",)])
def test_a_cosine_that_has_ended_is_rewarmed(trained, tmp_path, capsys, options):
    out, own = trained("cosine", "--lr_warmup_steps=2", "--checkpointing_steps=5", options=options)
    assert run(out, *own, options=["--extend=20"]) == 2
    assert "--extend 20: 'cosine' over this length matches the rates of the run only up to update" in capsys.readouterr().err
    assert not (tmp_path / "out-20").exists()
    assert run(out, *own, options=["--extend=20", "--rewarm=4", *options]) == 0
    short, long = (curve("cosine", num, 2) for num in (10, 20))
    rise = np.interp(np.arange(4), [0, 4], [short[9], long[14]])
    extended_rates(tmp_path / "out-20", 10, np.concatenate([short, rise, long[14:]]), num_more=1)


def test_it_is_rewound_to_the_checkpoint_where_both_agree(trained, tmp_path):
    out, own = trained("cosine")
    assert run(out, *own, options=["--extend=12", "--tolerance=0.05"]) == 0
    short, long = (curve("cosine", num) for num in (10, 12))
    extended_rates(tmp_path / "out-12", 2, np.concatenate([short[:2], long[2:]]))


def test_another_schedule_takes_over_with_other_checkpoints_and_accumulation(trained, tmp_path):
    out, own = trained("constant", "--gradient_accumulation_steps=2", "--resume_from_checkpoint=checkpoint-6")
    assert run(out, *own, options=["--extend=12", "--then=linear"]) == 0
    extended_rates(tmp_path / "out-12", 6, np.concatenate([np.full(6, LR), LR * (1 - np.arange(6) / 6)]))


def test_the_schedule_of_the_launcher_is_extended(tmp_path):
    """It replaces the script's own, and its checkpoints have the number of updates."""
    spec, out = "wsd:num_decay_steps=4", tmp_path / "out"
    own = ("--max_train_steps=10", "--checkpointing_steps=2")
    assert run(out, *own, options=[f"--lr_scheduler={spec}"]) == 0
    group = torch.load(out / "checkpoint-6" / "optimizer.bin", weights_only=True)["param_groups"][0]
    assert group[COUNT] == 6
    assert run(out, *own, options=[f"--lr_scheduler={spec}", "--extend=14"]) == 0
    extended_rates(tmp_path / "out-14", 6, curve(spec, 14))


REFUSED = [
    (["--extend=10"], [], "--extend 10: must be more than 10, got 10"),
    (["--extend=0"], [], "--extend 0: must be a whole number"),
    (["--rewarm=3"], [], "--rewarm 3.0 has no effect without --extend"),
    (["--extend=20"], ["--max_train_steps=20"], "continues at a learning rate of 0, where 'cosine' over 20 updates"),
    (["--extend=20"], ["--max_train_steps=8"], "has done 10 updates, but according to the command the run has 8"),
    (
        ["--extend=20"],
        ["--max_train_steps=0"],
        "Hint: give the script the number of updates that the run had, by --max_train",
    ),
    (["--extend=20"], ["--learning_rate=1.0"], "--learning_rate 1.0: must be that of the run, 0.01, got 1.0"),
    (["--extend=20"], ["--resume_from_checkpoint=checkpoint-3"], "has no checkpoint-3"),
    (["--extend=20"], ["--lr_scheduler=adaptive"], "follows a loss"),
    (["--extend=20", "--timestep_sampler=clts"], [], "its curriculum follows the length of the run"),
    (["--extend=20", "--then=greedy"], [], "this one follows a metric"),
    (["--extend=20", "--tolerance=2"], [], "--tolerance 2.0: must be a number in [0, 1]"),
]


def test_refused_before_anything_is_written(trained, tmp_path, capsys):
    out, own = trained("cosine")
    wrong = []
    for options, more, message in REFUSED:
        status = run(out, *own, *more, options=options)
        shown = capsys.readouterr().err
        if status != 2 or message not in shown:
            wrong.append((options, more, message, status, shown[-600:]))
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out-20").mkdir()
    (tmp_path / "out-20" / "mine").touch()
    assert run(out, *own, options=["--extend=20", "--rewarm=3"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_another_schedule_can_take_over_before_a_decay(trained, tmp_path, capsys):
    """`lrlab branch` is no remedy for a script's run, but a checkpoint by name is."""
    out, own = trained("wsd:num_decay_steps=30", "--max_train_steps=40", "--checkpointing_steps=10")
    assert run(out, *own, options=["--extend=42", "--then=linear"]) == 2
    assert "or let --resume_from_checkpoint name a checkpoint before the decay" in capsys.readouterr().err
    assert run(out, *own, "--resume_from_checkpoint=checkpoint-10", options=["--extend=42", "--then=linear"]) == 0
    found = rates(tmp_path / "out-42")
    np.testing.assert_allclose([found[10], found[26]], [LR, LR / 2], rtol=1e-12)


def test_a_script_that_cannot_resume_is_refused(tmp_path, capsys):
    script = SCRIPT.with_name("ddpm_script.py")
    assert launch_here(script, f"--output_dir={tmp_path}", options=["--extend=20"]) == 2
    assert "--extend cannot be used in this script: it does not resume by" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_loaded_is_noticed(trained, tmp_path, capsys):
    out, own = trained("constant")
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.read_text()
        .replace("if found:", "if False:\n            accelerator.load_state(found)\n        if found:")
        .replace('accelerator.load_state(os.path.join(args.output_dir, f"checkpoint-{found[-1]}"))', "pass")
    )
    assert launch_here(script, f"--output_dir={out}", *own, options=["--extend=20"]) == 2
    assert "It has not loaded the optimizer of the checkpoint" in capsys.readouterr().err
