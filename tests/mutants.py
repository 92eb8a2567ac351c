"""Mutation testing: small changes of the code, drawn at random, each of which some test ought to notice.

    python tests/mutants.py run --tree CHECKOUT --out DIR [--count 150] [--seed 0] [--jobs 1] [--rooms schedules,core]
    python tests/mutants.py show --out DIR                                     the table, and which survived

A mutant is judged by the quick tests of its own room, and where these pass by those of all other files that import from
that room, and by `tests/invariants`. Tests that fail on the unchanged code are not asked. A run can be stopped and started
again: what is in DIR is not done twice. `equivalents.jsonl`, beside this file, lists mutants that no test can notice:
{"path", "before", "after", "reason"}.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = "diffusers_lrlab"
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in"}
OTHER |= {"not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "*", "**": "*", "and": "or", "or": "and"}
PRELOADED = """torch diffusers diffusers.training_utils diffusers.models.unets.unet_2d transformers transformers.hf_argparser
    datasets accelerate scipy.stats scipy.optimize sklearn.datasets matplotlib.pyplot statsmodels.api pyarrow.parquet
    safetensors.torch torch._dynamo hypothesis hypothesis.strategies _hypothesis_pytestplugin xdist yaml
    transformers.optimization schedulefree http.server""".split()
# In place of the project's addopts; what is preloaded cannot be rewritten.
PYTEST = (
    """-o addopts= --strict-markers -W error -W ignore::pytest.PytestAssertRewriteWarning -q -p no:cacheprovider
    -p no:xdist""".split()
    + ["-m", "not slow", "-x"]
)

# --- mutants ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Characters `start` to `end` of a file, replaced."""

    room: str
    path: str
    line: int
    operator: str
    start: int
    end: int
    text: str

    def apply(self, source):
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source):
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), lineterm="", n=0)
        return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def mutants_of(source, room, path):
    """Every mutant of a file."""
    lines = source.splitlines(keepends=True)
    for node in _executed(ast.parse(source)):
        for operator, line, (start, end), text in _changes(node, source, lines):
            yield Mutant(room, path, line, operator, start, end, text)


def _executed(node):
    """A node and those in it, but for annotations, texts, errors' messages, assertions, and what is for type checkers."""
    if getattr(getattr(node, "test", None), "id", "") == "TYPE_CHECKING":
        return
    yield node
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from _executed(child)


