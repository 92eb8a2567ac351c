"""`lrlab extend`: continues a run past its end, with its schedule over the new length or with another schedule."""

from __future__ import annotations

import sys
from pathlib import Path

from ..core.errors import LabError, is_first_process, printable
from ..core.files import folder_beside
from ..core.lock import holder_of, remove_leftovers_if_free
from ..core.signatures import checked
from ..core.words import counted
from ..schedules.extension import TOLERANCE, choose_extension, rates_in_words
from ..training.resume import OtherSettings
from ..training.snapshots import inheritable
from .child import Child
from .parent import read_parent


@checked
def extend(
    run: str | Path,
    max_train_steps: int,
    rewarm: float | None = None,
    then: str | None = None,
    tolerance: float = TOLERANCE,
    output_dir: str | Path | None = None,
    dry_run: bool = False,
) -> Path | None:
    """
    Trains a run for longer, in a separate folder; the run itself does not change.

    A schedule whose rates agree over both lengths up to a checkpoint continues from there, and the result equals a run of
    the new length from the start, to the bit. Any other curve has to be requested. The curve is printed first.

    Args:
        run (`str` or `Path`): The folder of a finished or stopped run.
        max_train_steps (`int`): The new total length, in optimizer updates.
        rewarm (`float`, *optional*): Updates, or a fraction of the added ones, over which the rate rises from that of the
            last update to the same schedule over the new length, which it then follows.
        then (`str`, *optional*): A schedule that takes over at the last checkpoint, scaled to the rate there.
        tolerance (`float`, *optional*, defaults to 0.01): Largest difference, as a share of the peak, allowed between the
            rates before the checkpoint and those of the same schedule over the new length; 0 requires equal rates.
        output_dir (`str` or `Path`, *optional*): The new folder (default: that of the run, followed by the new length). If
            it holds the same extended run, training continues.
        dry_run (`bool`, *optional*, defaults to `False`): Print the curve without training.

    Returns:
        `Path`: the folder of the extended run; `None` after `dry_run`.

    Raises:
        LabError: for a run that cannot be continued this way; before anything is written, unless the data have changed.
    """
    path = Path(run)
    parent = read_parent(path)
    if (holder := holder_of(path)) is not None:
        raise LabError(f"{str(path)!r} is being written by {holder}. Wait for it, or stop it.")
    extension = choose_extension(parent.curve, parent.checkpoints, max_train_steps, rewarm, then, tolerance)
    out = Path(output_dir) if output_dir is not None else folder_beside(path, f"-{max_train_steps}")
    child = Child(parent, extension.at, extension.curve, out, "extended")
    return go_on(child, extension.meaning + (_as_if_in_words(child) if extension.is_as_from_start else ""), dry_run)


def go_on(child: Child, meaning: str, dry_run: bool = False) -> Path | None:
    """Announces a run that continues from another run, makes its folder unless it exists, and trains it to its end."""
    from .train import run_training

    parent = child.parent
    if (processes := parent.state["num_processes"]) > 1:
        raise LabError(
            f"{str(parent.folder.path)!r} was trained by {counted(processes, 'process')}, and this command trains with one. "
            "Hint: start a run of the new length and schedule by `accelerate launch`."
        )
    parent.check_timesteps(child.curve.num_updates, child.at)
    prepared = child.is_prepared()
    folder = child.output_dir
    if is_first_process():
        _say(describe_child(child, meaning))
    if dry_run:
        return None
    if prepared and _is_finished(folder):
        remove_leftovers_if_free(folder)
        _say(f"It is finished: {folder}")
        return folder
    if not prepared:
        child.prepare()
    try:
        run_training(child.config)
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


def _is_finished(folder: Path) -> bool:
    from ..training.run_folder import RunFolder

    return RunFolder(folder).is_finished()


def describe_child(child: Child, meaning: str) -> str:
    """The announcement: where a run comes from, what it means, and its curve."""
    curve, at, parent = child.curve, child.at, child.parent
    again = min(parent.newest, curve.num_updates) - at if child.how == "extended" else 0
    repeated = f", of which the run has already done {again}" if again > 0 else ""
    changed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in child.facts.get("changed", {}).items())
    lines = {
        child.how: f"{parent.folder.path} ({counted(parent.num_updates, 'update')}) from its checkpoint-{at}, to "
        f"{counted(curve.num_updates, 'update')}, in {child.output_dir}",
        "meaning": meaning,
        "curve": rates_in_words(curve, at, _factor_of_rollback(child)),
        "rollback": _rollback_in_words(child),
        "work": f"{counted(curve.num_updates - at, 'update')}{repeated}",
        "log": _kept_rows_in_words(child),
        "optimizer": changed,
        "EMA": _memory_in_words(child),
        "snapshots": _snapshots_in_words(child),
    }
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items() if text)


def _as_if_in_words(child: Child) -> str:
    """What the run equals; a run of another length may diverge elsewhere, or not at all."""
    exact = ", to the bit" if not child.rollbacks else ", except for what its rollback changed"
    return f": as if it had been that long from the start{exact}"


def _factor_of_rollback(child: Child) -> float:
    return float(child.rollbacks[-1]["lr_factor"]) if child.rollbacks else 1.0


def _rollback_in_words(child: Child) -> str:
    """A note on the factor that a divergence of the parent left on all later rates."""
    if not child.rollbacks:
        return ""
    back_to = child.rollbacks[-1]["back_to"]
    return (
        f"these rates are {_factor_of_rollback(child):g} times the schedule's, since the run went back to update {back_to}"
    )


def _kept_rows_in_words(child: Child) -> str:
    """A note on rows of the log that a run of the new length would not have."""
    config, end = child.config, child.parent.num_updates
    every = {config.logging_steps, config.validation_steps or 1}
    if child.at < end or not any(end % interval for interval in every):
        return ""
    return f"keeps its log rows of update {end}, which were written only because the run ended there"


def _snapshots_in_words(child: Child) -> str:
    """The snapshots of the parent that the run goes on with, for averages over its whole history."""
    if child.parent.config.posthoc is None:
        return ""
    num = len(inheritable(child.parent.folder, child.at))
    return f"{num} of the averages up to update {child.at} are copied; the rest of the run adds its own"


def _memory_in_words(child: Child) -> str:
    """A warning if the average of a branch remembers more updates than the cool-down has."""
    config, num = child.parent.config, child.curve.num_updates - child.at
    if child.how != "branched" or not config.use_ema:
        return ""
    memory = 1 / max(1 - config.ema_form.with_images(child.parent.state["global_batch"]).decay(child.at), 1e-9)
    if memory * 2 < num:
        return ""
    return (
        f"its average remembers about {counted(round(memory), 'update')}, but the cool-down has {num}: averaged weights "
        "will contain undecayed ones; compare the raw weights too"
    )
