"""Mutation testing: small random changes of the code, each of which some quick test should notice.

    python tests/mutants.py --count 20 --seed 1 [--rooms schedules,core] [--limit 900]

The changes are spread over all rooms (folders of the package). A mutant meets the quick tests of its own room first, and
if it survives these, those of all files that import from that room and `tests/invariants`. Tests that fail on the
unchanged code are not counted. The last line is the share of the mutants that were noticed.
"""

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

TREE, PACKAGE = Path(__file__).parents[1], "diffusers_lrlab"
SWAPPED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
SWAPPED += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)]
OTHER = {one: other for pair in SWAPPED for one, other in (pair, pair[::-1])}
OTHER |= {ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
# Imported once, before the tests of each mutant run in a fork of this process.
PRELOADED = """torch diffusers diffusers.training_utils diffusers.models.unets.unet_2d transformers transformers.optimization
    transformers.hf_argparser datasets accelerate scipy.stats scipy.optimize sklearn.datasets matplotlib.pyplot
    statsmodels.api pyarrow.parquet safetensors.torch torch._dynamo hypothesis hypothesis.strategies
    _hypothesis_pytestplugin xdist yaml schedulefree""".split()
# In place of the project's addopts; asserts of what is preloaded cannot be rewritten.
PYTEST = ["-o", "addopts=", "--strict-markers", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
PYTEST += ["-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not weekly"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A file of a room, by its path in the checkout, of which the bytes `begin` to `end` are replaced."""

    room: str
    path: Path
    line: int
    begin: int
    end: int
    before: str
    after: str

    @property
    def source(self):
        source = (TREE / self.path).read_bytes()
        return source[: self.begin] + self.after.encode() + source[self.end :]


def mutants_of(room, path):
    """The mutants of a file."""
    source = (TREE / path).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    for node in _executed(ast.parse(source)):
        for target, changed in _changes(node):
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(changed))
            text = text if isinstance(target, (ast.stmt, ast.Slice)) else f"({text})"
            yield Mutant(room, path, target.lineno, begin, end, source[begin:end].decode(), text)


def _executed(node):
    """A node and those in it, without annotations, f-strings, texts of errors, assertions and what is for type checkers."""
    if getattr(getattr(node, "test", None), "id", "") == "TYPE_CHECKING":
        return
    yield node
    if not isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from _executed(child)


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


def stages(mutant):
    """
    Two lots of test files: those of the mutant's room, and others that import from it or test what holds for every run.

    Files that name the mutant's module come first.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((TREE / "tests").rglob("test_*.py"))}
    module, room = ".".join(mutant.path.with_suffix("").parts), re.compile(rf"\b{PACKAGE}\.{mutant.room}\b")
    every = sorted(texts, key=lambda path: module not in texts[path])
    own = [path for path in every if path.is_relative_to(TREE / "tests" / mutant.room)]
    others = [path for path in every if path not in own and ("invariants" in path.parts or room.search(texts[path]))]
    return [[str(path.relative_to(TREE)) for path in stage] for stage in (own, others) if stage]


class FirstFailure:
    """A plugin of pytest: leaves out given tests, and notes the first that fails."""

    def __init__(self, left_out, file):
        self.left_out, self.file, self.failed = left_out, file, None

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.left_out]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps(self.failed))


def run_tests(tree, files, left_out, seconds):
    """Whether all tests pass, and the first that fails; they run in a fork of this process."""
    result = tree.parent / "result.json"
    result.unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(tree, files, FirstFailure(left_out, result)))
    child.start()
    child.join(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with what it may have left running
    if child.exitcode is None:
        child.join()
        return False, f"more than {seconds:.0f} s"
    failed = json.loads(result.read_text()) if result.exists() else None
    return child.exitcode in (0, 5), failed or f"exit status {child.exitcode}"  # 5: all are left out


def _pytest(tree, files, plugin):
    os.setsid()
    log = os.open(tree.parent / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    status = pytest.main([*PYTEST, f"--basetemp={tree.parent / 'tmp'}", *files], plugins=[plugin])
    os._exit(int(status))


def noticed_by(mutant, tree, failing, seconds):
    """The test that fails because of a mutant, or `None`; adds tests that always fail to `failing`."""
    path = tree / mutant.path
    for files in stages(mutant):
        passes = False
        while not passes:
            path.write_bytes(mutant.source)
            passes, failed = run_tests(tree, files, failing, seconds)
            shutil.copy(TREE / mutant.path, path)
            if not passes:
                is_test = (tree / failed.partition("::")[0]).is_file()
                if run_tests(tree, [failed] if is_test else files[:1], (), seconds)[0]:
                    return failed
                assert is_test, f"the unchanged code does not pass {files[0]}"
                failing.add(failed)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice")
    parser.add_argument("--rooms", type=lambda text: text.split(","), help="folders of the package (default: all)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of a mutant; more counts as noticed")
    options = parser.parse_args()
    rooms = options.rooms or sorted(path.parent.name for path in (TREE / PACKAGE).glob("*/__init__.py"))
    mutants, failing, survived = draw(rooms, options.count, options.seed), set(), 0
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # the time of a changed file may be that of the unchanged one
    for name in PRELOADED:
        importlib.import_module(name)
    assert PACKAGE not in sys.modules
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", "*.egg-info")
        tree = shutil.copytree(TREE, Path(folder) / "tree", ignore=ignored)
        for mutant in mutants:
            started, by = time.monotonic(), noticed_by(mutant, tree, failing, options.limit)
            survived += by is None
            print(f"{mutant.path}:{mutant.line}: {mutant.before[:100]!r} -> {mutant.after[:100]!r}")
            print(f"    {'SURVIVED' if by is None else f'noticed by {by}'} ({time.monotonic() - started:.0f} s)", flush=True)
    noticed = len(mutants) - survived
    print(f"{noticed} of {len(mutants)} mutants ({noticed / len(mutants):.0%}) were noticed, seed {options.seed}.")


if __name__ == "__main__":
    main()
