"""--profile: a trace and a table of where time goes, from a run that ends as it would have without."""

import gzip
import json
import shutil

import pytest
import runs
import torch
from safetensors.torch import load_file
from test_compiling import make_trainer, train
from trainer_states import assert_same, state_of

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.training.profiling import PARTS, TRACE, check_profile, profiled_updates, rows_of, table

WORKING = ("data", "timesteps and noise", "forward", "backward", "clip", "optimizer", "EMA", "diagnostics", "other")


def span(category, name, start, duration, thread=1, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "pid": 1, "args": args}


TRACE_OF_A_GPU = [  # two updates, of 1000 and 2000 microseconds
    *(span("user_annotation", "ProfilerStep#7", 1000, 1000), span("user_annotation", "ProfilerStep#8", 2000, 2000)),
    span("user_annotation", "forward", 1100, 300),
    *(span("cuda_runtime", "cudaLaunchKernel", 1150, 5, correlation=1), span("kernel", "conv", 1900, 400, 7, correlation=1)),
    span("user_annotation", "backward", 2000, 500),
    # The backward pass launches by a thread of its own.
    *(span("cuda_driver", "cuLaunchKernel", 2100, 5, 2, correlation=2), span("kernel", "gemm", 2200, 300, 7, correlation=2)),
    span("user_annotation", "diagnostics", 3000, 900),
    *(
        span("cuda_runtime", "cudaMemcpyAsync", 3010, 5, correlation=3),
        span("gpu_memcpy", "copy", 4100, 50, 7, correlation=3),
    ),
    span("cuda_runtime", "cudaStreamSynchronize", 3100, 700, correlation=4),
    # Of neither update, and of another thread.
    *(span("user_annotation", "forward", 100, 300), span("user_annotation", "forward", 1500, 300, thread=3)),
    *(span("cuda_runtime", "cudaLaunchKernel", 150, 5, correlation=9), span("kernel", "conv", 1000, 99, 7, correlation=9)),
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "args": {"name": "python"}},
]


def test_time_of_a_gpu_belongs_to_the_part_that_launched_it_and_waiting_for_it_to_nothing_else():
    rows = rows_of(TRACE_OF_A_GPU)
    found = {part: pytest.approx(times) for part, times in rows.items() if any(times)}
    assert found == {
        "forward": (0.15, 0.2),
        "backward": (0.25, 0.15),
        "diagnostics": (0.1, 0.025),
        "waits": (0.35, 0.0),
        "other": (0.65, 0.0),
        "the update": (1.5, 0.325),  # of the device, from 1900 to 2500 and 4100 to 4150
    }
    lines = table(rows).splitlines()
    assert lines[0].split() == ["part", "host,", "ms", "share", "device,", "ms", "share"]
    assert lines[-1].split() == ["the", "update", "1.500", "100.0%", "0.325", "21.7%"]
    assert "EMA" not in table(rows)


def test_more_updates_than_there_are_cannot_be_profiled():
    check_profile(None, 1)
    check_profile(3, 10)
    with pytest.raises(LabError, match="--profile 4 begins after 7 updates, and only 10 are.* Give 3 or less"):
        check_profile(4, 10)
    with pytest.raises(LabError, match="only 2 are to be done. It takes 8 updates at least"):
        check_profile(1, 2)


def test_a_profiled_run_is_the_run(tmp_path, capsys):
    options = {"max_train_steps": 12, "backend": "no", "gradient_accumulation_steps": 2, "timestep_sampler": "clts"}
    plain = train(make_trainer(tmp_path / "plain", **options), until=12)
    trainer = make_trainer(tmp_path / "profiled", **options)
    ours = {id(each): set(vars(each)) for each in (trainer, trainer.step, trainer.objective, trainer.process)}
    assert list(profiled_updates(trainer, 3)) == list(range(1, 13))
    expected, found = state_of(plain), state_of(trainer)
    for state in (expected, found):
        state["clock"] = state["clock"][:2]  # without seconds
    assert_same(found, expected)
    for each in (trainer, trainer.step, trainer.objective, trainer.process):
        assert set(vars(each)) - ours[id(each)] <= {"norm", "was_skipped", "skips_bad"}
    shown, trace = capsys.readouterr().out, trainer.folder.lab / TRACE
    assert f"3 updates, which the profiler makes slower; all that they did is in {trace}" in shown
    rows = rows_of(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    assert list(rows) == [*PARTS, "the update"]
    assert {part for part in PARTS if rows[part][0] > 0} >= set(WORKING)
    assert rows["forward"][0] < rows["the update"][0] == pytest.approx(sum(rows[part][0] for part in PARTS))
    assert all(device is None for _, device in rows.values())


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
