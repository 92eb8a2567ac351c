"""`lrlab extend`: a longer run, or a cool-down, that starts from a checkpoint of another run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError, continued_by, is_first_process, must_be, printable
from ..core.files import folder_beside
from ..core.lock import is_locked, remove_leftovers_if_free
from ..core.options import names_where
from ..core.ranges import Range
from ..core.signatures import checked
from ..core.words import counted
from ..schedules.expected import RunCurve, agreeing_updates
from ..schedules.registries import COOLDOWNS
from ..training.config import ResolvedConfig, TrainingConfig
from ..training.resolve import resolve_config
from ..training.resume import OtherSettings
from ..training.run_folder import RunFolder
from .hand_over import hand_over
from .parent import Parent, read_parent

DECAY = "1-sqrt"  # of a run whose schedule has no cool-down of its own


@dataclass(frozen=True)
class Child:
    """A run that takes the state of another run after the update `at`, and continues with its own curve."""

    parent: Parent
    at: int
    curve: RunCurve
    output_dir: Path

    @property
    def config(self) -> ResolvedConfig:
        return resolve_config(TrainingConfig(**self.parent.options_of(self.curve, self.output_dir)))

    @property
    def facts(self) -> dict[str, Any]:
        """The entry `parent` of `run.json`."""
        parent = self.parent
        return {
            "folder": str(parent.folder.path),
            "git_commit": parent.record["meta"].get("git_commit"),
            "version": parent.record["meta"]["versions"].get("diffusers_lrlab"),
            "update": self.at,
            "num_updates": parent.num_updates,
            "schedule": parent.curve.text,
        }

    def exists(self) -> bool:
        """Whether the folder holds this run; raises a `LabError` if it holds anything else."""
        if not self.output_dir.exists() or (self.output_dir.is_dir() and not any(self.output_dir.iterdir())):
            return False
        record = RunFolder(self.output_dir).read_record()
        found = record.get("run", {}).get("parent") or {}
        if {**found, "folder": ""} != {**self.facts, "folder": ""} or _compared(record["config"]) != _compared(
            self.config.to_dict()
        ):
            raise LabError(f"--out {str(self.output_dir)!r} holds something else. Hint: give a new folder.")
        return True


@checked
def extend(
    run: str | Path,
    max_train_steps: int | None = None,
    at: int | None = None,
    cooldown: int | None = None,
    decay: str | None = None,
    output_dir: str | Path | None = None,
    dry_run: bool = False,
) -> Path | None:
    """
    Trains a run for longer, or cools it down from a checkpoint, in a separate folder; the run itself does not change.

    The new run starts from a checkpoint of the run, up to which both have the same learning rates. Its result is, to the
    bit, that of a run with the new length, or with the cool-down, from the start.

    Args:
        run (`str` or `Path`): The folder of a finished or stopped run.
        max_train_steps (`int`, *optional*): The new total length in optimizer updates, with the schedule of the run.
        at (`int`, *optional*): The update of a checkpoint to cool down from, while the learning rate is at its peak.
        cooldown (`int`, *optional*): Updates of the cool-down, with `at`.
        decay (`str`, *optional*): Shape of the cool-down (default: that of the run's own, else `1-sqrt`).
        output_dir (`str` or `Path`, *optional*): The new folder (default: that of the run, followed by the new length). If
            it holds the same run, training continues.
        dry_run (`bool`, *optional*, defaults to `False`): Print the curve without training.

    Returns:
        `Path`: the folder of the new run; `None` after `dry_run`.

    Raises:
        LabError: for a run that cannot be continued this way; before anything is written, unless the data have changed.
    """
    path = Path(run)
    parent = read_parent(path)
    if at is None and (cooldown is not None or decay is not None):
        raise LabError("--cooldown and --decay have no effect without --at. Hint: give --at UPDATE, of a checkpoint.")
    if (max_train_steps is None) == (at is None):
        raise LabError("lrlab extend needs either --max_train_steps N, or --at UPDATE --cooldown M.")
    if at is not None:
        curve = _cooled_down(parent, at, cooldown, decay)
    else:
        at, curve = _longer(parent, int(max_train_steps or 0))
    child = Child(parent, at, curve, Path(output_dir or folder_beside(path, f"-{curve.num_updates}")))
    return _train(child, dry_run)


def _longer(parent: Parent, num_updates: int) -> tuple[int, RunCurve]:
    """The newest checkpoint up to which the schedule has the same rates over another length, and its curve there."""
    if num_updates <= parent.newest:
        hint = f"it counts from the start of the run, and its newest checkpoint has done {counted(parent.newest, 'update')}"
        raise must_be("--max_train_steps", num_updates, f"more than {parent.newest}", hint)
    curve, longer = parent.curve, parent.curve.lasting(num_updates)
    agree = agreeing_updates(curve, longer)
    if equal := [update for update in sorted(parent.checkpoints) if update <= agree]:
        return equal[-1], longer
    raise LabError(
        f"--max_train_steps {num_updates}: the learning rates of {curve.text!r} depend on the length of the run, and agree "
        f"only up to update {agree}; the oldest checkpoint is from update {min(parent.checkpoints)}. Hint: start a run of "
        "the new length. One with --lr_scheduler constant_with_warmup or wsd, and with --keep_every, can be extended and "
        "cooled down."
    )


def _cooled_down(parent: Parent, at: int, cooldown: int | None, decay: str | None) -> RunCurve:
    curve = parent.curve
    Range("[1, 1e9]", whole=True).check("--cooldown", cooldown or 0, "it counts updates from --at on")
    if at not in parent.checkpoints:
        known = ", ".join(map(str, parent.checkpoints))
        raise must_be("--at", at, f"the update of a checkpoint of the run ({known})", "--keep_every N keeps checkpoints")
    own = "linear" if curve.schedule.name == "trapezoid" else str(curve.schedule.kwargs.get("decay_type", DECAY))
    if decay is not None and decay not in COOLDOWNS:
        raise must_be("--decay", decay, f"one of {', '.join(COOLDOWNS)}", "they are the cool-downs of warmup_stable_decay")
    branch = curve.cooled_down(at, int(cooldown or 0), decay or own)
    if at <= curve.warmup_updates or agreeing_updates(curve, branch) < at:
        raise LabError(
            f"--at {at}: must be on the plateau of a constant or a warmup_stable_decay schedule, got {curve.text!r} at "
            f"{curve.lrs[at - 1] / curve.lr:.4g} of its peak. Hint: give an earlier checkpoint after the warm-up, or start "
            "a run with --lr_scheduler constant_with_warmup."
        )
    return branch


def _train(child: Child, dry_run: bool) -> Path | None:
    """Announces a run that continues from another run, makes its folder unless it exists, and trains it to its end."""
    from .train import run_training

    parent, folder = child.parent, child.output_dir
    if is_locked(parent.folder.path):
        raise LabError(f"{str(parent.folder.path)!r} is being written by another process. Wait for it, or stop it.")
    if (processes := parent.state["num_processes"]) > 1:
        raise LabError(
            f"{str(parent.folder.path)!r} was trained by {counted(processes, 'process')}, and this command trains with one. "
            "Hint: start a run of the new length and schedule by `accelerate launch`."
        )
    parent.check_timesteps(child.curve.num_updates, child.at)
    exists = child.exists()
    if is_first_process():
        _say(describe_child(child))
    if dry_run:
        return None
    if exists and RunFolder(folder).is_finished():
        remove_leftovers_if_free(folder)
        _say(f"It is finished: {folder}")
        return folder
    if not exists:
        hand_over(parent, child.at, child.curve, child.config, child.facts, folder)
    try:
        with continued_by("give the same command again"):
            run_training(TrainingConfig(**parent.options_of(child.curve, folder), resume_from_checkpoint="latest"))
    except OtherSettings as error:
        if error.names != ["data"]:
            raise
        raise LabError(
            f"The data of {str(parent.folder.path)!r} have changed since it was trained, so its order of samples cannot "
            f"continue. Hint: restore the data, then repeat the command, which continues in {str(folder)!r}."
        ) from None
    return folder


def _say(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def describe_child(child: Child) -> str:
    """The announcement: where a run starts, what it equals, and its curve."""
    curve, at, parent = child.curve, child.at, child.parent
    again = min(parent.newest, curve.num_updates) - at
    same = parent.curve.schedule == curve.schedule
    repeated = f", of which the run has already done {again}" if same and again > 0 else ""
    lines = {
        "starts from": f"checkpoint-{at} of {parent.folder.path} ({counted(parent.num_updates, 'update')})",
        "equals": f"a run with {curve.text!r} over {counted(curve.num_updates, 'update')} from its start, to the bit",
        "learning rate": curve.in_words(at),
        "work": f"{counted(curve.num_updates - at, 'update')}{repeated}, in {child.output_dir}",
    }
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items())


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    """The options that make another run."""
    fixed = names_where(TrainingConfig, may_change_on_resume=False)
    return json.loads(json.dumps({name: config.get(name) for name in fixed}))