def _changes(node, source, lines):
    """What can be done to a node: the operator's name, a line, the characters that go, and what takes their place."""

    def span(one):
        ends = (one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)
        # The parser counts bytes.
        return tuple(
            sum(map(len, lines[: row - 1])) + len(lines[row - 1].encode()[:column].decode()) for row, column in ends
        )

    def between(operands):
        for one, other in zip(operands, operands[1:], strict=False):
            begin, end = span(one)[1], span(other)[0]
            gap = re.sub(r"#.*", lambda note: " " * len(note[0]), source[begin:end])
            found = re.search(r"[^\s()]+(\s+[^\s()]+)*", gap)
            if new := OTHER.get(" ".join(found[0].split())):
                yield found[0], one.end_lineno, (begin + found.start(), begin + found.end()), new

    value = getattr(node, "value", None)
    if isinstance(node, ast.Compare):
        yield from between([node.left, *node.comparators])
    elif isinstance(node, ast.BinOp) and not any(map(_is_text, (node.left, node.right))):
        yield from between([node.left, node.right])
    elif isinstance(node, ast.BoolOp):
        yield from between(node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.lineno, (span(node)[0], span(node.operand)[0]), ""
    elif isinstance(node, ast.Constant) and isinstance(value, bool):
        yield "true, false", node.lineno, span(node), str(not value)
    elif isinstance(node, ast.Constant) and isinstance(value, (int, float)):
        yield "constant", node.lineno, span(node), str(value + 1)
    elif isinstance(node, ast.Slice):
        for bound in filter(None, (node.lower, node.upper)):
            yield "slice", bound.lineno, span(bound), ""
    elif isinstance(node, ast.Return) and value is not None and getattr(value, "value", value) is not None:
        yield "return", node.lineno, span(value), "None"
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (isinstance(node, ast.Expr) and isinstance(value, ast.Call)):
        yield "removed", node.lineno, span(node), "pass"
    test = getattr(node, "test", None)
    if test is not None and not isinstance(test, (ast.Compare, ast.UnaryOp)):
        yield "negated", test.lineno, span(test), f"(not ({source[slice(*span(test))]}))"


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def draw(tree, rooms, count, seed):
    """As many mutants of each room; of the same tree and seed, a larger count only adds to the end."""
    groups = []
    for room in rooms:
        sources = {str(path.relative_to(tree)): path.read_text() for path in sorted((tree / PACKAGE / room).rglob("*.py"))}
        every = [mutant for path, source in sources.items() for mutant in mutants_of(source, room, path)]
        random.Random(f"{seed} {room}").shuffle(every)
        good = (mutant for mutant in every if _compiles(mutant.apply(sources[mutant.path])))
        groups.append(list(itertools.islice(good, count)))
    return [group[index] for index in range(max(map(len, groups))) for group in groups if index < len(group)][:count]


def rooms_of(tree):
    """Folders of the package that hold modules."""
    return sorted(path.parent.name for path in (tree / PACKAGE).glob("*/__init__.py"))


def _compiles(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def stages(tree, room):
    """Two lots of test files: those of a room, and others that import from it or test what holds for every run."""
    own = sorted((tree / "tests" / room).rglob("test_*.py"))
    uses = re.compile(rf"\b{PACKAGE}\.{room}\b")
    others = [
        path
        for path in sorted((tree / "tests").rglob("test_*.py"))
        if path not in own and ("invariants" in path.parts or uses.search(path.read_text()))
    ]
    return [[str(path.relative_to(tree)) for path in stage] for stage in (own, others) if stage]


# --- pytest in forks of this process, which has imported what takes long -----------------------------------------------


class FirstFailure:
    """A plugin of pytest: leaves out given tests, and notes the first that fails."""

    def __init__(self, left_out, file):
        self.left_out, self.file, self.failed = left_out, file, None

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.left_out]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = f"{report.nodeid}, which cannot be imported"

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps(self.failed))


def run_tests(copy, files, left_out, limit):
    """The exit status of pytest in a process of its own, None if it took too long, and the first test that failed."""
    result, status = copy.parent / "result.json", None
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _be_pytest(copy, files, FirstFailure(left_out, result))
    deadline = time.monotonic() + limit
    while status is None and time.monotonic() < deadline:
        ended, how = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(how) if ended else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with what it may have left running
    if status is None:
        os.waitpid(child, 0)
    return status, json.loads(result.read_text()) if result.exists() else None


