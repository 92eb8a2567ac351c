"""Mutation testing: small changes of the code, drawn at random, each of which some test ought to notice.

    python mutants.py collect --tree CHECKOUT --out DIR tests/schedules/test_values.py ...   which test runs which line
    python mutants.py run --tree CHECKOUT --out DIR [--count 150] [--seed 0] [--jobs 1] [--areas schedules,options]
    python mutants.py again --tree CHECKOUT --out DIR tests/invariants/test_resume.py ...    survivors, by given tests
    python mutants.py show --out DIR                                                   the table, and who survived

A mutant is judged by the tests that run its line, those of its own room first, and where these all pass by those whose
fixtures or processes run it. A test counts as a killer only if it passes on the unchanged code. All of it can be stopped
and started again: what is in DIR is not done twice. Needs pytest-cov. `equivalents.jsonl`, beside this file, lists mutants
that no test can notice: {"path", "before", "after", "reason"}.
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
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PACKAGE = "diffusers_lrlab"
# From areas to files of the package; the first area that matches counts.
AREAS = {
    "statistics": "study/analysis/[!p]*.py",
    "resume": """training/checkpoint*.py training/run_state.py training/run_folder.py training/stopping.py core/streams.py
        data/batches.py study/stacked/stacks.py study/runs/results.py averaging/*.py""",
    "options": """training/config.py training/choices.py training/arguments.py training/resolve*.py
        core/options.py core/spec.py study/spec/*.py""",
    "objective": "objective/*.py",
    "schedules": "schedules/*.py",
    "timesteps": "timesteps/*.py",
}
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in"}
OTHER |= {"not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "*", "**": "*", "and": "or", "or": "and"}
PRELOADED = """torch diffusers diffusers.training_utils diffusers.models.unets.unet_2d transformers transformers.hf_argparser
    datasets accelerate scipy.stats scipy.optimize sklearn.datasets matplotlib.pyplot statsmodels.api pyarrow.parquet
    safetensors.torch torch._dynamo hypothesis hypothesis.strategies _hypothesis_pytestplugin pytest_cov xdist yaml
    transformers.optimization schedulefree http.server""".split()
# In place of the project's addopts; what is preloaded cannot be rewritten.
PYTEST = (
    """-o addopts= --strict-markers -W error -W ignore::pytest.PytestAssertRewriteWarning -q -p no:cacheprovider
    -p no:xdist""".split()
    + ["-m", "not slow"]
)
COVERAGE = """[run]
source_pkgs = {package}
data_file = {data}
context = {file}
parallel = true
relative_files = true
patch = subprocess
sigterm = true
disable_warnings = no-data-collected,module-not-measured,module-not-imported,dynamic-conflict
"""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# --- mutants ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Characters `start` to `end` of a file, replaced."""

    area: str
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


def mutants_of(source, area, path):
    """Every mutant of a file."""
    lines = source.splitlines(keepends=True)
    for node in _executed(ast.parse(source)):
        for operator, line, (start, end), text in _changes(node, source, lines):
            yield Mutant(area, path, line, operator, start, end, text)


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


def draw(tree, areas, count, seed):
    """As many mutants of each area; of the same tree and seed, a larger count only adds to the end."""
    groups, taken = [], set()
    for area, globs in AREAS.items():
        files = {path for pattern in globs.split() for path in (tree / PACKAGE).glob(pattern)} - taken
        taken |= files
        if area in areas:
            sources = {str(path.relative_to(tree)): path.read_text() for path in sorted(files)}
            every = [mutant for path, source in sources.items() for mutant in mutants_of(source, area, path)]
            random.Random(f"{seed} {area}").shuffle(every)
            good = (mutant for mutant in every if _compiles(mutant.apply(sources[mutant.path])))
            groups.append(list(itertools.islice(good, count)))
    return [group[index] for index in range(max(map(len, groups))) for group in groups if index < len(group)][:count]


def _compiles(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


# --- tests that run a line -------------------------------------------------------------------------------------------


class Evidence:
    """What `collect` found: the tests that run each line, how long they take, and which of them start processes."""

    def __init__(self, tree, out):
        from coverage import CoverageData

        self.tests = json.loads((out / "tests.json").read_text())
        self.data = CoverageData(str(out / "coverage"))
        self.data.read()
        self.sources = {str(path.relative_to(tree)): path.read_text() for path in (tree / PACKAGE).rglob("*.py")}

    def for_mutant(self, mutant):
        """Tests that run the mutated code themselves; and those whose fixtures, or processes of their own, run it."""
        direct, later = set(), set()
        for path, lines in self._lines(mutant.path, mutant.line):
            by_line = self.data.contexts_by_lineno(path)
            for context in {context for line in lines for context in by_line.get(line, ())}:
                file, _, rest = context.partition("|")
                test, _, phase = rest.rpartition("|")
                if phase == "run":
                    direct.add(test)
                else:  # a fixture, which later tests of the file may use; or a process, or an import
                    own = {name for name in self.tests if name.partition("::")[0] == file}
                    later |= own if phase else {name for name in own if self.tests[name]["starts"]}
        return direct & self.tests.keys(), later - direct

    def _lines(self, path, line):
        """Lines that run when the mutated one matters: its statement's, or the uses of what is defined there at import."""
        around = [
            node
            for node in ast.walk(ast.parse(self.sources[path]))
            if _first(node) <= line <= getattr(node, "end_lineno", 0)
        ]
        statement = max((node for node in around if isinstance(node, ast.stmt)), key=_first)
        body = getattr(statement, "body", None)
        if isinstance(statement, FUNCTIONS):  # its defaults and decorators
            return [(path, range(body[0].lineno, statement.end_lineno + 1))]
        if any(isinstance(node, FUNCTIONS) for node in around):
            return [(path, range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1))]
        targets = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
        names = {name.id for target in filter(None, targets) for name in ast.walk(target) if isinstance(name, ast.Name)}
        if not names:
            return [(path, range(1, len(self.sources[path])))]
        use = re.compile(rf"\b({'|'.join(names)})\b")
        return [
            (other, [number for number, text in enumerate(source.splitlines(), 1) if use.search(text)])
            for other, source in self.sources.items()
        ]


def _first(node):
    return min([getattr(node, "lineno", 10**9), *(part.lineno for part in getattr(node, "decorator_list", ()))])


# --- pytest in forks of this process, which has imported what takes long -----------------------------------------------


class Chosen:
    """A plugin of pytest: keeps the chosen tests in their order; notes what fails first, times, and started processes."""

    def __init__(self, chosen, file):
        self.order, self.file = {name: place for place, name in enumerate(chosen or ())}, file
        self.found, self.started = {"failed": None, "tests": {}, "shared": False}, 0
        sys.addaudithook(self._note)

    def _note(self, event, _):
        self.started += event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "socket.connect")

    @pytest.hookimpl(trylast=True)  # after the project's own order of the files
    def pytest_collection_modifyitems(self, items):
        if self.order:
            items[:] = sorted(
                (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
            )
        self.found["tests"] = {item.nodeid: {"seconds": 0.0, "starts": False} for item in items}

    def pytest_runtest_logreport(self, report):
        test = self.found["tests"][report.nodeid]
        test["seconds"] += report.duration
        test["starts"] |= self.started > 0
        self.found["shared"] |= self.started > 0 and report.when == "setup"
        self.started = 0
        if report.failed:
            self.found["failed"] = self.found["failed"] or report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.found["failed"] = f"{report.nodeid}, which cannot be imported"

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps(self.found))


def run_tests(copy, arguments, chosen, limit):
    """The exit status of pytest in a process of its own, None if it took too long, and what [`Chosen`] noted."""
    result, status = copy.parent / "result.json", None
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _be_pytest(copy, arguments, Chosen(chosen, result))
    deadline = time.monotonic() + limit
    while status is None and time.monotonic() < deadline:
        ended, how = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(how) if ended else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with what it may have left running
    if status is None:
        os.waitpid(child, 0)
    return status, json.loads(result.read_text()) if result.exists() else {"failed": None, "tests": {}}


def _be_pytest(copy, arguments, plugin):
    status = 99
    try:
        os.setsid()
        log = os.open(copy.parent / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        status = pytest.main([*PYTEST, f"--basetemp={copy.parent / 'tmp'}", *arguments], plugins=[plugin])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(int(status))


def make_copy(tree, folder):
    """A copy of the checkout that can be mutated."""
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(tree, folder / "tree", ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info"))


def preload():
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    for name in PRELOADED:
        importlib.import_module(name)
    assert PACKAGE not in sys.modules


# --- collect ---------------------------------------------------------------------------------------------------------


def collect(options):
    """Runs test files one by one under coverage; a file that was run before is left out."""
    from coverage import Coverage

    preload()
    kept, folder = options.out / "tests.json", options.out / "collect"
    for file in options.files:
        tests = json.loads(kept.read_text()) if kept.exists() else {}
        if any(name.startswith(f"{file}::") for name in tests):
            continue
        copy = make_copy(options.tree, folder)
        # Of processes that a test starts, no more is known than the file of the test.
        config = COVERAGE.format(package=PACKAGE, file=file, data=folder / "data")
        (folder / "coveragerc").write_text(config)
        measured = f"--cov={PACKAGE} --cov-config={folder / 'coveragerc'} --cov-context=test --cov-report="
        started = time.monotonic()
        status, found = run_tests(copy, [*measured.split(), file], None, limit=3600)
        print(f"{file}: {len(found['tests'])} tests, status {status}, {time.monotonic() - started:.0f} s", flush=True)
        if status not in (0, 1):
            print((folder / "pytest.log").read_text()[-2000:])
            continue
        for test in found["tests"].values():
            test["starts"] |= found["shared"]  # a process that a fixture started may be of all tests
        combined = Coverage(data_file=str(options.out / "coverage"), config_file=False)
        if (options.out / "coverage").exists():
            combined.load()
        combined.combine([str(path) for path in folder.glob("data*")])
        combined.save()
        kept.write_text(json.dumps(tests | found["tests"], indent=0))


# --- run -------------------------------------------------------------------------------------------------------------


def run(options):
    """Judges the mutants that are left, some at a time."""
    evidence, done = Evidence(options.tree, options.out), {_key(row) for row in read(options.out)}
    drawn = draw(options.tree, options.areas, options.count, options.seed)
    left = [mutant for mutant in drawn if _key(vars(mutant)) not in done]
    print(f"{len(drawn)} mutants, {len(left)} of them left.", flush=True)
    preload()
    copies, working = [make_copy(options.tree, options.out / f"copy-{number}") for number in range(options.jobs)], {}
    while left or working:
        if left and copies:
            mutant, copy = left.pop(0), copies.pop()
            found = evidence.for_mutant(mutant)  # not after the fork, where coverage would begin a new file in its place
            child = os.fork()
            if not child:
                _judge_and_exit(mutant, copy, evidence.tests, found, options)
            working[child] = copy
        else:
            copies.append(working.pop(os.wait()[0]))
    show(options)


def _judge_and_exit(mutant, copy, tests, found, options):
    try:
        row = judge(mutant, copy, tests, found, options)
        _append(options.out / "mutants.jsonl", row)
        print(f"{row['outcome']:>9}  {row['path']}:{row['line']}  {' '.join(row['diff'])[:120]}", flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def again(options):
    """Judges what no test has killed by tests that coverage knew nothing of: those that start processes, or are new."""
    preload()
    copy = make_copy(options.tree, options.out / f"copy-{os.getpid()}")
    known = {_key(row) for row in read(options.out) if row["outcome"] != "killed"}
    started = time.monotonic()
    if run_tests(copy, ["-x", *options.files], None, limit=1800)[0] != 0:
        sys.exit(f"They fail on the unchanged code:\n{(copy.parent / 'pytest.log').read_text()[-2000:]}")
    limit = 120 + 3 * (time.monotonic() - started)
    for mutant in draw(options.tree, options.areas, options.count, options.seed):
        if _key(vars(mutant)) in known and f"{mutant.path}:{mutant.line}".startswith(options.only):
            path = copy / mutant.path
            source = path.read_text()
            _write(path, mutant.apply(source))
            status, found = run_tests(copy, ["-x", *options.files], None, limit)
            _write(path, source)
            row = {**vars(mutant), "diff": mutant.diff(source), "outcome": "survived", "tests": len(found["tests"])}
            if status != 0:
                row |= {"outcome": "timeout" if status is None else "killed", "by": found["failed"] or f"status {status}"}
            _append(options.out / "mutants.jsonl", row)
            print(f"{row['outcome']:>9}  {row['path']}:{row['line']}  {row.get('by', '')}", flush=True)


def judge(mutant, copy, tests, running, options):
    """What became of a mutant, as data; `running` are the tests that run its line, and those that may."""
    path, started = copy / mutant.path, time.monotonic()
    source = path.read_text()
    direct, later = running
    seconds = {name: test["seconds"] for name, test in tests.items()}
    row = {**vars(mutant), "diff": mutant.diff(source), "outcome": "survived" if direct | later else "no test", "tests": 0}
    for stage in _stages(mutant.path, direct, later, seconds, options):
        while stage and row["outcome"] == "survived":
            limit = 60 + 5 * sum(seconds[name] for name in stage)
            _write(path, mutant.apply(source))
            status, found = run_tests(copy, ["-x", *_files(stage)], stage, limit)
            _write(path, source)
            row["tests"] += len(stage)
            killer = found["failed"]
            if status == 0:
                break
            if killer in seconds and not _passes(killer, copy, options.out / "killers.jsonl", limit):
                stage = [name for name in stage if name != killer]
            else:
                row |= {"outcome": "timeout" if status is None else "killed", "by": killer or f"exit status {status}"}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _stages(path, direct, later, seconds, options):
    """Three lots of tests: quick ones of the file's own room, others that run the line, and those that may run it."""
    room, stem = path.split("/")[1], Path(path).stem
    own = {name for name in direct if room in name.partition("::")[0] or stem in name.partition("::")[0]}
    first = _chosen(own, seconds, options.budget / 4)
    second = _chosen(direct - {*first}, seconds, options.budget)
    return first, second, _chosen((direct | later) - {*first, *second}, seconds, options.patience)


def _chosen(tests, seconds, budget):
    """
    As many as the budget allows, one at least: of every test function the cheapest case, then the next ones.

    Those of a file run together, as they may share fixtures.
    """
    cases = defaultdict(list)
    for name in sorted(tests, key=lambda name: (seconds[name], name)):
        cases[name.partition("[")[0]].append(name)
    turns = {name: turn for names in cases.values() for turn, name in enumerate(names)}
    chosen, total = [], 0.0
    for name in sorted(tests, key=lambda name: (turns[name], seconds[name], name)):
        if not chosen or total + seconds[name] <= budget:
            chosen.append(name)
            total += seconds[name]
    cost = Counter()
    for name in chosen:
        cost[name.partition("::")[0]] += seconds[name]
    return sorted(chosen, key=lambda name: (cost[name.partition("::")[0]], name.partition("::")[0], seconds[name], name))


def _files(tests):
    return list(dict.fromkeys(name.partition("::")[0] for name in tests))


def _write(path, text):
    """With a time that the file never had, so that Python does not take the bytecode of another mutant for its own."""
    later = path.stat().st_mtime + 2
    path.write_text(text)
    os.utime(path, (later, later))


def _passes(test, copy, known, limit):
    """Whether a test passes on the unchanged code; asked once."""
    asked = {row["test"]: row["passes"] for row in _read(known)}
    if test not in asked:
        asked[test] = run_tests(copy, ["-x", *_files([test])], [test], limit)[0] == 0
        _append(known, {"test": test, "passes": asked[test]})
    return asked[test]


# --- results ---------------------------------------------------------------------------------------------------------


def _append(path, row):
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read(out):
    """The last word on every mutant: that a test killed it, if one did."""
    rows = sorted(_read(out / "mutants.jsonl"), key=lambda row: row["outcome"] == "killed")
    return list({_key(row): row for row in rows}.values())


def survivors(rows):
    return [row for row in rows if row["outcome"] in ("survived", "no test")]


def _key(row):
    return tuple(row[name] for name in ("path", "start", "end", "text"))


def show(options):
    """The table by areas, and the survivors."""
    rows = read(options.out)
    known = {
        tuple(row[name] for name in ("path", "before", "after"))
        for row in _read(Path(__file__).with_name("equivalents.jsonl"))
    }
    for row in rows:
        changed = [" ".join(line[1:].strip() for line in row["diff"] if line[0] == sign) for sign in "-+"]
        if row["outcome"] != "killed" and (row["path"], *changed) in known:
            row["outcome"] = "equivalent"
    outcomes = ("killed", "timeout", "survived", "no test", "equivalent")
    print(f"| area | mutants | {' | '.join(outcomes)} | share killed |\n|{'---|' * (len(outcomes) + 3)}")
    for area in [*dict.fromkeys(row["area"] for row in rows), "all"]:
        counts = Counter(row["outcome"] for row in rows if area in (row["area"], "all"))
        share = (counts["killed"] + counts["timeout"]) / max(1, counts.total() - counts["equivalent"])
        print(f"| {area} | {counts.total()} | {' | '.join(str(counts[name]) for name in outcomes)} | {share:.0%} |")
    for row in survivors(rows):
        print(f"\n{row['path']}:{row['line']} ({row['operator']}; {row['tests']} tests)", *row["diff"], sep="\n  ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("action", choices=("collect", "run", "again", "show"))
    add("files", nargs="*", help="of collect and again: test files, relative to the checkout")
    add("--tree", type=lambda text: Path(text).resolve(), help="the checkout; it is not changed")
    add("--out", type=lambda text: Path(text).resolve(), required=True, help="where evidence and results are kept")
    add("--count", type=int, default=150, help="mutants, shared out among the areas")
    add("--seed", type=int, default=0, help="of the draw")
    add("--areas", type=lambda text: text.split(","), default=list(AREAS), help="some of them, with commas")
    add("--jobs", type=int, default=1, help="mutants at a time")
    add("--budget", type=float, default=60, help="seconds of tests that run the line, cheapest first")
    add("--patience", type=float, default=180, help="seconds of further tests where these pass")
    add("--only", default="", help="of again: how path:line of the mutants begins")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"collect": collect, "run": run, "again": again, "show": show}[options.action](options)


if __name__ == "__main__":
    main()
