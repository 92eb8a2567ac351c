"""
Continues a script's run past its end, as `lrlab extend` does for runs of this package.

The command is that of the run, with --extend before the script's name. It gives the schedule and the length that the run
had, which its checkpoints must confirm. The script then resumes from a copy of a checkpoint in a folder of its own, so that
the run stays as it is, and the optimizer's rates are set as by --lr_scheduler.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ...core.errors import LabError, is_first_process
from ...core.files import check_new_folder, folder_beside, write_text
from ...core.spec import merge_spec
from ...core.words import counted
from ...schedules.extension import TOLERANCE, choose_extension, rates_in_words
from ...schedules.resolve import describe_schedule
from ...schedules.schedule import Schedule
from ...timesteps.registries import TIMESTEP_SAMPLERS
from ..host.earlier_run import (
    Checkpoint,
    check_peak,
    check_rate,
    copy_checkpoint,
    curve_of,
    length_of,
    longer_arguments,
    read_checkpoints,
    schedule_of,
)
from ..host.hook import Hook, Host
from ..script.source import HostScript, NotRecognised, lines_of
from .clock import clock_of
from .lr_scheduler import LrSchedulerHook
from .resume import FILE as EXACT_STATE

_RECORD = "lrlab/extended.json"


def recognise(script: HostScript) -> str:
    if not script.calls("load_state") or not script.mentions("resume_from_checkpoint"):
        raise NotRecognised("it does not resume by --resume_from_checkpoint and accelerator.load_state")
    return f"it goes on from a checkpoint that accelerator.load_state reads ({lines_of(script.calls('load_state'))})"


def make(host: Host) -> Hook:
    try:
        recognise(host.script)
    except NotRecognised as reason:  # the script would train the same run again
        raise LabError(f"--extend cannot be used in this script: {reason}.") from None
    sampler = host.options.timestep_sampler
    if sampler and "curriculum" in TIMESTEP_SAMPLERS[merge_spec(sampler, None, TIMESTEP_SAMPLERS)[0]].traits:
        raise LabError(
            f"--timestep_sampler {sampler}: its curriculum follows the length of the run, so with --extend the earlier "
            "timesteps would come from a different density. Hint: start a run of the new length."
        )
    return ExtendHook(host)


class ExtendHook:
    """Changes the script's arguments as soon as it has parsed them, and has its optimizer driven."""

    def __init__(self, host: Host):
        self.run, self.clock, self.options = host.run, clock_of(host), host.options
        self.num_updates: int = host.options.extend
        self.option = f"--extend {self.num_updates}"
        self.driver: LrSchedulerHook | None = None  # from the script's arguments on
        self.folder = Path()  # of the extended run
        self._changed: dict[str, Any] = {}  # arguments of the script

    @property
    def num_seen(self) -> int:
        """Updates; a script that resumes at its end has none left."""
        is_at_end = (self.folder / f"checkpoint-{self.num_updates}").exists()
        return 0 if self.driver is None else self.driver.num_seen or int(is_at_end)

    def install(self) -> None:
        self.run.on_parsed.append(self._change_arguments)
        self.run.on_prepared.append(self._check_length)

    def _change_arguments(self, namespace: argparse.Namespace) -> None:
        given = vars(namespace)
        if not {"output_dir", "resume_from_checkpoint"} <= given.keys():
            return  # not the parser of the training
        if self.driver is None:
            self._begin(given)
        for name, value in self._changed.items():
            setattr(namespace, name, value)
        self.run.arguments |= self._changed

    def _begin(self, given: dict[str, Any]) -> None:
        options, parent = self.options, Path(given["output_dir"])
        num_before, (schedule, warmup) = length_of(given, options.num_updates), schedule_of(options, given)
        self._changed = dict(longer_arguments(given, num_before, self.num_updates))
        asked = {"schedule": describe_schedule(schedule), "warmup": warmup, "num_updates": num_before}
        asked |= {name: getattr(options, name) for name in ("extend", "rewarm", "then", "tolerance")}
        self.folder = folder_beside(parent, f"-{self.num_updates}")
        record = _read_record(self.folder, asked)
        if record is None or not any(self.folder.glob("checkpoint-*")):
            record = self._make(parent, given, schedule, asked)
        if is_first_process():
            lines = {"extended": f"{parent} ({counted(num_before, 'update')}) from its checkpoint of update "
                     f"{record['at']}, to {counted(self.num_updates, 'update')}, in {self.folder}"}  # fmt: skip
            lines |= {"meaning": record["meaning"], "rates": record["rates"]}
            sys.stderr.write("".join(f"diffusers_lrlab: {name:>8}  {text}\n" for name, text in lines.items()))
        self._changed |= {"output_dir": str(self.folder), "resume_from_checkpoint": "latest"}
        self.clock.num_updates = self.num_updates
        self.driver = LrSchedulerHook(self.clock, Schedule(**record["curve"]), record["warmup_updates"], self.option)
        self.driver.length, self.driver.first_update = (self.num_updates, self.option), record["at"]
        self.driver.install()

    def _make(self, parent: Path, given: dict[str, Any], schedule: Schedule, asked: dict[str, Any]) -> dict[str, Any]:
        """Chooses how the run goes on, and makes the folder in which it does: the checkpoint comes last."""
        options, checkpoints = self.options, read_checkpoints(parent, given["resume_from_checkpoint"])
        curve = curve_of(checkpoints[-1], schedule, asked["warmup"], asked["num_updates"])
        check_peak(checkpoints[-1], given, bool(options.lr_groups))
        check_rate(checkpoints[-1], curve)
        by_update = {checkpoint.update: checkpoint for checkpoint in checkpoints}
        tolerance = TOLERANCE if options.tolerance is None else options.tolerance
        extension = choose_extension(curve, by_update, self.num_updates, options.rewarm, options.then, tolerance, "--extend")
        chosen, new = by_update[extension.at], extension.curve
        check_rate(chosen, curve)
        as_if = self._as_if_in_words(chosen) if extension.is_as_from_start else ""
        record = {
            "asked": asked,
            "parent": str(parent),
            "at": extension.at,
            "meaning": extension.meaning + as_if,
            "rates": rates_in_words(new, extension.at),
            "curve": dataclasses.asdict(new.schedule),
            "warmup_updates": new.warmup_updates,
        }
        if is_first_process():
            if not (self.folder / _RECORD).exists():
                check_new_folder(self.folder, f"{self.option} writes its run there: move it away")
            write_text(self.folder / _RECORD, json.dumps(record, indent=2) + "\n")
            _copy_logs(parent / "lrlab", self.folder / "lrlab", extension.at)
            copy_checkpoint(chosen, self.folder)
        return record

    def _as_if_in_words(self, checkpoint: Checkpoint) -> str:
        same = ": as if it had been that long from the start"
        if self.options.exact_resume and (checkpoint.path / EXACT_STATE).exists():
            return f"{same}, to the bit"
        why = "its checkpoint was written without it" if self.options.exact_resume else "--exact_resume makes them exact"
        return f"{same}, except for data and random numbers, which the script does not continue ({why})"

    def _check_length(self) -> None:
        """Once the data of a script that counts epochs are prepared."""
        known = self.run.count_updates()
        if self.driver is not None and known not in (None, self.num_updates):
            before = self.options.num_updates
            raise LabError(
                f"--num_updates {before}: must be the number of updates that the run had; according to the script's data, "
                f"that is {before * known // self.num_updates}. The folder {str(self.folder)!r} can be removed."
            )

    def report(self) -> str:
        if self.driver is None:
            return f"{self.option}: the script parsed no --output_dir and --resume_from_checkpoint, so nothing was extended."
        return f"{self.option}: {self.folder}." if self.num_seen else self.driver.report()


def _read_record(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """How a folder goes on with a run, if it does; a `LabError` if that is not what is asked for."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    differing = [name for name, value in json.loads(json.dumps(asked)).items() if record["asked"].get(name) != value]
    if differing:
        then = ", ".join(f"{name} {record['asked'].get(name)}" for name in differing)
        raise LabError(
            f"--extend {asked['extend']}: {str(folder)!r} continues the run in another way ({then}). Hint: give that "
            "command, or move the folder away."
        )
    return record


def _copy_logs(parent: Path, folder: Path, at: int) -> None:
    """Copies the logs that later starts of a script continue, of validations the rows until the update `at`."""
    if (log := parent / "timesteps.parquet").exists():
        shutil.copyfile(log, folder / log.name)
    if (log := parent / "validation.jsonl").exists():
        rows = log.read_text(encoding="utf-8").splitlines()
        write_text(folder / log.name, "".join(f"{row}\n" for row in rows if json.loads(row)["update"] <= at))
