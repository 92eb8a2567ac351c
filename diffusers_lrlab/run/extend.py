"""`lrlab extend`: a run goes on past its end, with the curve that its schedule has over the new length or another one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LabError, is_first_process, must_be, printable
from ..core.files import folder_beside
from ..core.lock import holder_of
from ..core.progress import resolve_updates
from ..core.ranges import Range
from ..core.signatures import checked
from ..core.words import counted
from ..schedules.continued import RunCurve, agreeing_updates, followed_by, last_update_on_plateau, rewarmed, rewound
from ..training.resume import OtherSettings, read_state
from .child import Child
from .parent import Parent, read_parent

TOLERANCE = 0.01  # of the peak, between the rates of a rewound run and those of the longer schedule
REWARM = 0.05  # of the added updates
_LEAST_LEVEL = 0.01  # of the peak, for another schedule to go on from


@dataclass(frozen=True)
class Extension:
    """The curve of an extended run, the checkpoint that it starts from, and what that means in words."""

    curve: RunCurve
    at: int
    meaning: str


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
    Trains a run for longer, in a folder of its own; the run itself stays as it is.

    A schedule whose rates agree over both lengths up to a checkpoint goes on from there, and the result is that of a run
    which had the new length from the start, to the bit. Any other curve has to be asked for. The curve is printed first.

    Args:
        run (`str` or `Path`): The folder of a finished or stopped run.
        max_train_steps (`int`): The new length in optimizer updates, those of the run included.
        rewarm (`float`, *optional*): Updates, or a fraction of the added ones, in which the rate rises from that of the last
            update to that of the same schedule over the new length, which it then follows.
        then (`str`, *optional*): A schedule that takes over at the last checkpoint, scaled to the rate there.
        tolerance (`float`, *optional*, defaults to 0.01): Share of the peak by which the rates before the checkpoint may
            differ from those of the same schedule over the new length; 0 allows equal rates alone.
        output_dir (`str` or `Path`, *optional*): The new folder (default: that of the run, followed by the new length). If
            it holds the same extended run, training goes on.
        dry_run (`bool`, *optional*, defaults to `False`): Print the curve and train nothing.

    Returns:
        `Path`: the folder of the extended run; `None` after `dry_run`.

    Raises:
        LabError: for a run that cannot go on so; before anything is written, unless the data have changed.
    """
    path = Path(run)
    parent = read_parent(path)
    if (holder := holder_of(path)) is not None:
        raise LabError(f"{str(path)!r} is being written by {holder}. Wait for it, or stop it.")
    extension = choose_extension(parent, max_train_steps, rewarm, then, tolerance)
    out = Path(output_dir) if output_dir is not None else folder_beside(path, f"-{max_train_steps}")
    child = Child(parent, extension.at, extension.curve, out, "extended")
    return go_on(child, extension.meaning, dry_run)


def choose_extension(
    parent: Parent, num_updates: int, rewarm: float | None, then: str | None, tolerance: float
) -> Extension:
    """How a run goes on to this length; a `LabError` if that is not possible as asked."""
    curve, newest = parent.curve, parent.newest
    Range("[0, 1]").check("--tolerance", tolerance, "it is a share of the peak learning rate")
    if num_updates <= newest:
        raise must_be(
            "--max_train_steps", num_updates, f"more than {newest}", "it counts from the start of the run, and its newest "
            f"checkpoint has done {counted(newest, 'update')}",
        )  # fmt: skip
    if rewarm is not None and then is not None:
        raise LabError(f"--rewarm {rewarm:g} and --then {then} exclude each other. Give one of them.")
    if then is not None:
        return _followed(curve, num_updates, newest, then)
    longer = curve.lasting(num_updates)
    agree = agreeing_updates(curve, longer)
    if rewarm is not None:
        return _rewarmed(curve, num_updates, newest, rewarm, agree)
    if equal := [update for update in parent.checkpoints if update <= agree]:
        where = "at all updates" if agree == min(curve.num_updates, num_updates) else f"up to update {agree}"
        meaning = f"{curve.text!r} has the same rates over {curve.num_updates} and {counted(num_updates, 'update')} {where}"
        return Extension(longer, equal[-1], f"{meaning}: as if it had been that long from the start, to the bit")
    near = agreeing_updates(curve, longer, tolerance)
    if close := [update for update in parent.checkpoints if update <= near]:
        at = close[-1]
        apart = max(abs(curve.lrs[:at] - longer.lrs[:at])) / curve.lr
        meaning = (
            f"rewound: before update {at} the rates of {curve.text!r} over {curve.num_updates} and "
            f"{counted(num_updates, 'update')} differ by at most {apart:.2g} of the peak; it follows the longer one "
            "from there on"
        )
        return Extension(rewound(curve, num_updates, at), at, meaning)
    raise _no_checkpoint(parent, longer, agree, near, tolerance)


