"""`lrlab branch`: cool-downs from checkpoints of a run with a plateau, each a separate run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError, must_be
from ..core.extras import require_extra
from ..core.files import folder_beside
from ..core.plugins import loaded_plugins
from ..core.ranges import Range
from ..core.signatures import checked
from ..core.spec import parse_spec
from ..core.words import counted
from ..schedules.continued import agreeing_updates, cooled_down, is_on_plateau, last_update_on_plateau
from ..schedules.registries import COOLDOWNS
from .child import Child, check_changes
from .extend import go_on
from .parent import Parent, read_parent
from .side_by_side import run_side_by_side

DECAY = "1-sqrt"  # of a run whose schedule has no cool-down of its own


@dataclass(frozen=True)
class Branch:
    """A branch to train, and its description."""

    child: Child
    meaning: str


@checked
def branch(
    run: str | Path,
    at: int | str | Sequence[int],
    cooldown: float,
    decay: str | None = None,
    optimizer_kwargs: dict[str, Any] | None = None,
    output_dir: str | Path | None = None,
    workers: int = 1,
    address: str | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """
    Cools down a run with a plateau from its checkpoints, each in a separate folder; the run itself does not change.

    A branch at the update `n` is, to the bit, the run whose `warmup_stable_decay` begins its decay there.

    Args:
        run (`str` or `Path`): The folder of a run whose learning rate is constant for a while; it may still be training.
        at (`int`, `str` or `list` of `int`): Updates of its checkpoints, or `"latest"`.
        cooldown (`float`): Updates of a cool-down, or below 1 as a fraction of the whole branch.
        decay (`str`, *optional*): Shape of the cool-down (default: that of the run's own, else `1-sqrt`).
        optimizer_kwargs (`dict`, *optional*): Parameters of the optimizer during the cool-down, such as `{"beta2": 0.9995}`.
        output_dir (`str` or `Path`, *optional*): Folder of the branches (default: that of the run, followed by `-branches`).
        workers (`int`, *optional*, defaults to 1): Branches that are trained at the same time, each in a separate process.
        address (`str`, *optional*): Of a running Ray cluster to train on, or `"auto"`; its nodes share the folders.
        dry_run (`bool`, *optional*, defaults to `False`): Print the curves without training.

    Returns:
        `list` of `Path`: the folders of the branches, `DIR/at-UPDATE-cooldown-UPDATES`.

    Raises:
        LabError: for checkpoints that are missing or lie after the decay began, and for other impossible branches.
    """
    if address is not None:
        require_extra("ray", "--address")
    parent = read_parent(Path(run))
    out = Path(output_dir) if output_dir is not None else folder_beside(Path(run), "-branches")
    changed = check_changes(parent, optimizer_kwargs or {})
    shape = _decay_type(parent, decay)
    branches = [_branch(parent, update, cooldown, shape, changed, out) for update in _updates(parent, at)]
    Range("[1, 1024]", whole=True).check("--workers", workers, "it counts branches")
    if dry_run or (address is None and (workers == 1 or len(branches) == 1)):
        for each in branches:
            go_on(each.child, each.meaning, dry_run)
    else:
        _train_in_processes(branches, workers, address, shape)
    return [each.child.output_dir for each in branches]


def _updates(parent: Parent, at: int | str | Sequence[int]) -> list[int]:
    """The updates to branch at, each that of an intact checkpoint."""
    if at == "latest":
        return [parent.newest]
    given = at.split(",") if isinstance(at, str) else [at] if isinstance(at, int) else list(at)
    try:
        updates = list(dict.fromkeys(int(update) for update in given))
    except ValueError:
        raise must_be("--at", at, "UPDATE, latest or UPDATE,UPDATE,...", "such as 2000,4000") from None
    if missing := [update for update in updates if update not in parent.checkpoints]:
        known = ", ".join(map(str, parent.checkpoints))
        raise must_be(
            "--at", missing[0], f"the update of a checkpoint of the run ({known})",
            "--keep_every N keeps checkpoints to branch from",
        )  # fmt: skip
    if not updates:
        raise must_be("--at", at, "UPDATE, latest or UPDATE,UPDATE,...", "such as 2000,4000")
    return updates


def _decay_type(parent: Parent, decay: str | None) -> str:
    schedule = parent.curve.schedule
    own = "linear" if schedule.name == "trapezoid" else str(schedule.kwargs.get("decay_type", DECAY))
    if decay is not None and decay not in COOLDOWNS:
        raise must_be("--decay", decay, f"one of {', '.join(COOLDOWNS)}", "they are the cool-downs of warmup_stable_decay")
    return decay or own


def _branch(parent: Parent, at: int, cooldown: float, shape: str, changed: dict[str, Any], out: Path) -> Branch:
    curve = parent.curve
    Range("(0, inf)").check("--cooldown", cooldown, "it counts updates, or is a share of the branch")
    if cooldown >= 1 and cooldown != int(cooldown):
        raise must_be("--cooldown", cooldown, "a whole number of updates, or a fraction in (0, 1)", "such as 0.2")
    num_decay = int(cooldown) if cooldown >= 1 else max(1, round(cooldown / (1 - cooldown) * at))
    if not is_on_plateau(curve, at):
        last = last_update_on_plateau(curve)
        where = f"its last update of a plateau is {last}" if last else "it has no plateau"
        if at <= curve.warmup_updates:
            where = f"its warm-up lasts until update {curve.warmup_updates}"
        raise LabError(
            f"--at {at}: must be on a plateau of {curve.text!r}, got a learning rate that is "
            f"{curve.lrs[at - 1] / curve.lr:.4g} of the peak and moving: {where}. Hint: branch before the decay; a trunk "
            "for branches is a run with --lr_scheduler constant_with_warmup."
        )
    new = cooled_down(curve, at, num_decay, shape)
    child = Child(parent, at, new, out / f"at-{at}-cooldown-{num_decay}", "branched", changed)
    as_if = ""
    if not changed and agreeing_updates(curve, new) >= at:
        as_if = f", identical to the bit to a run with {new.text!r} from the start"
    meaning = f"the rate of update {at - 1}, cooled down by {shape} in {counted(num_decay, 'update')}{as_if}"
    return Branch(child, meaning)


def _train_in_processes(branches: list[Branch], workers: int, address: str | None, shape: str) -> None:
    """Trains branches in processes, so many at a time; raises a `LabError` for those that failed, once all have ended."""
    statuses = run_side_by_side([_command(each.child, shape) for each in branches], workers, address)
    if failed := [str(each.child.output_dir) for each, status in zip(branches, statuses, strict=True) if status]:
        raise LabError(
            f"{counted(len(failed), 'branch')} did not finish: {', '.join(failed)}. Repeat the command to continue."
        )


def _command(child: Child, shape: str) -> list[str]:
    num_decay = child.curve.num_updates - child.at
    words = ["branch", str(child.parent.folder.path), "--at", str(child.at)]
    words += ["--cooldown", str(num_decay), "--decay", shape, "--out", str(child.output_dir.parent)]
    given = ",".join(f"{name}={value}" for name, value in child.changed.items())
    names = ",".join(plugin["name"] for plugin in loaded_plugins())
    return words + (["--with", given] if given else []) + (["--import", names] if names else [])


def parse_changes(text: str | None) -> dict[str, Any]:
    """`beta2=0.9995,weight_decay=0` as parameters of an optimizer."""
    if text is None:
        return {}
    if "=" not in text:
        raise must_be("--with", text, "key=value,key=value", "such as beta2=0.9995")
    return parse_spec(f"with:{text}")[1]
