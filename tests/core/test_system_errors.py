"""What the system does to a program, in words: disks that take no files, memory, killed processes."""

import errno
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from helpers import image_folder
from runs import read_metrics, read_record, run, start_and_wait_for, tiny_arguments
from tables import cases

from diffusers_lrlab.core.errors import DiskFull, LabError, system_errors_explained
from diffusers_lrlab.core.files import append_line, atomic_file, full_disk_explained

# The texts are those of torch 2.13, safetensors 0.6 and Linux.
DISKS = {
    "full, says Python": (OSError(errno.ENOSPC, "No space left on device"), "No room to write"),
    "full, says torch's stream": (RuntimeError("basic_ios::clear: iostream error"), "No room to write"),
    "full, says shutil": (
        shutil.Error([("a", "b", "[Errno 28] No space")]),
        r"No room .*weights.bin' \(No space left on device\)",
    ),
    "read-only, says safetensors": (Exception("I/O error: Read-only file system (os error 30)"), "Make the folder writable"),
    "broken": (OSError(errno.EIO, "Input/output error"), "Input/output error"),
}


@cases("name", DISKS)
def test_a_disk_that_does_not_take_a_file_is_explained(tmp_path, name):
    error, text = DISKS[name]
    with pytest.raises(DiskFull, match=text) as told, full_disk_explained(tmp_path / "weights.bin"):
        raise error
    assert "weights.bin" in str(told.value)
    assert str(told.value).endswith(", then give the same command again.")


def test_other_errors_are_not_taken_for_a_disk_that_is_full(tmp_path):
    with pytest.raises(FileNotFoundError), full_disk_explained(tmp_path / "weights.bin"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize("write", [lambda path: append_line(path, "row"), lambda path: _write(path)])
def test_a_disk_that_turned_read_only_is_named_although_nothing_can_be_removed(tmp_path, monkeypatch, write):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(DiskFull, match="Read-only file system"):
        write(tmp_path / "log.jsonl")


def _write(path):
    with atomic_file(path) as temporary:
        temporary.write_text("text")


class _Failing(torch.utils.data.Dataset):
    def __init__(self, failure):
        self.failure = failure

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.failure is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(self.failure)


# What a worker raises, or nothing if it is killed: what is said, and what is left as it is.
OF_WORKERS = {
    "killed": (None, LabError, r"has died \(DataLoader worker.*, then give the same command again\.$"),
    "no shared memory": (
        *("unable to allocate shared memory(shm) for file </torch_1>: Success (0)", LabError),
        r"failed \(RuntimeError: unable to .* fewer --dataloader_num_workers",
    ),
    "a mistake": ("tensors must have the same size", RuntimeError, "same size"),
    "a mistake in a folder of a like name": ("no image in /data/torch_2/0.png", RuntimeError, "no image in"),
}


@cases("name", OF_WORKERS)
def test_what_ends_a_process_that_decodes_images_is_explained(monkeypatch, name):
    # For so long it waits for the process afterwards: 5 s otherwise.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    failure, kind, text = OF_WORKERS[name]
    batches = iter(torch.utils.data.DataLoader(_Failing(failure), num_workers=1))
    with pytest.raises(kind, match=text), system_errors_explained():
        list(batches)
    batches._shutdown_workers()


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits_after_a_process_that_decodes_images_was_killed(tmp_path):
    options = [*tiny_arguments(tmp_path), f"--train_data_dir={image_folder(tmp_path / 'images')}", "--resolution=8"]
    options += ["--image_channels=1", "--train_batch_size=4", "--max_train_steps=40", "--checkpointing_steps=10"]
    options += ["--num_validation_images=4", "--in_memory_limit_mb=0", "--dataloader_num_workers=2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(*options, f"--output_dir={whole}")
    process = start_and_wait_for((killed / "checkpoint-10").exists, *options, f"--output_dir={killed}")
    psutil.Process(process.pid).children()[0].kill()
    _, error = process.communicate()
    assert process.returncode == 2, error
    assert "Traceback" not in error
    assert "A process that decodes images has died (DataLoader worker" in error
    record = read_record(killed)["run"]
    assert record["status"] == "failed"
    assert f"error: {record['error'].removeprefix('LabError: ')}" in error
    run(*options, f"--output_dir={killed}", "--resume_from_checkpoint=latest", "--dataloader_num_workers=0")
    weights = [(folder / "unet" / "diffusion_pytorch_model.safetensors").read_bytes() for folder in (whole, killed)]
    assert weights[0] == weights[1]
    assert [row["loss"] for row in read_metrics(whole)[0]] == [row["loss"] for row in read_metrics(killed)[0]]


def test_too_little_memory_is_explained():
    with pytest.raises(LabError, match=r"not enough memory .* Lower --train_batch_size"), system_errors_explained():
        torch.empty(2**50)
