"""A schedule as a change of diffusers: a branch with one commit in a checkout of it, or a patch file.

The change is written straight into git's store, from the checkout's `HEAD`: no file of the working tree is touched, and
the branch that is checked out stays so.
"""

import os
import subprocess
import tempfile
import textwrap
from pathlib import Path

from ..core.errors import LabError, did_you_mean
from ..core.files import atomic_file
from ..schedules.registries import SCHEDULERS
from . import insert, render
from .forms import FORMS

# Set where git runs a hook or an alias; they would direct our commands to another repository.
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE")


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
    if out is not None and branch is not None:
        raise LabError(f"Got both the file {str(out)!r} and the branch {branch!r} to write to. Drop one.")
    if out is not None and Path(out).exists():
        raise LabError(f"{str(out)!r} exists, and is not overwritten. Remove it, or choose another file.")
    with tempfile.TemporaryDirectory() as scratch:
        git = _Git(Path(checkout), Path(scratch))
        git.refuse_uncommitted(everything=out is None)
        target = "" if out is not None else git.free_branch(branch or f"add-{name.replace('_', '-')}-schedule")
        if out is not None:
            git.keep_apart()
        commit = git.commit(insert.add_schedule(name, git.read), _message(name))
        if out is None:
            git("branch", target, commit)
            return target
        with atomic_file(Path(out)) as temporary:
            temporary.write_bytes(git.patch(commit))
        return Path(out)


def _offered(name: str) -> str:
    canonical = SCHEDULERS[name].name if name in SCHEDULERS else name
    if canonical not in FORMS:
        raise LabError(
            f"There is no form for diffusers of the schedule {name!r}.{did_you_mean(name, FORMS)} "
            f"There is one of: {', '.join(FORMS)}."
        )
    return canonical


def _message(name: str) -> str:
    body = f'`{render.function_name(name)}`, also as `get_scheduler("{name}", ...)`: {render.summary(name)}.'
    body = textwrap.fill(f"{body} {render.references(name)}", 72, break_long_words=False, break_on_hyphens=False)
    return f"Add the `{name}` learning rate schedule\n\n{body}\n"


class _Git:
    """A checkout of diffusers, seen through git; `scratch` is an empty folder for temporary files."""

    def __init__(self, checkout: Path, scratch: Path):
        self.checkout, self.scratch = checkout, scratch
        self.environment = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        problem = "it is not a folder"
        if checkout.is_dir():
            status, root, problem = self.attempt("rev-parse", "--show-toplevel")
            if status == 0 and Path(root.strip()).resolve() != checkout.resolve():
                problem = f"it is inside of the git repository {root.strip()}"
            elif status == 0 and self.read(insert.OPTIMIZATION) is None:
                problem = f"HEAD has no {insert.OPTIMIZATION}"
        if problem:
            raise LabError(
                f"{str(checkout)!r} is not the root of a git checkout of diffusers: {problem}. Make one with git clone "
                "https://github.com/huggingface/diffusers and give its folder."
            )

    def attempt(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Runs git; returns its status, its output and the last line of its error message."""
        # Bytes, since text mode would rewrite line ends; no optional locks, so that looking never writes.
        command = ["git", "--no-optional-locks", "-c", "user.useConfigOnly=true", "-C", str(self.checkout), *arguments]
        try:
            done = subprocess.run(command, input=stdin.encode(), capture_output=True, env=self.environment)
        except FileNotFoundError:
            raise LabError("The command git was not found. Install git and try again.") from None
        problem = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {done.returncode}"
        return done.returncode, done.stdout.decode(), problem if done.returncode else ""

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        """Runs git, which must succeed; returns its output without the final line break."""
        status, output, problem = self.attempt(*arguments, stdin=stdin)
        if status:
            raise LabError(f"git {arguments[0]} failed in {str(self.checkout)!r}: {problem}")
        return output.removesuffix("\n")

    def read(self, path: str) -> str | None:
        status, text, _ = self.attempt("cat-file", "blob", f"HEAD:{path}")
        return None if status else text

    def refuse_uncommitted(self, everything: bool) -> None:
        """An error for uncommitted changes in any tracked file, or only in those that the commit changes."""
        changed = self("status", "--porcelain", "--", *insert.FILES)
        if everything and not changed:
            changed = self("status", "--porcelain", "--untracked-files=no")
        if changed:
            files = ", ".join(line[3:] for line in changed.splitlines()[:3])
            raise LabError(
                f"{str(self.checkout)!r} has uncommitted changes ({files}), which the schedule's commit would not be based "
                "on. Commit them, or put them aside with git stash -u."
            )

    def free_branch(self, name: str) -> str:
        if self.attempt("check-ref-format", "--branch", name)[0]:
            raise LabError(f"{name!r} is not a name that git allows for a branch. Take one such as 'add-rex-schedule'.")
        if self.attempt("show-ref", "--verify", "--quiet", f"refs/heads/{name}")[0] == 0:
            raise LabError(
                f"{str(self.checkout)!r} already has a branch {name!r}. Choose another name with --branch, or delete it "
                f"with git branch -D {name}."
            )
        return name

    def keep_apart(self) -> None:
        """From here on new objects go to the scratch folder, and the checkout is only read."""
        objects = self.checkout / self("rev-parse", "--git-path", "objects")
        apart = self.scratch / "objects"
        apart.mkdir()
        self.environment |= {"GIT_OBJECT_DIRECTORY": str(apart), "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.resolve())}

    def commit(self, files: dict[str, str], message: str) -> str:
        """The hash of a new commit on top of `HEAD`, on no branch yet."""
        if self.attempt("var", "GIT_AUTHOR_IDENT")[0] or self.attempt("var", "GIT_COMMITTER_IDENT")[0]:
            raise LabError(
                "git does not know who you are, so it cannot sign the commit. Set git config --global user.name and "
                "git config --global user.email."
            )
        # An index of our own: the user's may hold something.
        self.environment["GIT_INDEX_FILE"] = str(self.scratch / "index")
        self("read-tree", "HEAD")
        for path, text in files.items():
            blob = self("hash-object", "-w", "--stdin", stdin=text)
            self("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
        # Partial clones lack objects that the change does not concern.
        tree = self("write-tree", "--missing-ok")
        return self("commit-tree", tree, "-p", "HEAD", stdin=message)

    def patch(self, commit: str) -> bytes:
        """A commit as a mail, whatever the user's settings for patches are."""
        plain = ("color", "ext-diff", "attach", "signature", "cover-letter")
        form = [*(f"--no-{option}" for option in plain), "--src-prefix=a/", "--dst-prefix=b/"]
        return (self("format-patch", "--stdout", "-1", *form, commit) + "\n").encode()
