"""A schedule as a change of diffusers: a branch with one commit in a checkout of it, or a patch file.

The change is written straight into git's store, from the checkout's `HEAD`: no file of the working tree is touched, and
the branch that is checked out stays so.
"""

import tempfile
import textwrap
from pathlib import Path

from ..core.errors import LabError, did_you_mean
from ..schedules.registries import SCHEDULERS
from . import insert, render
from .checkout import Checkout, refuse_places
from .forms import FORMS


def list_upstream_schedules() -> list[str]:
    """The names that [`upstream_patch`] takes, besides their other names in the registry."""
    return list(FORMS)


def upstream_patch(name: str, checkout: Path, out: Path | None = None, branch: str | None = None) -> str | Path:
    """
    Adds a schedule to diffusers, with its tests and its documentation.

    The code needs nothing of this package. It is based on the commit that is checked out: to add a second schedule on top
    of the first, `git switch` to the branch of the first.

    Args:
        name (`str`): One of [`list_upstream_schedules`].
        checkout (`Path`): The root of a git checkout of diffusers.
        out (`Path`, *optional*): A file for the change in the form of `git format-patch`; then nothing is written into the
            checkout, not even into its `.git`.
        branch (`str`, *optional*): The new branch for the commit, by default such as `add-rex-schedule`. The working tree
            and the current branch stay as they are.

    Returns:
        `str` or `Path`: the name of the new branch, or `out`.
    """
    name = _offered(name)
    refuse_places(out, branch)
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
    if canonical not in FORMS:
        raise LabError(
            f"There is no form for diffusers of the schedule {name!r}.{did_you_mean(name, [*FORMS, 'lr-clock'])} "
            f"There is one of: {', '.join(FORMS)}. lr-clock is for diffusers' training scripts."
        )
    return canonical


def _message(name: str) -> str:
    body = f'`{render.function_name(name)}`, also as `get_scheduler("{name}", ...)`: {render.summary(name)}.'
    body = textwrap.fill(f"{body} {render.references(name)}", 72, break_long_words=False, break_on_hyphens=False)
    return f"Add the `{name}` learning rate schedule\n\n{body}\n"
