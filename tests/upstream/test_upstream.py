"""A schedule as a change of diffusers: in a small repository of its shape and, with DIFFUSERS_CHECKOUT, in a real one."""

import ast
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tables import cases

from diffusers_lrlab import LabError, lr_curve
from diffusers_lrlab.core.progress import Progress
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.resolve import resolve_schedule
from diffusers_lrlab.upstream.bodies import BODIES
from diffusers_lrlab.upstream.insert import FILES, OPTIMIZATION, TESTS, TUTORIAL
from diffusers_lrlab.upstream.patch import list_upstream_schedules, upstream_patch
from diffusers_lrlab.upstream.render import function_source

INSTALLED = Path(importlib.util.find_spec("diffusers").origin).parent
NAMES = list_upstream_schedules()
BRANCHES = {name: f"add-{name.replace('_', '-')}-schedule" for name in NAMES}

PYPROJECT = """\
[tool.ruff]
line-length = 119

[tool.ruff.lint]
ignore = ["C901", "E501", "E721", "E741", "F402", "F823"]
select = ["C", "E", "F", "I", "W"]

[tool.ruff.lint.isort]
lines-after-imports = 2
known-first-party = ["diffusers"]

[tool.ruff.format]
quote-style = "double"
indent-style = "space"
skip-magic-trailing-comma = false
line-ending = "auto"
"""
TUTORIAL_TEXT = """\
# Train a diffusion model 🤗

```py
>>> import torch
```

First, you'll need an optimizer and a learning rate scheduler:

```py
>>> from diffusers.optimization import get_cosine_schedule_with_warmup

>>> lr_scheduler = get_cosine_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=5, num_training_steps=10)
```

Then, you'll need a way to evaluate the model.

```py
>>> from diffusers import DDPMPipeline
```
"""
CURVES = """
import json, sys, torch
try:
    import diffusers_lrlab
except ImportError:
    pass
else:
    raise SystemExit("the lab is there")
from diffusers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType, get_scheduler

curves = []
for name, kwargs, warmup, total, lr in json.load(sys.stdin):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    clock = {"num_warmup_steps": warmup, "num_training_steps": total}
    if kwargs:
        scheduler = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)](optimizer, **clock, **kwargs)
    else:
        scheduler = get_scheduler(name, optimizer, **clock)
    curves.append([])
    for _ in range(total + 5):
        curves[-1].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
print(json.dumps(curves))
"""


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def identify(folder):
    git(folder, "config", "user.name", "Ada Lovelace")
    git(folder, "config", "user.email", "ada@example.org")
    return folder


def commit_all(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "A commit")


def small_diffusers(folder):
    """A repository with the real optimization.py and the least around it that lets it be imported."""
    texts = {
        OPTIMIZATION: (INSTALLED / "optimization.py").read_text(),
        "src/diffusers/__init__.py": "",
        "src/diffusers/utils/__init__.py": "from . import logging\n",
        TUTORIAL: TUTORIAL_TEXT,
        "tests/__init__.py": "",
        "tests/others/__init__.py": "",
        "pyproject.toml": PYPROJECT,
    }
    for module in ("logging", "distributed_utils"):
        texts[f"src/diffusers/utils/{module}.py"] = (INSTALLED / "utils" / f"{module}.py").read_text()
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit_all(identify(folder))
    return folder


def clone_of_real_diffusers(folder):
    """What the change concerns, from the checkout that DIFFUSERS_CHECKOUT names."""
    source = os.environ.get("DIFFUSERS_CHECKOUT")
    if not source:
        pytest.skip("DIFFUSERS_CHECKOUT does not name a checkout of diffusers")
    git(folder.parent, "clone", "--quiet", "--shared", "--no-checkout", source, str(folder))
    git(folder, "sparse-checkout", "set", "src/diffusers", "tests/others", "docs/source/en/tutorials")
    git(folder, "checkout", "--quiet", "-B", "main", "HEAD")
    return identify(folder)


