"""Mutation testing: small random changes of the code, each of which some quick test should notice.

    python tests/mutants.py --count 20 --seed 1 [--rooms schedules,core]

The changes are spread over all rooms (folders of the package). First, all quick tests run under `coverage`. A mutant then
meets those that execute its statement, or if that is executed at import, all tests of its room and of its file. Tests that
fail on the unchanged code are not counted. The last line is the share of the mutants that were noticed.
"""

import argparse
import ast
import collections
import compileall
import concurrent.futures
import contextlib
import copy
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from py_compile import PycInvalidationMode

import covered
import pytest

TREE, PACKAGE = covered.TREE, "diffusers_lrlab"
SECONDS = 900  # for a mutant's tests; if they take longer, it is noticed
SWAPPED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
SWAPPED += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)]
OTHER = {one: other for pair in SWAPPED for one, other in (pair, pair[::-1])}
OTHER |= {ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
# Imported once, before the tests of each mutant run in a fork of this process.
PRELOADED = """torch torch._dynamo diffusers.training_utils diffusers.models.unets.unet_2d transformers.optimization datasets
    accelerate scipy.stats scipy.optimize sklearn.datasets matplotlib.pyplot statsmodels.api pyarrow.parquet hypothesis
    hypothesis.strategies _hypothesis_pytestplugin""".split()
# In place of the project's addopts; asserts of what is preloaded cannot be rewritten, and a busy machine meets no deadlines.
PYTEST = "-o addopts= --strict-markers --hypothesis-profile=ci -x -q -p no:cacheprovider -p no:xdist -W error".split()
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not weekly"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A file of a room, by its path in the checkout, of which the bytes `begin` to `end` are replaced."""

    room: str
    path: Path
    line: int
    lines: range | None  # of its statement, if that is in a function and not executed at import
    begin: int
    end: int
    before: str
    after: str


def mutants_of(room, path):
    """The mutants of a file."""
    source = (TREE / path).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    for node, lines in _executed(ast.parse(source)):
        for target, changed in _changes(node):
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(changed))
            text = text if isinstance(target, (ast.stmt, ast.Slice)) else f"({text})"
            yield Mutant(room, path, target.lineno, lines, begin, end, source[begin:end].decode(), text)


def _executed(node, lines=None):
    """A node and those in it but for annotations, texts and assertions, with the lines of its statement in a function."""
    if getattr(getattr(node, "test", None), "id", "") == "TYPE_CHECKING":
        return
    if isinstance(node, ast.stmt) and lines is not None:  # of one with a body, its head
        last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
        lines = range(node.lineno, max(node.lineno, last) + 1)
    yield node, lines
    if not isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        for name, value in ast.iter_fields(node):
            inner = range(0) if isinstance(node, ast.FunctionDef) and name == "body" else lines
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from _executed(child, inner)


