"""--profile: a trace and a table of where time goes, from a run that ends as it would have without."""

import gzip
import itertools
import json
import shutil

import pytest
import runs
import torch
from safetensors.torch import load_file
from test_compiling import make_trainer, train
from trainer_states import assert_same, state_of

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.training.profiling import TRACE, check_profile, profiled_updates

PARTS = {"data", "timesteps and noise", "forward", "backward", "clip", "optimizer", "EMA", "diagnostics"}


def test_more_updates_than_there_are_cannot_be_profiled():
    check_profile(None, 1)
    check_profile(3, 10)
    with pytest.raises(LabError, match="--profile 4 begins after 7 updates, but only 10 are.* Give 3 or less"):
        check_profile(4, 10)
    with pytest.raises(LabError, match="only 2 are left to do. It takes 8 updates at least"):
        check_profile(1, 2)


def test_a_profiled_run_is_the_run(tmp_path, capsys):
    options = {"max_train_steps": 12, "backend": "no", "gradient_accumulation_steps": 2, "timestep_sampler": "clts"}
    plain = train(make_trainer(tmp_path / "plain", **options), until=12)
    trainer = make_trainer(tmp_path / "profiled", **options)
    parts = (trainer, trainer.run, trainer.log, trainer.stepper, trainer.run.objective, trainer.run.process)
    ours = {id(each): set(vars(each)) for each in parts}
    assert list(profiled_updates(trainer, 3)) == list(range(1, 13))
    expected, found = state_of(plain), state_of(trainer)
    for state in (expected, found):
        state["clock"] = state["clock"][:2]  # without seconds
    assert_same(found, expected)
    for each in parts:
        assert set(vars(each)) - ours[id(each)] <= {"norm", "was_skipped", "skips_bad"}
    shown, trace = capsys.readouterr().out, trainer.folder.lab / TRACE
    assert f"3 updates, which the profiler makes slower; their full trace is in {trace}" in shown
    assert "Self CPU" in shown
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    updates = [event for event in spans if event["name"].startswith("ProfilerStep#")]
    ranges = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"] in PARTS)
    assert len(updates) == 3
    assert {event["name"] for event in spans} >= PARTS
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))  # none within another


@pytest.mark.slow
def test_two_processes_that_go_on_and_accumulate_are_profiled_and_end_as_without(tmp_path):
    common = [*runs.tiny_arguments(tmp_path, dropout=0.2), "--max_train_steps=14", "--train_batch_size=5"]
    common += ["--gradient_accumulation_steps=2", "--checkpointing_steps=4", "--save_images_epochs=100"]
    common += ["--checkpoints_total_limit=0"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    runs.run(*common, f"--output_dir={whole}", processes=2)
    shutil.copytree(whole, part)
    for later in ("checkpoint-8", "checkpoint-12", "checkpoint-14"):
        shutil.rmtree(part / later, ignore_errors=True)
    again = [*common, f"--output_dir={part}", "--resume_from_checkpoint=checkpoint-4"]
    runs.run(*again, "--profile=3", processes=2)
    name = "unet/diffusion_pytorch_model.safetensors"
    expected, found = load_file(whole / name), load_file(part / name)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert (whole / "lrlab/metrics.jsonl").read_text() == (part / "lrlab/metrics.jsonl").read_text()
    assert (part / "lrlab" / TRACE).exists()
