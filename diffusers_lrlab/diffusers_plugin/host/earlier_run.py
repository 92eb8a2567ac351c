"""A script's finished or stopped run: the schedule and length that its command names, and its accelerate checkpoints."""

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.errors import LabError, must_be
from ...core.files import atomic_folder, number_in
from ...core.progress import Progress
from ...core.words import counted
from ...schedules.audit import TOLERANCE
from ...schedules.continued import RunCurve
from ...schedules.momentum import read_momentum
from ...schedules.resolve import describe_schedule, resolve_schedule
from ...schedules.schedule import Schedule
from .driven_optimizer import COUNT

OPTIMIZER = "optimizer.bin"
_LAST_WRITTEN = "random_states_0.pkl"  # by accelerate, so that a checkpoint with it is whole
_EPOCHS = ("num_epochs", "num_train_epochs")
# Parameters of diffusers' own schedules that scripts have as options of their own.
_OWN_OPTIONS = {"cosine_with_restarts": ("num_cycles", "lr_num_cycles"), "polynomial": ("power", "lr_power")}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of accelerate."""

    path: Path
    update: int  # optimizer updates done: less than the script's number if a gradient scaler skipped some
    group: dict[str, Any]  # settings of the optimizer's first group that is not frozen, with its rate at the coming update


# --- what the command says ------------------------------------------------------------------------------------------------


def schedule_of(options: argparse.Namespace, arguments: dict[str, Any]) -> tuple[Schedule, float]:
    """The schedule and the warm-up of a run, by the launcher's options or else by the script's arguments."""
    spec, warmup, kwargs = options.lr_scheduler, options.num_warmup_steps or 0, {}
    if spec is None:
        if (given := arguments.get("lr_scheduler")) is None:
            raise LabError(
                "--extend: the script has no --lr_scheduler that names its schedule. Hint: name it before the script, with "
                "--lr_scheduler SPEC and --num_warmup_steps W."
            )
        spec, warmup = str(getattr(given, "value", given)), arguments.get("lr_warmup_steps") or 0
        parameter, option = _OWN_OPTIONS.get(spec, ("", ""))
        kwargs = {parameter: arguments[option]} if arguments.get(option) is not None else {}
    schedule = resolve_schedule(spec, kwargs)
    if schedule.follows_metric:
        raise LabError(
            f"--extend: the schedule {spec!r} follows a loss, so its rates over another length are not known in advance."
        )
    return schedule, 0 if "no_warmup" in schedule.traits else warmup


def length_of(arguments: dict[str, Any], num_updates: int | None) -> int:
    """The updates of the run so far, according to its command."""
    given = num_updates if num_updates is not None else int(arguments.get("max_train_steps") or 0)
    if given > 0:
        return given
    option = "--max_train_steps" if "max_train_steps" in arguments else "--num_updates before the script's name"
    raise LabError(
        "--extend: the script's length is in epochs, whose updates are known only once its data are loaded. Hint: give the "
        f"script the number of updates that the run had, by {option}; the run printed it as its total optimization steps."
    )


def longer_arguments(arguments: dict[str, Any], num_before: int, num_updates: int) -> dict[str, int]:
    """The script's arguments for a longer run: in updates if it has an option for them, else in epochs."""
    if "max_train_steps" in arguments:
        return {"max_train_steps": num_updates}
    name = next((each for each in _EPOCHS if arguments.get(each)), None)
    if name is None:
        raise LabError("--extend: the script has neither --max_train_steps nor epochs, so its length cannot be changed.")
    epochs, rest = divmod(num_updates * int(arguments[name]), num_before)
    if rest:
        raise must_be(
            "--extend", num_updates, f"a whole number of epochs, each of {num_before / int(arguments[name]):g} updates",
            f"the script counts --{name}",
        )  # fmt: skip
    return {name: epochs}


# --- checkpoints ----------------------------------------------------------------------------------------------------------


