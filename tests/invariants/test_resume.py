"""Resume = never stopped: a run that was stopped, however it was stopped, ends as if it had not been."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import runs
import started
from continued_runs import assert_same_end

from diffusers_lrlab.core.spec import parse_spec

pytestmark = pytest.mark.slow

NUM_UPDATES = 40


def arguments(base, output):
    """
    Dropout makes the run depend on the global random state, oblong shares of an epoch on the data order, and InfoNoise on
    the losses of all updates before.
    """
    options = {"output_dir": output, "max_train_steps": NUM_UPDATES, "train_batch_size": 100, "logging_steps": 7}
    options |= {"validation_steps": 6, "checkpointing_steps": NUM_UPDATES, "checkpoints_total_limit": 0}
    options["lr_scheduler"] = "reduce_lr_on_plateau:patience=0,factor=0.7,threshold=0.3"
    options["timestep_sampler"] = "infonoise:num_bins=6,warmup_updates=6,refresh_every=4,min_count=1"
    return runs.tiny_arguments(base, dropout=0.2, **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    base = tmp_path_factory.mktemp("uninterrupted")
    runs.run(*arguments(base, base / "run"))
    return base / "run"


def has_rows(folder, count):
    log = folder / "lrlab" / "metrics.jsonl"
    return log.exists() and len(log.read_text().splitlines()) >= count


def start_and_signal(number, rows, *args):
    """Starts a run, sends a signal once its log has as many rows, and returns status and stderr."""
    folder = Path(next(arg.split("=")[1] for arg in args if arg.startswith("--output_dir=")))
    process = runs.start_and_wait_for(lambda: has_rows(folder, rows), *args)
    time.sleep(random.uniform(0, 0.05))  # rows come every few updates; this hits those between as well
    process.send_signal(number)
    _, stderr = process.communicate()
    return process.returncode, stderr


def test_stopped_at_a_random_update(uninterrupted, tmp_path):
    seed = random.randrange(10**6)
    rows = random.Random(seed).randrange(1, 8)  # of the log, so somewhere in the first three quarters of the run
    args = arguments(uninterrupted.parent, tmp_path / "run")
    returned, stderr = start_and_signal(signal.SIGTERM, rows, *args)
    assert returned == 143, f"seed {seed}: {stderr[-2000:]}"
    assert "Traceback" not in stderr
    record = runs.read_record(tmp_path / "run")
    assert record["run"]["status"] == "cancelled"
    assert 0 < record["train"]["updates_done"] < NUM_UPDATES
    checkpoint = tmp_path / "run" / f"checkpoint-{record['train']['updates_done']}"
    assert checkpoint.is_dir()
    assert f"--resume_from_checkpoint latest ({checkpoint})" in stderr
    runs.run(*args, "--resume_from_checkpoint=latest")
    assert runs.read_record(tmp_path / "run")["run"]["status"] == "finished"
    assert_same_end(uninterrupted, tmp_path / "run", NUM_UPDATES)


def test_killed_after_a_checkpoint(uninterrupted, tmp_path):
    """SIGKILL leaves rows of the log that no checkpoint knows of; they must not appear twice."""
    args = arguments(uninterrupted.parent, tmp_path / "run")
    args = [arg for arg in args if not arg.startswith("--checkpointing_steps")]
    returned, _ = start_and_signal(signal.SIGKILL, 7, *args, "--checkpointing_steps=10")
    assert returned == -signal.SIGKILL
    assert runs.read_record(tmp_path / "run")["run"]["status"] == "running"
    runs.run(*args, "--checkpointing_steps=10", "--resume_from_checkpoint=latest")
    assert_same_end(uninterrupted, tmp_path / "run", NUM_UPDATES)


def test_two_processes_with_accumulation(tmp_path):
    """The same with two processes, from a checkpoint in the middle; each has random states of its own."""
    options = {"max_train_steps": 8, "train_batch_size": 8, "gradient_accumulation_steps": 2, "checkpointing_steps": 4}
    args = runs.tiny_arguments(tmp_path, dropout=0.2, **options)
    runs.run(*args, f"--output_dir={tmp_path / 'whole'}", processes=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-8")
    (tmp_path / "resumed" / "model_index.json").unlink()
    resume = ["--resume_from_checkpoint=latest", f"--output_dir={tmp_path / 'resumed'}"]
    runs.run(*args, *resume, processes=2)
    assert_same_end(tmp_path / "whole", tmp_path / "resumed", 8)
    message = runs.run(*args, *resume, "--gradient_accumulation_steps=3", processes=1, expect=2)
    assert "global_batch: 32 then, 24 now" in message


def test_stopping_two_processes(tmp_path):
    """A signal to one process stops both after the same update, with one checkpoint."""
    args = [*arguments(tmp_path, tmp_path / "run")]
    args[args.index("--train_batch_size=100")] = "--train_batch_size=50"
    ranks = started.start_ranks(runs.SCRIPT, *args, processes=2, env=runs.environment())
    runs.wait_for(lambda: has_rows(tmp_path / "run", 3), *ranks)
    ranks[1].send_signal(signal.SIGTERM)
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], outputs
    record = runs.read_record(tmp_path / "run")
    assert record["run"]["status"] == "cancelled"
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{record['train']['updates_done']}"
    runs.run(*args, "--resume_from_checkpoint=latest", processes=2)
    assert runs.read_record(tmp_path / "run")["run"]["status"] == "finished"
    rows, _ = runs.read_metrics(tmp_path / "run")
    assert [row["update"] for row in rows] == [6, 13, 20, 27, 34, 39]


def test_going_back_forgets_what_came_after(tmp_path):
    options = {"train_batch_size": 8, "max_train_steps": 6, "checkpoints_total_limit": 2}
    args = runs.tiny_arguments(tmp_path, output_dir=tmp_path / "run", **options)
    runs.run(*args, "--checkpointing_steps=2")
    log = tmp_path / "run" / "lrlab" / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"update": 6, "lo')  # a line that a power cut has torn
    runs.run(*args, "--checkpointing_steps=5", f"--resume_from_checkpoint={tmp_path / 'run' / 'checkpoint-4'}")
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert log.read_text() == whole


def test_stopped_while_finishing(tmp_path):
    """The weights are safe by then; what is missing is made by resuming."""
    options = {"train_batch_size": 8, "max_train_steps": 3, "distance_samples": 300, "num_inference_steps": 100}
    args = runs.tiny_arguments(tmp_path, output_dir=tmp_path / "run", **options)
    # The pipeline is saved first, then hundreds of samples are drawn.
    process = runs.start_and_wait_for((tmp_path / "run" / "model_index.json").exists, *args)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "--resume_from_checkpoint latest" in stderr
    assert runs.read_record(tmp_path / "run")["run"]["status"] == "cancelled"
    runs.run(*args, "--resume_from_checkpoint=latest")
    record = runs.read_record(tmp_path / "run")
    assert record["run"]["status"] == "finished"
    assert "resume" not in record["run"]["command"]
    assert len(record["run"]["starts"]) == 2


def test_the_schedule_and_the_density_did_react(uninterrupted):
    """Otherwise their states would not have been tested above."""
    rows, _ = runs.read_metrics(uninterrupted)
    assert rows[-1]["lr"] < rows[1]["lr"]
    held = parse_spec(runs.read_record(uninterrupted)["train"]["timestep_density"])[1]["densities"]
    assert max(held) > 1.5 * min(held)
