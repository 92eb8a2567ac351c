"""What each test file costs, with its child processes: `python tests/suite_table.py [--write] [arguments of pytest]`."""

import argparse
import collections
import json
import multiprocessing.process
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "suite.md"
HEAD = "| file | tests | seconds | CPU seconds | processes |\n|---|---:|---:|---:|---:|"
SELECTIONS = {"quick": [], "slow": ["-m", "slow and not weekly", "--dist", "worksteal"], "weekly": ["-m", "weekly"]}


class Costs:
    """A plugin of pytest that adds up, in each worker, what each file costs."""

    def __init__(self, folder):
        self.folder, self.rows, self.started = folder, collections.defaultdict(lambda: [0, 0.0, 0.0, 0]), []
        events = ("subprocess.Popen", "os.posix_spawn")
        sys.addaudithook(lambda event, _: self.started.append(event) if event in events else None)
        start = multiprocessing.process.BaseProcess.start  # also by a fork server, which raises no event
        multiprocessing.process.BaseProcess.start = lambda process: (self.started.append("start"), start(process))[1]

    def _now(self):
        """Seconds, CPU seconds of this process and its children, living or ended, and processes started."""
        used = 0.0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                used += sum(process.cpu_times()[:4])
            except psutil.Error:  # ended meanwhile: its parent counts it
                continue
        return time.monotonic(), used, len(self.started)

    def pytest_collection_finish(self):
        self.seen = self._now()
        self.rows["imports and collection"][2] = self.seen[1]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        yield
        row = self.rows[item.nodeid.partition("::")[0]]
        row[0] += 1
        if nextitem is None or nextitem.path != item.path:
            now = self._now()
            row[1:] = [old + after - before for old, before, after in zip(row[1:], self.seen, now, strict=True)]
            self.seen = now

    def pytest_sessionfinish(self):
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(self.rows))


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(Path(os.environ["SUITE_TABLE"])))


def measure(tree, arguments):
    """The table of a checkout's tests, and the exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"SUITE_TABLE": folder, "PYTHONPATH": str(Path(__file__).parent)}
        command, started = [sys.executable, "-m", "pytest", "-p", "suite_table", *arguments], time.monotonic()
        status = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
        seconds, rows = time.monotonic() - started, collections.defaultdict(lambda: [0] * 4)
        for path in Path(folder).glob("*.json"):
            for name, row in json.loads(path.read_text()).items():
                rows[name] = [one + other for one, other in zip(rows[name], row, strict=True)]
    num_tests, _, *total = (sum(column) for column in zip(*rows.values(), strict=True))
    shown = [("all", [num_tests, seconds, *total]), *sorted(rows.items(), key=lambda row: -row[1][2])]
    body = [f"| {name} | {' | '.join(f'{number:,.0f}' for number in row)} |" for name, row in shown]
    return "\n".join([measured_on(tree), "", HEAD, *body]), status


def measured_on(tree):
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=tree, text=True).strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "pytest"))
    cpus = f"{os.cpu_count()} CPUs with a load of {os.getloadavg()[0]:.1f} at the end"
    return f"Commit {commit}, {time.strftime('%Y-%m-%d')}, {cpus}, Python {platform.python_version()}, {versions}."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", choices=SELECTIONS, default="quick", help="which tests (default: those of the README)")
    parser.add_argument("--tree", type=Path, default=PAGE.parents[1], help="another checkout, such as an older one")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    options, more = parser.parse_known_args()
    table, status = measure(options.tree, [*SELECTIONS[options.select], *more])
    print(table)
    if options.write:
        marks = [f"<!-- {start}{options.select} tests -->" for start in ("", "end of ")]
        text = re.sub(".*?".join(marks), f"\n{table}\n".join(marks), PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
        PAGE.write_text(text, encoding="utf-8")
    sys.exit(status)