def read_checkpoints(folder: Path, named: str | None) -> list[Checkpoint]:
    """The whole checkpoints in a script's output folder, or the one that it was asked to resume from, in order."""
    if named in (None, "", "latest"):
        found = [path for path in folder.glob("checkpoint-*") if number_in(path.name, "checkpoint-") is not None]
    else:
        found = [folder / Path(str(named)).name]
    whole = [path for path in found if (path / OPTIMIZER).is_file() and (path / _LAST_WRITTEN).is_file()]
    if not whole:
        what = f"no {found[0].name}" if len(found) == 1 and not found[0].exists() else "no whole checkpoint of accelerate"
        raise LabError(
            f"--extend: {str(folder)!r} has {what}, but a run continues from one whose optimizer is in one file "
            f"({OPTIMIZER}). Hint: give the command of the run, with its --output_dir."
        )
    return sorted(map(_read_checkpoint, whole), key=lambda checkpoint: checkpoint.update)


def _read_checkpoint(path: Path) -> Checkpoint:
    try:
        state = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        groups = state["param_groups"]
    except Exception as error:
        raise LabError(f"--extend: {str(path / OPTIMIZER)!r} cannot be read ({type(error).__name__}: {error}).") from None
    group = next((each for each in groups if each.get("initial_lr")), None)
    if group is None:
        raise LabError(f"--extend: the optimizer in {str(path)!r} had no schedule of torch, so its peak is unknown.")
    steps = next((each["step"] for each in state["state"].values() if "step" in each), 0)  # of Adam and its relatives
    update = int(group.get(COUNT, 0)) or int(steps) or int(path.name.removeprefix("checkpoint-"))
    return Checkpoint(path, update, group)


def curve_of(checkpoint: Checkpoint, schedule: Schedule, warmup: float, num_updates: int) -> RunCurve:
    """The curve of the run that wrote a checkpoint."""
    from ...schedules.expected import resolve_length

    group = checkpoint.group
    momentum = group.get("initial_momentum", read_momentum(group)) if schedule.sets_momentum else None
    num_warmup, total = resolve_length(schedule, warmup, num_updates)
    return RunCurve(schedule, float(group["initial_lr"]), momentum, num_warmup, total)


def check_rate(checkpoint: Checkpoint, curve: RunCurve) -> None:
    """Raises a `LabError` if a checkpoint continues at a different rate from the curve that the command gives it."""
    at, found = checkpoint.update, float(checkpoint.group["lr"])
    if at > curve.num_updates:
        raise LabError(
            f"--extend: {str(checkpoint.path)!r} has done {counted(at, 'update')}, but according to the command the run "
            f"has {curve.num_updates}. Hint: give the command that the run was started with."
        )
    held = COUNT in checkpoint.group  # by the launcher's --lr_scheduler, whose last rate stays
    clock = Progress(min(at, curve.num_updates - held), curve.num_updates, curve.warmup_updates)
    expected = float(curve.schedule.at(clock, curve.lr, curve.momentum)[0])
    if abs(found - expected) > TOLERANCE * curve.lr:
        raise LabError(
            f"--extend: {str(checkpoint.path)!r} continues at a learning rate of {found:.4g}, where "
            f"{describe_schedule(curve.schedule)!r} over {counted(curve.num_updates, 'update')}, {curve.warmup_updates} of "
            f"them warm-up, has {expected:.4g} at update {at}. Hint: give the command that the run was started with; if "
            "its schedule counted anything but updates, which --fix_lr_clock corrects, it cannot be extended."
        )


def check_peak(checkpoint: Checkpoint, arguments: dict[str, Any], has_groups: bool) -> None:
    """Raises a `LabError` for a --learning_rate that a checkpoint, which has its own, would replace."""
    asked, peak = arguments.get("learning_rate"), float(checkpoint.group["initial_lr"])
    if asked is None or has_groups or arguments.get("scale_lr") or abs(asked - peak) <= TOLERANCE * peak:
        return
    raise must_be(
        "--learning_rate", asked, f"that of the run, {peak:g}", "a checkpoint has its own; --then or --rewarm of the "
        "launcher change the rates",
    )  # fmt: skip


def copy_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Copies a checkpoint into a folder, with its number of updates in the optimizer, whose first step reads it there."""
    with atomic_folder(folder / checkpoint.path.name) as temporary:
        shutil.copytree(checkpoint.path, temporary, dirs_exist_ok=True)
        state = torch.load(temporary / OPTIMIZER, map_location="cpu", weights_only=True)
        for group in state["param_groups"]:
            group[COUNT] = checkpoint.update
        torch.save(state, temporary / OPTIMIZER)