def _no_checkpoint(parent: Parent, longer: RunCurve, agree: int, near: int, tolerance: float) -> LabError:
    curve, newest = parent.curve, parent.newest
    has, would = curve.lrs[newest - 1] / curve.lr, longer.lrs[newest] / curve.lr
    oldest = min(parent.checkpoints)
    then = ", --then SPEC goes on with another one" if has >= _LEAST_LEVEL else ""
    return LabError(
        f"--max_train_steps {longer.num_updates}: {curve.text!r} over this length has the rates of the run only up to "
        f"update {agree} ({near} within {tolerance:g} of the peak), and its oldest checkpoint is from update {oldest}. At "
        f"update {newest} the rate of the run is {has:.2g} of the peak, that of the longer schedule {would:.2g}. Hint: "
        f"--rewarm raises it to the longer schedule{then}; next time, --keep_every N keeps checkpoints to go on from."
    )


def _rewarmed(curve: RunCurve, num_updates: int, at: int, rewarm: float, agree: int) -> Extension:
    if agree >= at:
        raise LabError(
            f"--rewarm {rewarm:g} has no effect: {curve.text!r} has the same rates over both lengths up to update {at}, so "
            "it goes on as it is. Leave it out."
        )
    Range("(0, inf)").check("--rewarm", rewarm, "it counts updates, or is a fraction of the added ones")
    num_warmup = max(1, resolve_updates(rewarm, num_updates - at, "--rewarm"))
    if at + num_warmup >= num_updates:
        raise must_be("--rewarm", rewarm, f"less than {counted(num_updates - at, 'update')}", "so many are added")
    new = rewarmed(curve, num_updates, at, num_warmup)
    end = float(new.lrs[at + num_warmup] / curve.lr)
    meaning = (
        f"re-warmed: in {counted(num_warmup, 'update')} from {curve.lrs[at - 1] / curve.lr:.2g} to {end:.2g} of the peak, "
        f"because {curve.text!r} over {counted(num_updates, 'update')} is there at update {at + num_warmup}; it follows "
        "that one to the end"
    )
    return Extension(new, at, meaning)


def _followed(curve: RunCurve, num_updates: int, at: int, then: str) -> Extension:
    level = float(curve.lrs[at - 1] / curve.lr)
    if level < _LEAST_LEVEL:
        branched = "; or branch from a checkpoint before the decay" if last_update_on_plateau(curve) else ""
        raise LabError(
            f"--then {then}: it starts from the present rate, and after update {at - 1} that is {level:.2g} of the peak, "
            f"too low to go on from. Hint: --rewarm raises it again{branched}."
        )
    meaning = (
        f"{then!r} takes over from {curve.text!r} at update {at}, over the rest of the run, from {level:.4g} of the peak"
    )
    return Extension(followed_by(curve, num_updates, at, then, level), at, meaning)


def go_on(child: Child, meaning: str, dry_run: bool = False) -> Path | None:
    """Announces a run that goes on from another one, makes its folder unless it is there, and trains it to its end."""
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
            f"The data of {str(parent.folder.path)!r} have changed since it was trained, so that its order of samples "
            f"cannot go on. Hint: put back what they were; then the same command goes on in {str(folder)!r}."
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
    rest = curve.lrs[at:]
    highest = at + int(rest.argmax())
    again = min(parent.newest, curve.num_updates) - at if child.how == "extended" else 0
    repeated = f", {again} of which the run has done already" if again > 0 else ""
    changed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in child.facts.get("changed", {}).items())
    lines = {
        child.how: f"{parent.folder.path} ({counted(parent.num_updates, 'update')}) from its checkpoint-{at}, to "
        f"{counted(curve.num_updates, 'update')}, in {child.output_dir}",
        "meaning": meaning,
        "curve": f"{rest[0]:.4g} first (update {at}), {rest.max():.4g} highest (update {highest}), {rest[-1]:.4g} last "
        f"(update {curve.num_updates - 1}); {curve.lrs[at - 1]:.4g} before",
        "rollback": _rollback_in_words(child),
        "work": f"{counted(curve.num_updates - at, 'update')}{repeated}",
        "log": _kept_rows_in_words(child),
        "optimizer": changed,
        "EMA": _memory_in_words(child),
    }
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items() if text)


def _rollback_in_words(child: Child) -> str:
    """A note on the factor that a divergence of the parent left on all later rates."""
    rollbacks = read_state(child.parent.checkpoints[child.at])["rollbacks"]
    if not rollbacks:
        return ""
    return f"{rollbacks[-1]['lr_factor']:g} times these rates, since the run went back to update {rollbacks[-1]['back_to']}"


def _kept_rows_in_words(child: Child) -> str:
    """A note on rows of the log that a run of the new length would not have."""
    config, end = child.config, child.parent.num_updates
    every = {config.logging_steps, config.validation_steps or 1}
    if child.at < end or not any(end % interval for interval in every):
        return ""
    return f"keeps its rows of update {end}, where the run ended and which no interval of the log reaches"


def _memory_in_words(child: Child) -> str:
    """A warning if the average of a branch remembers more updates than the cool-down has."""
    config, num = child.parent.config, child.curve.num_updates - child.at
    if child.how != "branched" or not config.use_ema:
        return ""
    memory = 1 / max(1 - config.ema_form.decay(child.at), 1e-9)
    if memory * 2 < num:
        return ""
    return (
        f"its average remembers about {counted(round(memory), 'update')}, the cool-down has {num}: averaged weights will "
        "show undecayed ones; compare the raw weights too"
    )
