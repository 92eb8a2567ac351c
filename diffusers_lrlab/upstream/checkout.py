"""A git checkout of diffusers or of a trainer, read at its `HEAD` and changed without touching its working tree."""

import ast
import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LabError
from ..core.files import atomic_file

OPTIMIZATION = "src/diffusers/optimization.py"
# Set by git for hooks and aliases; they would redirect our commands to another repository.
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE")


@dataclass(frozen=True)
class Project:
    """A project that patches are made for; `marker` is a file by which its checkout is recognized."""

    name: str
    url: str
    marker: str


DIFFUSERS = Project("diffusers", "https://github.com/huggingface/diffusers", OPTIMIZATION)


class Checkout:
    """A checkout of a project; `scratch` is an empty folder for temporary files."""

    def __init__(self, checkout: Path, scratch: Path, project: Project = DIFFUSERS):
        self.checkout, self.scratch = checkout, scratch
        self.environment = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        problem = "it is not a folder"
        if checkout.is_dir():
            status, root, problem = self.attempt("rev-parse", "--show-toplevel")
            if status == 0 and Path(root.strip()).resolve() != checkout.resolve():
                problem = f"it is inside the git repository {root.strip()}"
            elif status == 0 and self.read(project.marker) is None:
                problem = f"HEAD has no {project.marker}"
        if problem:
            raise LabError(
                f"{str(checkout)!r} is not the root of a git checkout of {project.name}: {problem}. Make one with git "
                f"clone {project.url} and give its folder."
            )

    def attempt(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Runs git; returns its status, its output and the last line of its error message."""
        # Bytes, since text mode would change line endings; no optional locks, so that reading never writes.
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

    def files(self, folder: str) -> list[str]:
        return self("ls-tree", "-r", "-z", "--name-only", "HEAD", f"{folder}/").rstrip("\0").split("\0")

    def refuse_uncommitted(self, files: Collection[str], everything: bool) -> None:
        """An error for uncommitted changes in any tracked file, or only in the files of the commit."""
        changed = self("status", "--porcelain", "--", *files)
        if everything and not changed:
            changed = self("status", "--porcelain", "--untracked-files=no")
        if changed:
            shown = ", ".join(line[3:] for line in changed.splitlines()[:3])
            raise LabError(
                f"{str(self.checkout)!r} has uncommitted changes ({shown}), which the commit would not include. "
                "Commit them, or stash them with git stash -u."
            )

    def free_branch(self, name: str) -> str:
        if self.attempt("check-ref-format", "--branch", name)[0]:
            raise LabError(f"{name!r} is not a valid branch name for git. Use one such as 'add-rex-schedule'.")
        if self.attempt("show-ref", "--verify", "--quiet", f"refs/heads/{name}")[0] == 0:
            raise LabError(
                f"{str(self.checkout)!r} already has a branch {name!r}. Choose another name with --branch, or delete it "
                f"with git branch -D {name}."
            )
        return name

    def keep_apart(self) -> None:
        """Redirects new objects to the scratch folder, so that the checkout is only read."""
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
        # A separate index, since the user's may have staged changes.
        self.environment["GIT_INDEX_FILE"] = str(self.scratch / "index")
        self("read-tree", "HEAD")
        for path, text in files.items():
            blob = self("hash-object", "-w", "--stdin", stdin=text)
            self("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
        # Partial clones lack unrelated objects.
        tree = self("write-tree", "--missing-ok")
        return self("commit-tree", tree, "-p", "HEAD", stdin=message)

    def write_patch(self, commit: str, out: Path) -> Path:
        """Writes a commit as a patch, independent of the user's settings for patches."""
        plain = ("color", "ext-diff", "attach", "signature", "cover-letter")
        options = [*(f"--no-{option}" for option in plain), "--src-prefix=a/", "--dst-prefix=b/"]
        with atomic_file(out) as temporary:
            temporary.write_bytes((self("format-patch", "--stdout", "-1", *options, commit) + "\n").encode())
        return out


def check_targets(out: Path | None, branch: str | None) -> None:
    """An error for a file and a branch at once, and for a file that exists."""
    if out is not None and branch is not None:
        raise LabError(f"Got both the file {str(out)!r} and the branch {branch!r} to write to. Remove one.")
    if out is not None and Path(out).exists():
        raise LabError(f"{str(out)!r} exists and is not overwritten. Remove it, or choose another file.")


def parse_python(path: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise LabError(f"{path} of this checkout is not valid Python (line {error.lineno}). Fix it first.") from None