def without_the_lab(folder, *arguments, stdin=None):
    """Runs Python in a checkout, where importing the lab fails."""
    blocker = folder / ".git" / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "diffusers_lrlab.py").write_text('raise ImportError("blocked")')
    environment = os.environ | {"PYTHONPATH": f"{blocker}{os.pathsep}{folder / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_their_formatter_agrees(folder):
    paths = [path for path in FILES if path.endswith(".py")]
    for command in (["check"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", *paths], capture_output=True, text=True, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr


def snapshot(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True, scope="module")
def _no_settings_of_this_machine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return small_diffusers(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkout(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "diffusers")
    git(tmp_path / "diffusers", "status")  # git notes the copies' times now
    return tmp_path / "diffusers"


@pytest.fixture(scope="module", params=["small", "real"])
def stack(request, tmp_path_factory):
    """A checkout with every schedule, each added on top of the one before."""
    folder = tmp_path_factory.mktemp("stack") / "diffusers"
    if request.param == "real":
        clone_of_real_diffusers(folder)
    else:
        folder.mkdir()
        small_diffusers(folder)
    for name in NAMES:
        branch = upstream_patch(name, folder)
        assert branch == BRANCHES[name]
        git(folder, "switch", "--quiet", branch)
    return folder


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_generated_tests_pass_without_the_lab(stack):
    output = without_the_lab(stack, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", TESTS)
    rows = sum(2 + len(form.examples) + 1 + len(form.refused) for form in BODIES.values())
    assert f"{rows} passed" in output


def test_their_formatter_agrees_with_all_schedules_together(stack):
    assert_their_formatter_agrees(stack)


def test_only_three_files_differ_and_nothing_of_them_is_lost(stack):
    assert sorted(git(stack, "diff", "--name-only", "main").splitlines()) == sorted(FILES)
    removed = [line for line in git(stack, "diff", "main").splitlines() if re.match(r"-(?!--)", line)]
    assert removed == []


def keyword_sets():
    """Arguments for every name: each alone at several values, each together with a floor, and pairs that interact."""
    values = {
        "warmup_stable_decay": {
            "decay_type": SCHEDULERS["warmup_stable_decay"].parameters[2].choices,
            "num_decay_steps": (1, 4, 10),
            "num_stable_steps": (0, 1, 9),
            "num_cycles": (0.5, 0.8, 2.0),
        },
        "rex": {"d": (0.0, 0.3, 0.5, 0.99)},
        "inverse_sqrt": {"timescale": (1, 7, 10_000)},
        "cosine_with_min_lr": {"num_cycles": (0.25, 0.5, 3.0)},
        "step": {"step_size": (1, 4, 100), "gamma": (0.1, 0.97, 1.0)},
        "exponential": {"gamma": (0.1, 0.97, 1.0)},
        "trapezoid": {"num_decay_steps": (1, 4, 10)},
    }
    for name, own in values.items():
        yield name, {}
        for (key, choices), floor in itertools.product(own.items(), (None, 0.0, 0.15, 1.0)):
            for choice in choices:
                yield name, {key: choice} | ({} if floor is None else {"min_lr_ratio": floor})
    for stable, decay, kind in itertools.product((0, 2, 4), (1, 6), values["warmup_stable_decay"]["decay_type"]):
        yield "warmup_stable_decay", {"num_stable_steps": stable, "num_decay_steps": decay, "decay_type": kind}
    yield "step", {"step_size": 3, "gamma": 0.5, "min_lr_ratio": 0.2}


@pytest.mark.slow
def test_the_curves_are_the_labs(stack):
    sizes = ((0, 13), (1, 13), (3, 13), (20, 101))
    cases = [(name, kwargs, *size, 0.37) for name, kwargs in keyword_sets() for size in sizes]
    assert {name for name, *_ in cases} == set(NAMES)
    theirs = json.loads(without_the_lab(stack, "-c", CURVES, stdin=json.dumps(cases)))
    for (name, kwargs, warmup, total, lr), curve in zip(cases, theirs, strict=True):
        ours = resolve_schedule(name, kwargs).at(Progress(np.arange(total + 5), total, warmup), lr)[0]
        np.testing.assert_array_equal(ours[:total], lr_curve(name, lr, warmup, total, kwargs))
        np.testing.assert_allclose(curve, ours, rtol=0, atol=1e-12, err_msg=f"{name} {kwargs} {warmup} {total}")


@cases("name", NAMES)
def test_arguments_are_the_registrys(name):
    function = ast.parse(function_source(name)).body[0]
    own = [parameter.name for parameter in SCHEDULERS[name].parameters if parameter.same_as is None]
    expected = ["optimizer", "num_warmup_steps", "num_training_steps", *own, "min_lr_ratio", "last_epoch"]
    assert [argument.arg for argument in function.args.args] == expected
    assert re.findall(r"^    (\w+) \(", ast.get_docstring(function), re.M) == expected
    assert len(function.args.defaults) == len(expected) - 3  # get_scheduler gives the first three


# --- where it is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_file_applies_and_leaves_the_checkout_alone(name, checkout, tmp_path):
    before = snapshot(checkout)
    out = tmp_path / "new" / "change.patch"
    assert upstream_patch(name, checkout, out=out) == out
    assert snapshot(checkout) == before
    git(checkout, "apply", "--check", str(out))
    git(checkout, "am", "--quiet", str(out))
    assert_their_formatter_agrees(checkout)
    assert git(checkout, "log", "-1", "--format=%s %an") == f"Add the `{name}` learning rate schedule Ada Lovelace"


def test_a_branch_holds_one_commit_and_the_working_tree_stays(checkout, tmp_path):
    head, index = (checkout / ".git" / "HEAD").read_bytes(), (checkout / ".git" / "index").read_bytes()
    files = snapshot(checkout / "src") | snapshot(checkout / "docs") | snapshot(checkout / "tests")
    assert upstream_patch("rex", checkout) == "add-rex-schedule"
    assert (checkout / ".git" / "HEAD").read_bytes() == head
    assert (checkout / ".git" / "index").read_bytes() == index
    assert snapshot(checkout / "src") | snapshot(checkout / "docs") | snapshot(checkout / "tests") == files
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "rev-list", "--count", "main..add-rex-schedule") == "1"
    assert git(checkout, "worktree", "list").count("\n") == 0
    # The patch file is the same change.
    git(checkout, "am", "--quiet", str(upstream_patch("rex", checkout, out=tmp_path / "change.patch")))
    assert git(checkout, "diff", "main", "add-rex-schedule") == ""


def test_a_branch_has_the_name_that_is_asked_for(checkout):
    assert upstream_patch("rex", checkout, branch="schedules/rex") == "schedules/rex"
    assert git(checkout, "rev-list", "--count", "main..schedules/rex") == "1"


def test_a_second_schedule_joins_the_lists_of_the_first(checkout):
    for name in ("rex", "step"):
        git(checkout, "switch", "--quiet", upstream_patch(name, checkout))
    tests = (checkout / TESTS).read_text()
    assert "from diffusers.optimization import get_rex_schedule, get_scheduler, get_step_schedule\n" in tests
    assert tests.count("def get_learning_rates") == 1
    bullets = re.findall(r"^- `(\w+)`", (checkout / TUTORIAL).read_text(), re.M)
    assert bullets == ["rex", "step"]


def test_other_names_of_a_schedule_are_taken(checkout):
    assert upstream_patch("wsd", checkout) == "add-warmup-stable-decay-schedule"


def test_own_settings_of_git_do_not_change_the_patch(checkout, tmp_path):
    plain = upstream_patch("rex", checkout, out=tmp_path / "plain.patch").read_text()
    settings = {
        "diff.noprefix": "true",
        "color.ui": "always",
        "format.coverLetter": "true",
        "format.attach": "true",
        "diff.external": "false",
        "core.autocrlf": "true",
    }
    for key, value in settings.items():
        git(checkout, "config", key, value)
    own = upstream_patch("rex", checkout, out=tmp_path / "own.patch").read_text()
    # The first lines hold the hash and the time of the commit.
    assert own.partition("Subject:")[2] == plain.partition("Subject:")[2]


def test_a_repository_that_the_environment_names_is_not_taken_for_the_checkout(checkout, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / "index"))
    branch = upstream_patch("rex", checkout)
    monkeypatch.undo()
    assert git(checkout, "rev-list", "--count", f"main..{branch}") == "1"


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_schedule_that_cannot_be_patched_is_refused(checkout):
    with pytest.raises(LabError, match=r"'rx'.*Did you mean 'rex'\?") as error:
        upstream_patch("rx", checkout)
    assert all(name in str(error.value) for name in NAMES)
    with pytest.raises(LabError, match="The schedule 'one_cycle' cannot be patched into diffusers"):
        upstream_patch("one_cycle", checkout)


def test_a_folder_that_is_no_checkout_is_refused(checkout, tmp_path):
    with pytest.raises(LabError, match="it is not a folder"):
        upstream_patch("rex", tmp_path / "nowhere")
    (tmp_path / "plain").mkdir()
    with pytest.raises(LabError, match="not a git repository"):
        upstream_patch("rex", tmp_path / "plain")
    with pytest.raises(LabError, match="it is inside the git repository"):
        upstream_patch("rex", checkout / "src")
    git(checkout, "rm", "--quiet", "-r", "src")
    commit_all(checkout)
    with pytest.raises(LabError, match=r"HEAD has no src/diffusers/optimization\.py.*git clone"):
        upstream_patch("rex", checkout)


@pytest.mark.parametrize("kind", ["branch", "file"])
def test_a_schedule_that_is_there_is_refused(kind, checkout, tmp_path):
    git(checkout, "switch", "--quiet", upstream_patch("rex", checkout))
    where = {"branch": "again"} if kind == "branch" else {"out": tmp_path / "again.patch"}
    with pytest.raises(LabError, match="already has the schedule 'rex'"):
        upstream_patch("rex", checkout, **where)
    assert not (tmp_path / "again.patch").exists()
    assert "again" not in git(checkout, "branch")


def test_uncommitted_changes_are_refused_where_they_matter(checkout, tmp_path):
    (checkout / "notes.txt").write_text("untracked, and none of our business")
    upstream_patch("step", checkout)
    (checkout / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    with pytest.raises(LabError, match=r"uncommitted changes \(pyproject\.toml\).*git stash"):
        upstream_patch("rex", checkout)
    upstream_patch("rex", checkout, out=tmp_path / "other_files_do_not_matter_to_a.patch")
    (checkout / TESTS).write_text("# not committed\n")
    for where in ({}, {"out": tmp_path / "change.patch"}):
        with pytest.raises(LabError, match=r"uncommitted changes \(tests/others/test_optimization\.py\)"):
            upstream_patch("rex", checkout, **where)
    assert "rex" not in git(checkout, "branch")


def test_what_exists_is_not_overwritten(checkout, tmp_path):
    upstream_patch("rex", checkout)
    with pytest.raises(LabError, match=r"already has a branch 'add-rex-schedule'.*--branch"):
        upstream_patch("rex", checkout)
    (tmp_path / "mine.patch").write_text("mine")
    with pytest.raises(LabError, match=r"mine\.patch' exists"):
        upstream_patch("rex", checkout, out=tmp_path / "mine.patch")
    assert (tmp_path / "mine.patch").read_text() == "mine"


def test_branch_names_are_checked(checkout, tmp_path):
    with pytest.raises(LabError, match="'no branch' is not a valid branch name"):
        upstream_patch("rex", checkout, branch="no branch")
    with pytest.raises(LabError, match="both the file"):
        upstream_patch("rex", checkout, out=tmp_path / "change.patch", branch="mine")


EXISTING_TESTS = "import pytest\nimport torch\n\nfrom diffusers.optimization import get_scheduler\n"


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (OPTIMIZATION, "class SchedulerType", "class Other", "no class SchedulerType with members in src"),
        (OPTIMIZATION, "TYPE_TO_SCHEDULER_FUNCTION = {", "OTHER = {", "no dictionary TYPE_TO_SCHEDULER_FUNCTION"),
        (OPTIMIZATION, "FUNCTION = {\n", "FUNCTION = {}\nOTHER = {\n", "no dictionary TYPE_TO_SCHEDULER_FUNCTION"),
        (OPTIMIZATION, "constant_schedule,\n}", "constant_schedule\n}", "no dictionary TYPE_TO_SCHEDULER_FUNCTION"),
        (OPTIMIZATION, "import math", "import math math", r"src/diffusers/optimization\.py of this.*line 17"),
        (TUTORIAL, "diffusers.optimization", "elsewhere", "no example with a learning rate scheduler in docs"),
        (TESTS, None, EXISTING_TESTS, "no get_optimizer, which the generated tests use"),
        (TESTS, None, "import torch\n", "no pytest, which the generated tests use"),
    ],
)
def test_a_place_that_is_gone_is_named(path, old, new, message, checkout):
    text = (checkout / path).read_text() if old else ""
    assert (old or "") in text
    (checkout / path).write_text(text.replace(old, new, 1) if old else new)
    commit_all(checkout)
    with pytest.raises(LabError, match=message):
        upstream_patch("rex", checkout)
    assert git(checkout, "branch").split() == ["*", "main"]


def test_a_tutorial_that_is_gone_is_named(checkout):
    git(checkout, "rm", "--quiet", TUTORIAL)
    commit_all(checkout)
    with pytest.raises(LabError, match=f"There is no {TUTORIAL}.*newer diffusers_lrlab"):
        upstream_patch("rex", checkout)


@pytest.mark.slow
def test_code_around_the_places_may_change(checkout):
    """Methods behind the members, an annotation of the table and a comment at its end."""
    text = (checkout / OPTIMIZATION).read_text()
    constant = '    PIECEWISE_CONSTANT = "piecewise_constant"\n'
    changed = text.replace(constant, f"{constant}\n    def __str__(self):\n        return self.value\n")
    changed = changed.replace("TYPE_TO_SCHEDULER_FUNCTION = {", "TYPE_TO_SCHEDULER_FUNCTION: dict = {")
    changed = changed.replace("get_piecewise_constant_schedule,\n}", "get_piecewise_constant_schedule,  # last\n}")
    (checkout / OPTIMIZATION).write_text(changed)
    commit_all(checkout)
    git(checkout, "switch", "--quiet", upstream_patch("rex", checkout))
    without_the_lab(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS)


def test_git_must_be_there_and_know_its_user(checkout, monkeypatch):
    git(checkout, "config", "--unset", "user.name")
    git(checkout, "config", "--unset", "user.email")
    with pytest.raises(LabError, match=r"git does not know who you are.*git config --global user\.name"):
        upstream_patch("rex", checkout)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match="git was not found"):
        upstream_patch("rex", checkout)
