"""What each test executes of the package, and its seconds: `python -m pytest -p covered`, with a folder in COVERED."""

import atexit
import collections
import contextlib
import functools
import json
import os
from pathlib import Path

import coverage
import pytest

TREE = Path(__file__).parents[1]


class Covered:
    """A plugin of pytest. The context of a line is the test that executes it, or the file that shares a fixture."""

    def __init__(self, folder):
        self.folder, self.context, self.seconds, self.failed = folder, "", collections.Counter(), []

    def pytest_collection_finish(self):
        from started import Started

        start, self.coverage = Started.__init__, cover(self.folder)

        def start_covered(process, *command, before=None, **how):
            start(process, *command, before=functools.partial(cover, self.folder, self.context, before), **how)

        Started.__init__ = start_covered

    @contextlib.contextmanager
    def _in(self, context):
        before, self.context = self.context, context
        self.coverage.switch_context(context)
        yield
        self.context = before
        self.coverage.switch_context(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        with self._in(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        with self._in(self.context if fixturedef.scope == "function" else request.node.nodeid):
            return (yield)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        self.failed += [report.nodeid] if report.failed else []

    def pytest_sessionfinish(self):
        self.coverage.stop()
        self.coverage.save()
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps([self.seconds, self.failed]))


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(Covered(Path(os.environ["COVERED"])))


def cover(folder, context=None, before=None):
    """Notes what this process executes from now on. A started process then does what it has to do `before` its own work."""
    how = {"data_suffix": True, "config_file": False, "messages": False, "context": context}
    covered = coverage.Coverage(str(folder / "coverage"), source=[str(TREE / "diffusers_lrlab")], **how)
    covered.start()
    atexit.register(lambda: (covered.stop(), covered.save()))
    if before is not None:
        before()
    return covered


class Execution:
    """What was noted in a folder: contexts by paths and lines, and the seconds of each test that passes."""

    def __init__(self, folder):
        self.contexts, self.seconds = collections.defaultdict(set), {}
        for path in folder.glob("coverage.*"):
            data = coverage.CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                for line, contexts in data.contexts_by_lineno(file).items():
                    self.contexts[Path(file).relative_to(TREE), line] |= {*contexts} - {""}
        for path in folder.glob("*.json"):
            seconds, failed = json.loads(path.read_text())
            self.seconds |= {test: time for test, time in seconds.items() if test not in failed}

    def tests_of(self, room, path, lines=None):
        """
        From tests to their seconds: those that execute one of these lines, or else all of the room and of the path.

        They come file by file, those of the room first, then quick ones.
        """
        if lines is None:
            contexts = {f"tests/{room}/"}.union(*(found for (file, _), found in self.contexts.items() if file == path))
        else:
            contexts = set().union(*(self.contexts.get((path, line), ()) for line in lines))
        files = collections.defaultdict(dict)
        for test, seconds in self.seconds.items():
            if test.startswith(tuple(contexts)):
                files[test.partition("::")[0]][test] = seconds
        order = sorted(files, key=lambda file: (f"/{room}/" not in file, sum(files[file].values())))
        return {test: seconds for file in order for test, seconds in files[file].items()}