def _changes(node):
    """Pairs of a node that is replaced and what takes its place."""

    def changed(**fields):
        other = copy.copy(node)
        vars(other).update(fields)
        return node, other

    value, test = getattr(node, "value", None), getattr(node, "test", None)
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            yield changed(ops=[*node.ops[:index], OTHER[type(op)](), *node.ops[index + 1 :]])
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OTHER and not _joins_texts(node):
        yield changed(op=OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(value, (bool, int, float)):
        yield changed(value=not value if isinstance(value, bool) else value + 1)
    elif isinstance(node, ast.Slice):
        yield from (changed(**{bound: None}) for bound in ("lower", "upper") if getattr(node, bound))
    elif isinstance(node, ast.Return) and value is not None and getattr(value, "value", value) is not None:
        yield changed(value=None)
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (isinstance(node, ast.Expr) and isinstance(value, ast.Call)):
        yield node, ast.Pass()
    if test is not None and not isinstance(test, (ast.Compare, ast.UnaryOp)):
        yield test, ast.UnaryOp(ast.Not(), test)


def _joins_texts(node):
    sides = (getattr(node, "left", None), getattr(node, "right", None))
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def draw(rooms, count, seed):
    """So many mutants, one of each room in turn; of the same seed, a larger count only adds to the end."""
    groups = []
    for room in rooms:
        paths = sorted(path.relative_to(TREE) for path in (TREE / PACKAGE / room).rglob("*.py"))
        group = [mutant for path in paths for mutant in mutants_of(room, path)]
        random.Random(f"{seed} {room}").shuffle(group)
        groups.append(group)
    random.Random(seed).shuffle(groups)
    turns = itertools.zip_longest(*groups)
    return list(itertools.islice((mutant for turn in turns for mutant in turn if mutant), count))


class FirstFailure:
    """A plugin of pytest: has given tests run, in their order, and notes the first that fails."""

    def __init__(self, tests, note):
        self.places, self.note = {test: place for place, test in enumerate(tests)}, note

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((item for item in items if item.nodeid in self.places), key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.note.read_text():
            self.note.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def first_failure(tests):
    """The first of some tests that fails in the working folder, or how they end; they run in a fork of this process."""
    note = Path("first_failure").absolute()
    note.write_text("")
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(tests, note))
    child.start()
    child.join(SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with what it may have left running
    child.join()
    return note.read_text() or (None if child.exitcode in (0, 5) else f"exit status {child.exitcode}")  # 5: none is left


def _pytest(tests, note):
    os.setsid()
    log = os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["PYTHONPATH"] = os.getcwd()
    sys.path.insert(0, os.getcwd())
    cpu_seconds = 60 + 10 * int(sum(tests.values()))  # a mutant may go on forever
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    status = pytest.main([*PYTEST, f"--basetemp={note.with_name('tmp')}", *files], plugins=[FirstFailure(tests, note)])
    os._exit(int(status))


def make_tree(folder):
    """A copy of the checkout for each process that works on mutants, which is its working folder from now on."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", "*.egg-info")
    tree = shutil.copytree(TREE, Path(tempfile.mkdtemp(dir=folder)) / "tree", ignore=ignored)
    # Known by its content: the time of a changed file may be that of the unchanged one.
    compileall.compile_dir(tree / PACKAGE, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    os.chdir(tree)


def noticed_by(mutant, tests):
    """The test that fails because of a mutant, or `None`, and the seconds that it took to find out."""
    started, failed, unchanged = time.monotonic(), None, mutant.path.read_bytes()
    changed = unchanged[: mutant.begin] + mutant.after.encode() + unchanged[mutant.end :]
    while tests:
        mutant.path.write_bytes(changed)
        failed = first_failure(tests)
        mutant.path.write_bytes(unchanged)
        if failed not in tests or first_failure({failed: tests[failed]}) is None:
            break
        tests, failed = {test: time for test, time in tests.items() if test != failed}, None  # it always fails
    return failed, time.monotonic() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice")
    parser.add_argument("--rooms", type=lambda text: text.split(","), help="folders of the package (default: all)")
    options = parser.parse_args()
    rooms = options.rooms or sorted(path.parent.name for path in (TREE / PACKAGE).glob("*/__init__.py"))
    mutants = draw(rooms, options.count, options.seed)
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"COVERED": folder, "PYTHONPATH": f"{TREE}{os.pathsep}{TREE / 'tests'}"}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=native", "-p", "covered", "--hypothesis-profile=ci"]
        subprocess.run(command, cwd=TREE, env=environment, check=False)
        execution = covered.Execution(Path(folder))
        tests_of_each = [execution.tests_of(mutant.room, mutant.path, mutant.lines) for mutant in mutants]
        for name in PRELOADED:
            importlib.import_module(name)
        assert PACKAGE not in sys.modules
        fork, counts = multiprocessing.get_context("fork"), collections.Counter()
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), fork, make_tree, (folder,)) as pool:
            for mutant, tests, (by, seconds) in zip(
                mutants, tests_of_each, pool.map(noticed_by, mutants, tests_of_each), strict=True
            ):
                outcome = "noticed" if by else "survived" if tests else "not executed by any test"
                counts[outcome] += 1
                print(f"{mutant.path}:{mutant.line}: {mutant.before[:100]!r} -> {mutant.after[:100]!r}")
                print(f"    {outcome} {by or ''} {len(tests)} ({seconds:.0f} s)", flush=True)
    share = counts["noticed"] / len(mutants)
    print(f"{share:.0%} of {len(mutants)} mutants were noticed: {dict(counts)}, seed {options.seed}.")


if __name__ == "__main__":
    main()
