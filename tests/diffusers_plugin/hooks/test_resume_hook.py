"""Exact resume of third-party scripts: their checkpoints, and (slow) launched scripts that are killed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_launch import launch

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.hooks import resume
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

SCRIPT = Path(__file__).parents[2] / "scripts" / "resume_script.py"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("accelerator.load_state(path)", "does not both write checkpoints"),
        ("a.save_state(p); a.load_state(p); skip_first_batches(loader, 3)", "skips batches"),
        ("a.save_state(p); a.load_state(p); wds.WebLoader(data)", "its data are a stream"),
    ],
    ids=["no_save", "skipped_batches", "stream"],
)
def test_scripts_that_are_refused(tmp_path, text, reason):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(NotRecognised, match=reason):
        resume.recognise(HostScript(str(tmp_path / "script.py")))


def test_checkpoints_of_other_numbers_are_refused(tmp_path):
    hook = resume.ResumeHook(HostScript(str(SCRIPT)), SimpleNamespace(run=SimpleNamespace()), {})
    hook.run.accelerator = SimpleNamespace(num_processes=2)
    hook.loader = SimpleNamespace(facts=lambda: {"rows": 3})
    saved = {"version": 1, "facts": {"processes": 1, "rows": 3}}
    (tmp_path / resume.FILE).write_text(json.dumps(saved))
    with pytest.raises(LabError, match="the number of processes was 1 when the checkpoint was written, and is 2 now"):
        hook._load(tmp_path)


@pytest.mark.parametrize(
    ("after", "updates", "warning"),
    [
        ("", 5, "saves its result within its epochs"),
        ("", 4, None),
        ("model.save_pretrained(a)", 5, None),
        ("model.save_pretrained(a); log_validation(epoch)", 5, "uses `epoch` after its epochs"),
        ("model.save_pretrained(a); log_validation(epoch)", 4, None),
    ],
    ids=["saved_within", "saved_within_not_last", "saved_after", "epoch_used", "epoch_used_not_last"],
)
def test_what_is_done_within_epochs_or_needs_one(tmp_path, after, updates, warning):
    """A script that is resumed after its last update has no epoch left, and saves nothing, or fails."""
    (tmp_path / "script.py").write_text(
        f"a.save_state(p); a.load_state(p)\nfor epoch in range(first_epoch, 3):\n    model.save_pretrained(a)\n{after}\n"
    )
    said = []
    accelerator = SimpleNamespace(num_processes=1, process_index=0)
    run = SimpleNamespace(accelerator=accelerator, warn=said.append)
    clock = SimpleNamespace(run=run, count_updates=lambda: 5, outside_checkpoints=list)
    hook = resume.ResumeHook(HostScript(str(tmp_path / "script.py")), clock, {})
    hook.loader = SimpleNamespace(facts=dict)
    mine = {"micro_batches": 0, "loader": {}, "hooks": {}}
    saved = {"version": 1, "updates": updates, "facts": {"processes": 1}, "processes": [mine]}
    (tmp_path / resume.FILE).write_text(json.dumps(saved))
    hook._load(tmp_path)
    assert [warning in text for text in said] == [True] * (warning is not None)


# --- launched and killed -------------------------------------------------------------------------------------------------


def end_of(folder, script, *arguments, kills=(), processes=1, options=()):
    """What a script ends with that is killed after some micro-batches of each start: losses by update, and all states."""
    folder.mkdir()
    own = [f"--output_dir={folder}", "--resume_from_checkpoint=latest", *arguments]
    how = {"options": ["--exact_resume", "--strict", "--log_timesteps", *options], "processes": processes}
    for kill in kills:
        launch(script, *own, f"--kill_at={kill}", expect=-9, **how)
    stderr = launch(script, *own, **how)
    losses = [sorted({*path.read_text().splitlines()}) for path in sorted(folder.glob("losses-*.jsonl"))]
    import pyarrow.parquet as pq

    log = pq.read_table(folder / "lrlab" / "timesteps.parquet")
    assert not [*folder.glob(".tmp-lrlab-*")]
    return [json.loads((folder / "end.json").read_text()), losses, log], stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kills", "processes"),
    [
        (["--checkpointing_steps=2"], (6, 3, 5), 1),
        (["--gradient_accumulation_steps=4", "--buckets", "--max_train_steps=7"], (6, 11), 1),
        (["--dataloader_num_workers=2", "--checkpointing_steps=3", "--draw_after_saving"], (5, 10), 1),
        (["--kill_while_saving", "--resume_step"], (4, 6), 1),
        (["--checkpointing_steps=1"], (14,), 1),  # at the last update, whose checkpoint is there
        (["--skipped_updates"], (14,), 1),  # the same, where the schedule has made fewer steps than there were updates
        (["--gradient_accumulation_steps=2", "--draw_after_saving"], (8, 6), 2),
    ],
    ids=["three_kills", "buckets", "workers", "while_saving", "last_update", "skipped_updates", "two_processes"],
)
def test_killed_scripts_end_with_the_same_bits(tmp_path, arguments, kills, processes):
    script = SCRIPT
    if "--resume_step" in arguments:  # which drops batches itself, like train_unconditional.py
        arguments = [argument for argument in arguments if argument != "--resume_step"]
        text = SCRIPT.read_text()
        text = text.replace("# a test puts in: resume_step", "resume_step = global_step % per_epoch")
        condition = "if args.resume_from_checkpoint and epoch == first_epoch and found and step < resume_step:"
        text = text.replace("# a test puts in: continue", f"{condition}\n                continue")
        script = tmp_path / "script.py"
        script.write_text(text)
    whole, _ = end_of(tmp_path / "whole", script, *arguments, processes=processes)
    killed, stderr = end_of(tmp_path / "killed", script, *arguments, kills=kills, processes=processes)
    assert killed == whole
    assert "--exact_resume: " in stderr
    assert "It resumed after update" in stderr


@pytest.mark.slow
def test_checkpoints_without_the_option_and_streams(tmp_path):
    own = [f"--output_dir={tmp_path}", "--checkpointing_steps=2"]
    launch(SCRIPT, *own, "--kill_at=3", expect=-9)
    stderr = launch(SCRIPT, *own, "--resume_from_checkpoint=latest", options=["--exact_resume"])
    assert "was written without --exact_resume, so the data of its epoch start again" in stderr
    message = "--exact_resume cannot be used in this script: its data are a stream"
    assert message in launch(SCRIPT, *own, "--stream", options=["--exact_resume", "--strict"], expect=2)
