"""Fixes the length of the LR schedule in diffusers' training scripts: a branch with one commit for each script."""

import fnmatch
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..core.errors import LabError, did_you_mean
from ..core.words import counted
from .checkout import Checkout, check_targets
from .lr_clock import DONOR, patched
from .lr_clock_tests import with_test
from .schedule_source import AlreadyRight, NotPatched

NAME = "lr-clock"
_SCRIPTS = ("examples/*/train_*.py", "examples/*/textual_inversion*.py")
_LEFT_OUT = ("examples/research_projects/*", "examples/community/*", "*flax*")


@dataclass(frozen=True)
class ScriptPatch:
    """The result for a script."""

    script: str
    state: str  # "patched", "right" or "refused"
    detail: str  # the fault of its schedule's length, or why there is no patch
    made: str = ""  # the new branch, or the file of the patch
    test: str | None = None  # the file with the new test


def lr_clock_patches(
    checkout: Path, script: str | None = None, out: Path | None = None, branch: str | None = None
) -> list[ScriptPatch]:
    """
    Fixes the length of the LR schedule in diffusers' training scripts, as in its merged pull request #8312.

    Args:
        checkout (`Path`): The root of a git checkout of diffusers.
        script (`str`, *optional*): The name of one script, such as `train_text_to_image_sdxl`; all of them by default.
        out (`Path`, *optional*): With `script`, a file for the change as `git format-patch` writes it; then nothing is
            written to the checkout.
        branch (`str`, *optional*): With `script`, the new branch for the commit, by default such as
            `lr-clock-text-to-image-sdxl`.

    Returns:
        `list` of [`ScriptPatch`]: one for each script.
    """
    check_targets(out, branch)
    if script is None and (out is not None or branch is not None):
        raise LabError("--out and --branch apply to one script. Name it with --script.")
    with tempfile.TemporaryDirectory() as scratch:
        git = Checkout(Path(checkout), Path(scratch))
        files = git.files("examples")
        donor = git.read(DONOR)
        if donor is None:
            raise LabError(
                f"HEAD of {str(checkout)!r} has no {DONOR}, from which the computation is taken. Check out its main branch."
            )
        found = [_patch_of(path, git, donor, files) for path in _chosen(script, files)]
        changes = {patch.script: change for patch, change in found if change}
        git.refuse_uncommitted({file for change in changes.values() for file in change}, everything=out is None)
        targets = {path: git.free_branch(branch or _branch(path)) for path in changes} if out is None else {}
        if out is not None:
            git.keep_apart()
        patches = []
        for patch, change in found:
            made = ""
            if change:
                commit = git.commit(change, _message(patch))
                made = targets.get(patch.script) or str(git.write_patch(commit, Path(out or "")))
                if out is None:
                    git("branch", made, commit)
            patches.append(ScriptPatch(patch.script, patch.state, patch.detail, made, patch.test))
        return patches


def _chosen(name: str | None, files: list[str]) -> list[str]:
    """The paths of the training scripts that use PyTorch, or of one of them."""
    paths = [path for path in files if any(fnmatch.fnmatch(path, pattern) for pattern in _SCRIPTS)]
    paths = sorted(path for path in paths if not any(fnmatch.fnmatch(path, pattern) for pattern in _LEFT_OUT))
    if name is None:
        return paths
    stems = {PurePosixPath(path).stem: path for path in paths}
    stem = PurePosixPath(name).name.removesuffix(".py")
    if stem not in stems or ("/" in name and not name.endswith(stems[stem])):
        raise LabError(
            f"There is no training script {name!r} in examples/.{did_you_mean(stem, stems)} Without --script, all "
            f"{len(stems)} are checked and listed."
        )
    return [stems[stem]]


def _patch_of(path: str, git: Checkout, donor: str, files: list[str]) -> tuple[ScriptPatch, dict[str, str]]:
    """The result for a script, and the files that change for it."""
    text = git.read(path) or ""
    try:
        new = patched(text, donor)
    except AlreadyRight as reason:
        return ScriptPatch(path, "right", str(reason)), {}
    except NotPatched as reason:
        return ScriptPatch(path, "refused", str(reason)), {}
    test, changed = with_test(path, text, git.read, files)
    return ScriptPatch(path, "patched", new.fault, test=test), {path: new.text, **changed}


def _branch(path: str) -> str:
    return f"{NAME}-{PurePosixPath(path).stem.removeprefix('train_').replace('_', '-')}"


def _message(patch: ScriptPatch) -> str:
    body = f"The length {patch.detail}. Compute it as #8312 did. For #8384."
    return f"Fix the length of the LR schedule in {PurePosixPath(patch.script).name}\n\n{textwrap.fill(body, 72)}\n"


def table(patches: list[ScriptPatch]) -> str:
    """A row for each script: the length of its schedule, and the result."""
    rows = ["| script | the length of its schedule | result |", "|---|---|---|"]
    for patch in patches:
        done = "unchanged" if patch.state == "right" else patch.state
        if patch.state == "patched":
            test = f"test in {patch.test}" if patch.test else "no test: none of the tiny models in diffusers' tests fits"
            done = f"{patch.made}, {test}"
        rows.append(f"| {patch.script} | {patch.detail} | {done} |")
    counts = {state: sum(patch.state == state for patch in patches) for state in ("patched", "right", "refused")}
    rows.append(
        f"\nOf {counted(len(patches), 'script')}: " + ", ".join(f"{count} {state}" for state, count in counts.items()) + "."
    )
    return "\n".join(rows)