def _be_pytest(copy, files, plugin):
    status = 99
    try:
        os.setsid()
        log = os.open(copy.parent / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        status = pytest.main([*PYTEST, f"--basetemp={copy.parent / 'tmp'}", *files], plugins=[plugin])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(int(status))


def make_copy(tree, folder):
    """A copy of the checkout that can be mutated."""
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(
        tree, folder / "tree", ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", "*.egg-info")
    )


def preload():
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    for name in PRELOADED:
        importlib.import_module(name)
    assert PACKAGE not in sys.modules


# --- run -------------------------------------------------------------------------------------------------------------


def run(options):
    """Judges the mutants that are left, some at a time."""
    done = {_key(row) for row in _read(options.out / "mutants.jsonl")}
    drawn = draw(options.tree, options.rooms or rooms_of(options.tree), options.count, options.seed)
    left = [mutant for mutant in drawn if _key(vars(mutant)) not in done]
    print(f"{len(drawn)} mutants, {len(left)} of them left.", flush=True)
    preload()
    copies, working = [make_copy(options.tree, options.out / f"copy-{number}") for number in range(options.jobs)], {}
    while left or working:
        if left and copies:
            mutant, copy = left.pop(0), copies.pop()
            child = os.fork()
            if not child:
                _judge_and_exit(mutant, copy, options)
            working[child] = copy
        else:
            copies.append(working.pop(os.wait()[0]))
    show(options)


def _judge_and_exit(mutant, copy, options):
    try:
        row = judge(mutant, copy, options)
        _append(options.out / "mutants.jsonl", row)
        print(f"{row['outcome']:>9}  {row['path']}:{row['line']}  {' '.join(row['diff'])[:120]}", flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def judge(mutant, copy, options):
    """What became of a mutant, as data."""
    path, started, failing = copy / mutant.path, time.monotonic(), options.out / "failing.jsonl"
    source = path.read_text()
    row = {**vars(mutant), "diff": mutant.diff(source), "outcome": "survived"}
    for files in stages(copy, mutant.room):
        while row["outcome"] == "survived":
            _write(path, mutant.apply(source))
            status, killer = run_tests(copy, files, {each["test"] for each in _read(failing)}, options.limit)
            _write(path, source)
            if status in (0, 5):  # all pass, or all are left out
                break
            if killer and run_tests(copy, [killer.partition(",")[0]], (), options.limit)[0] != 0:
                _append(failing, {"test": killer})  # also on the unchanged code
            else:
                row |= {"outcome": "timeout" if status is None else "killed", "by": killer or f"exit status {status}"}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _write(path, text):
    """With a time that the file never had, so that Python does not take the bytecode of another mutant for its own."""
    later = path.stat().st_mtime + 2
    path.write_text(text)
    os.utime(path, (later, later))


# --- results ---------------------------------------------------------------------------------------------------------


def _append(path, row):
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(row):
    return tuple(row[name] for name in ("path", "start", "end", "text"))


def show(options):
    """The table by rooms, and the survivors."""
    rows = _read(options.out / "mutants.jsonl")
    equivalents = _read(Path(__file__).with_name("equivalents.jsonl"))
    known = {tuple(row[name] for name in ("path", "before", "after")) for row in equivalents}
    for row in rows:
        changed = [" ".join(line[1:].strip() for line in row["diff"] if line[0] == sign) for sign in "-+"]
        if row["outcome"] != "killed" and (row["path"], *changed) in known:
            row["outcome"] = "equivalent"
    outcomes = ("killed", "timeout", "survived", "equivalent")
    print(f"| room | mutants | {' | '.join(outcomes)} | share killed |\n|{'---|' * (len(outcomes) + 3)}")
    for room in [*dict.fromkeys(row["room"] for row in rows), "all"]:
        counts = Counter(row["outcome"] for row in rows if room in (row["room"], "all"))
        share = (counts["killed"] + counts["timeout"]) / max(1, counts.total() - counts["equivalent"])
        print(f"| {room} | {counts.total()} | {' | '.join(str(counts[name]) for name in outcomes)} | {share:.0%} |")
    for row in rows:
        if row["outcome"] == "survived":
            print(f"\n{row['path']}:{row['line']} ({row['operator']})", *row["diff"], sep="\n  ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("action", choices=("run", "show"))
    add("--tree", type=lambda text: Path(text).resolve(), help="the checkout; it is not changed")
    add("--out", type=lambda text: Path(text).resolve(), required=True, help="where results are kept")
    add("--count", type=int, default=150, help="mutants, shared out among the rooms")
    add("--seed", type=int, default=0, help="of the draw")
    add("--rooms", type=lambda text: text.split(","), help="some of them, with commas")
    add("--jobs", type=int, default=1, help="mutants at a time")
    add("--limit", type=float, default=900, help="seconds that a lot of tests may take")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"run": run, "show": show}[options.action](options)


if __name__ == "__main__":
    main()
