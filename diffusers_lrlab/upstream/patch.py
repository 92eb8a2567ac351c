"""A schedule as a change to diffusers: a branch with one commit in a checkout, or a patch file.

The change goes directly into git's object store, based on the checkout's `HEAD`: the working tree and the current branch
do not change.
"""

import tempfile
import textwrap
from pathlib import Path

from ..core.errors import LabError, did_you_mean
from ..schedules.registries import SCHEDULERS
from . import insert, render
from .bodies import BODIES
from .checkout import Checkout, check_targets
from .trainer_changes import CHANGES


def list_upstream_schedules() -> list[str]:
    """The names that [`upstream_patch`] takes; their aliases in the registry work too."""
    return list(BODIES)


def upstream_patch(name: str, checkout: Path, out: Path | None = None, branch: str | None = None) -> str | Path:
    """
    Adds a schedule to diffusers, with its tests and its documentation.

    The code does not need this package. It is based on the current commit: to add a second schedule on top of the first,
    `git switch` to the branch of the first.

    Args:
        name (`str`): One of [`list_upstream_schedules`].
        checkout (`Path`): The root of a git checkout of diffusers.
        out (`Path`, *optional*): A file for the change as `git format-patch` writes it; then nothing is written to the
            checkout, not even to its `.git`.
        branch (`str`, *optional*): The new branch for the commit, by default such as `add-rex-schedule`. The working tree
            and the current branch stay as they are.

    Returns:
        `str` or `Path`: the name of the new branch, or `out`.
    """
    name = _offered(name)
    check_targets(out, branch)
    with tempfile.TemporaryDirectory() as scratch:
        git = Checkout(Path(checkout), Path(scratch))
        git.refuse_uncommitted(insert.FILES, everything=out is None)
        target = "" if out is not None else git.free_branch(branch or f"add-{name.replace('_', '-')}-schedule")
        if out is not None:
            git.keep_apart()
        commit = git.commit(insert.add_schedule(name, git.read), _message(name))
        if out is not None:
            return git.write_patch(commit, Path(out))
        git("branch", target, commit)
        return target


def _offered(name: str) -> str:
    canonical = SCHEDULERS[name].name if name in SCHEDULERS else name
    if canonical not in BODIES:
        raise LabError(
            f"The schedule {name!r} cannot be patched into diffusers."
            f"{did_you_mean(name, [*BODIES, 'lr-clock', *CHANGES])} Available: {', '.join(BODIES)}; lr-clock, for "
            f"diffusers' training scripts; and for other trainers {', '.join(CHANGES)}."
        )
    return canonical


def _message(name: str) -> str:
    body = f'`{render.function_name(name)}`, also as `get_scheduler("{name}", ...)`: {render.summary(name)}.'
    body = textwrap.fill(f"{body} {render.references(name)}", 72, break_long_words=False, break_on_hyphens=False)
    return f"Add the `{name}` learning rate schedule\n\n{body}\n"
