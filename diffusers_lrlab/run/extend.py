"""`lrlab extend`: a longer run, or a cool-down, that starts from a checkpoint of another run.

The new run resumes from the checkpoint of the other one into a folder of its own, where the same command continues it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.environment import launch_command
from ..core.errors import LabError, continued_by, did_you_mean, is_first_process, must_be, printable, warn
from ..core.files import folder_beside, is_locked
from ..core.manifest import find_damage
from ..core.options import names_where
from ..core.values import Range, checked
from ..core.words import counted
from ..data.options import BatchLayout
from ..hub.records import open_run, recorded_options
from ..schedules.expected import RunCurve, agreeing_updates
from ..schedules.registries import COOLDOWNS
from ..timesteps.registries import TIMESTEP_SAMPLERS
from ..training.config import ResolvedConfig, TrainingConfig
from ..training.plan import updates_between_validations
from ..training.resolve import resolve_config
from ..training.resume import read_state
from ..training.run_folder import LAB, RunFolder, checkpoint_update

DECAY = "1-sqrt"  # of a run whose schedule has no cool-down of its own
# Options of this start of a run that a run which continues from it keeps, besides those that repeat it.
_KEPT = ("plugins", "logger", "logging_dir")


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
    folder = RunFolder(Path(output_dir or folder_beside(path, f"-{curve.num_updates}")))
    options = parent.options_of(curve, folder.path)
    status = _status_of_child(folder, parent.facts(at), resolve_config(TrainingConfig(**options)).to_dict())
    if is_first_process():
        sys.stdout.write(printable(_described(parent, at, curve, folder.path)) + "\n")
        sys.stdout.flush()
    if not dry_run and status != "finished":
        _train(parent, at, options, folder)
    return None if dry_run else folder.path


def _train(parent: Parent, at: int, options: dict[str, Any], folder: RunFolder) -> None:
    from .train import Start, run_training

    if folder.checkpoints():
        options["resume_from_checkpoint"] = "latest"
    else:  # of a run that was killed before its first checkpoint, if any
        options["overwrite_output_dir"] = True
    begun = {"parent": parent.facts(at), "command": launch_command() or "lrlab extend"}
    with continued_by("give the same command again"):
        run_training(TrainingConfig(**options), Start(parent.checkpoints[at], {**parent.record, "run": begun}))


def _status_of_child(folder: RunFolder, facts: dict[str, Any], asked: dict[str, Any]) -> str | None:
    """The status of the run in a folder, if there is one; a `LabError` unless it started from there with that schedule."""
    path = folder.path
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    record = folder.read_record()
    run, config = record.get("run", {}), record.get("config", {})
    decides = ("lr_scheduler", "lr_scheduler_kwargs", "max_train_steps")
    differs = any(config.get(name) != asked[name] for name in decides)
    if differs or {**(run.get("parent") or {}), "folder": ""} != {**facts, "folder": ""}:
        raise LabError(f"--out {str(path)!r} holds something else. Hint: give a new folder.")
    return str(run["status"])


def _longer(parent: Parent, num_updates: int) -> tuple[int, RunCurve]:
    """The newest checkpoint up to which the schedule has the same rates over another length, and its curve there."""
    newest = max(parent.checkpoints)
    if num_updates <= newest:
        hint = f"it counts from the start of the run, and its newest checkpoint has done {counted(newest, 'update')}"
        raise must_be("--max_train_steps", num_updates, f"more than {newest}", hint)
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


def _described(parent: Parent, at: int, curve: RunCurve, out: Path) -> str:
    """Where a run starts, what it equals, and its curve."""
    lines = {
        "starts from": f"checkpoint-{at} of {parent.folder.path} ({counted(parent.num_updates, 'update')})",
        "equals": f"a run with {curve.text!r} over {counted(curve.num_updates, 'update')} from its start, to the bit",
        "learning rate": curve.in_words(at),
        "work": f"{counted(curve.num_updates - at, 'update')}, in {out}",
    }
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items())


@dataclass(frozen=True)
class Parent:
    """A run to continue from."""

    folder: RunFolder
    record: dict[str, Any]
    state: dict[str, Any]  # `trainer.json` of its newest intact checkpoint
    checkpoints: dict[int, Path]  # intact ones by update, in order
    config: ResolvedConfig

    @property
    def num_updates(self) -> int:
        """Its length."""
        return self.state["num_updates"]

    def facts(self, at: int) -> dict[str, Any]:
        """The entry `parent` of the record of a run that starts from the checkpoint at an update."""
        return {
            "folder": str(self.folder.path),
            "git_commit": self.record["meta"].get("git_commit"),
            "version": self.record["meta"]["versions"].get("diffusers_lrlab"),
            "update": at,
            "num_updates": self.num_updates,
            "schedule": self.curve.text,
        }

    @cached_property
    def curve(self) -> RunCurve:
        batch = self.state["global_batch"]
        schedule, peak = self.config.rates_for(batch)
        if schedule.follows_metric:
            raise LabError(
                f"{str(self.folder.path)!r}: the schedule {self.config.lr_scheduler!r} follows the validation loss, so its "
                "rates over another length are not known in advance. Hint: train with a schedule of the clock, such as "
                "constant_with_warmup or warmup_stable_decay."
            )
        warmup = self.record["train"]["warmup_updates"]
        return RunCurve(schedule, peak, self.config.start_momentum, warmup, self.num_updates)

    def options_of(self, curve: RunCurve, output_dir: Path) -> dict[str, Any]:
        """
        The options of a run with another curve. What depends on the length, such as a warm-up of 5 %, stays as it was; so
        the same options start a run that is equal from its beginning.
        """
        names = (*names_where(TrainingConfig, is_repeated=True), *_KEPT)
        options = {name: getattr(self.config, name) for name in names}
        layout = BatchLayout(self.config.train_batch_size, self.config.gradient_accumulation_steps, 1, 0)
        num_held_out = self.record["train"]["num_held_out_images"]
        every = updates_between_validations(self.config, layout, self.num_updates, num_held_out)
        if (curve.schedule.name, curve.schedule.kwargs) != (self.curve.schedule.name, self.curve.schedule.kwargs):
            given = {key: value for key, value in curve.schedule.kwargs.items() if value is not None}
            options |= {"lr_scheduler": curve.schedule.name, "lr_scheduler_kwargs": given}
        return options | {
            "max_train_steps": curve.num_updates,
            "num_epochs": None,
            "lr_warmup_steps": float(curve.warmup_updates),
            "validation_steps": every if num_held_out else self.config.validation_steps,
            "output_dir": str(output_dir),
        }


def read_parent(path: Path) -> Parent:
    """The run in a folder; raises a `LabError` if no other run can continue from it."""
    if not path.is_dir():
        hint = did_you_mean(str(path), (str(record.parents[1]) for record in path.parent.glob("*/lrlab/run.json")))
        hint = hint or "give the --output_dir of `lrlab train`"
        raise must_be("RUN", str(path), "the folder of a run", hint.strip(), got="a name that no folder has")
    if is_locked(path):
        raise LabError(f"{str(path)!r} is being written by another process. Wait for it, or stop it.")
    record, folder = open_run(path, lambda name: name.startswith(f"{LAB}/")), RunFolder(path)
    found = {checkpoint: find_damage(checkpoint) for checkpoint in folder.checkpoints()}
    for damage in filter(None, found.values()):
        warn(f"{damage}. This checkpoint is not used.")
    checkpoints = {checkpoint_update(checkpoint): checkpoint for checkpoint, damage in found.items() if damage is None}
    if not checkpoints:
        raise LabError(
            f"{str(path)!r} has no {'intact ' if found else ''}checkpoint to continue from: the weights alone lack the "
            "state of the optimizer and of the clock. Hint: keep the checkpoint-N folders of a run, or start from its "
            "weights with --pretrained_model_name_or_path."
        )
    state = read_state(checkpoints[max(checkpoints)])
    if state["num_processes"] > 1:
        raise LabError(
            f"{str(path)!r} was trained by {counted(state['num_processes'], 'process')}, and this command trains with one. "
            "Hint: start a run of the new length and schedule by `accelerate launch`."
        )
    options = recorded_options(record, str(path), state["config"], repeated=True, also=_KEPT)
    if options.get("max_train_steps") is not None:
        options.pop("num_epochs", None)
    config = resolve_config(TrainingConfig(**options | {"output_dir": str(path)}))
    if "curriculum" in TIMESTEP_SAMPLERS[config.timestep_sampler].traits:
        raise LabError(
            f"--timestep_sampler {config.timestep_sampler}: its curriculum follows the length of the run, which was "
            f"{counted(state['num_updates'], 'update')}. Hint: start a run of the new length."
        )
    return Parent(folder, record, state, checkpoints, config)
