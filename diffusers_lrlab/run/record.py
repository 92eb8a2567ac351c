"""`run.json`: what was asked for, where it ran, and what became of it."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..core.environment import describe_environment, launch_command, peak_memory_mb
from ..core.errors import DiskFull, Interrupted, LabError, shortened, warn
from ..training.config import TrainingConfig
from ..training.explicit_options import as_call, as_command, program_registrations
from ..training.plan import Plan
from ..training.trainer import Trainer

_ROOM = 64 * 1024  # bytes, several times what a record takes


def start_record(asked: TrainingConfig, plan: Plan, accelerator: Accelerator, previous: dict[str, Any]) -> dict[str, Any]:
    """The record of a run that begins, or that goes on from one with the record `previous`."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    before, command = previous.get("run", {}), launch_command()
    names = before.get("program_registrations", [] if command or before else program_registrations(asked))
    return {
        "run": {
            "status": "running",
            "command": before.get("command", command or (as_call(asked) if names else as_command(asked))),
            # Of a run that was started by a program of somebody else's, and what no command knows of it.
            "call": before.get("call", None if command or before else as_call(asked)),
            "program_registrations": names,
            "started": before.get("started", now),
            "starts": [*before.get("starts", []), now],
            "seconds": before.get("seconds", 0.0),
            "ended": None,
        },
        "train": {
            "num_updates": plan.num_updates,
            "num_epochs": plan.num_epochs,
            "warmup_updates": plan.warmup_updates,
            "peak_learning_rate": plan.learning_rate,
            "global_batch": plan.layout.global_batch,
            "num_processes": accelerator.num_processes,
            "num_training_images": plan.num_images,
            "num_held_out_images": plan.num_held_out,
            "data_shape": plan.data_shape,
            "num_parameters": plan.num_parameters,
            "device": str(accelerator.device),
            "mixed_precision": accelerator.mixed_precision,
        },
        "config": plan.config.to_dict(),
        "meta": describe_environment(),
    }


def warn_of_changed_plugins(record: dict[str, Any], previous: dict[str, Any]) -> None:
    """For a run that goes on: whether other people's code is still that of its beginning."""
    then, now = ({one["sha256"] for one in of.get("meta", {}).get("plugins", [])} for of in (previous, record))
    if previous and then != now:
        warn("the code that --import loads is not the one that this run began with.")


def training_figures(trainer: Trainer) -> dict[str, Any]:
    """What is known of the training at any time."""
    run, divergence = trainer.run, trainer.divergence
    return {
        "updates_done": run.update,
        "training_seconds": run.training_seconds,
        "peak_memory_mb": peak_memory_mb(),
        "schedule_audit": run.audit.state_dict(),
        "skipped_updates": divergence.num_skipped,
        "rollbacks": divergence.rollbacks,
        "skipped_corrupt_images": run.data.skipped,
        "warnings": trainer.log.lr_warnings,
    }


@contextmanager
def recorded(trainer: Trainer, record: dict[str, Any]) -> Iterator[None]:
    """Whatever becomes of the run inside this block, the record says so and is written, also where the disk is full."""
    started = time.perf_counter()
    room = trainer.folder.lab / ".tmp-lrlab-room-for-the-record"
    if trainer.folder.is_writer:
        with suppress(OSError):  # a run that cannot write ends soon, and says so
            room.write_bytes(os.urandom(_ROOM))
    try:
        yield
        record["run"]["status"] = "finished"
    except (Interrupted, KeyboardInterrupt):
        record["run"]["status"] = "cancelled"
        raise
    except BaseException as error:
        record["run"]["status"] = "failed"
        record["run"]["error"] = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception):
            trainer.folder.check_there()  # a folder that was removed says more than the file that was then not found
        raise
    finally:
        is_whole = record["run"]["status"] == "finished"
        record["run"]["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        record["run"]["seconds"] += time.perf_counter() - started
        record["train"] |= training_figures(trainer)
        try:
            _write_end(trainer, record, room)
        except LabError:
            # What is wrong with the disk must not hide the error that ended the run.
            if is_whole:
                raise


def make_writable(record: dict[str, Any], inside: str = "") -> list[str]:
    """Replaces what JSON cannot hold by texts, and returns where that was, so that a record is always written."""
    found = []
    for name, value in list(record.items()):
        where = f"{inside}{name}"
        if not isinstance(name, str):
            record[str(name)] = record.pop(name)
        if isinstance(value, dict):
            found += make_writable(value, f"{where}.")
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            record[str(name)] = shortened(repr(value))
            found.append(where)
    return found


def _write_end(trainer: Trainer, record: dict[str, Any], room: Path) -> None:
    """The log by noise level, the manifest and, last, the record; `room` was kept for it, and is given up if need be."""
    problem: LabError | None = None
    try:
        if trainer.folder.is_writer:
            trainer.folder.check_log()
        if (observer := trainer.log.observer) is not None:
            record["train"]["loss_spikes"] = observer.log.num_spikes
            observer.write()
        if names := make_writable(record):
            raise LabError(f"JSON cannot hold {', '.join(names)} of the record, which has a text in their place.")
        if record["run"]["status"] == "finished":
            trainer.folder.write_manifest(record)
    except LabError as error:
        problem = error
        make_writable(record)
        if record["run"]["status"] == "finished":
            record["run"] |= {"status": "failed", "error": str(error)}
    try:
        trainer.folder.write_record(record)
    except DiskFull:
        with suppress(OSError):
            room.unlink()
        trainer.folder.write_record(record)
    finally:
        with suppress(OSError):
            room.unlink()
    if problem is not None:
        raise problem
