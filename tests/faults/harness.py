"""Attacks on every case, one after another, and the table of what became of them."""

import collections
import contextlib
import functools
import random
import re
import shutil
import subprocess
import time

import started

from . import cases as cases_module
from .injected import FAULTS, FULL_DISK, Pipe

OUTCOMES = ("identical", "refused with a message", "traceback", "lost or different")
IDENTICAL, REFUSED, TRACEBACK, LOST = OUTCOMES
INSTANT = "SIGKILL at random instants"
_INSTANTS = 100  # of each case
_GOES_ON_FROM = {"going back": "run", "resumed run": "run"}


class Attacks:
    """All attacks on the cases of a folder; what runs without any, and half a run, are made once."""

    def __init__(self, base, cases, seed=0):
        self.base, self.cases, self.random = base, cases, random.Random(seed)
        self._ends, self._numbers = {}, collections.Counter()

    def rows(self):
        """(name, a function that makes the list of its attacks), in the order of the table; each attack is a function."""
        for case in self.cases.values():
            for fault in case.faults:
                yield f"{case.name}, {fault}", functools.partial(self._strikes, case, fault)
            yield f"{case.name}, {INSTANT}", functools.partial(self._instants, case)

    # --- what everything is compared with ---

    def whole(self, case):
        """How many file operations there are, what is there at the end, and how long it takes, if nothing goes wrong."""
        if case.name not in self._ends:
            self._make_before(case)
            folder, started_at = case.folder("whole"), time.monotonic()
            status, error = self._run(case, case.start(folder), folder)
            assert status == 0, error
            end, seconds = case.end(folder), time.monotonic() - started_at
            self._ends[case.name] = int((folder.parent / "count").read_text()), end, seconds
            if case.name.startswith(("resumed", "going back")):
                of = self.whole(self.cases[_GOES_ON_FROM.get(case.name, case.name.removeprefix("resumed "))])[1]
                assert not cases_module.differing(end, of), (case.name, cases_module.differing(end, of))
        return self._ends[case.name]

    def _make_before(self, case):
        if case.made_from is None or case.made_from.exists():
            return
        name, _, state = case.made_from.parent.name.rpartition("-")
        self.whole(self.cases[name])
        if state == "stopped":
            self._stopped(self.cases[name])

    def _stopped(self, case):
        """The folder of a case that got SIGTERM when something was there to go on with."""
        folder = self.base / f"{case.name}-stopped" / "out"
        num_operations = self.whole(case)[0]
        for percent in (30, 20, 40, 10, 50, 60, 70):
            if any([*folder.glob("stacks/*"), *folder.glob("**/checkpoint-*")]):
                break
            shutil.rmtree(folder.parent, ignore_errors=True)
            self._run(case, case.start(case.folder("stopped")), folder, num_operations * percent // 100, "SIGTERM")
        else:
            raise AssertionError(f"{case.name} leaves nothing to go on with")
        return folder

    # --- attacks ---

    def _strikes(self, case, fault):
        num_operations, *_ = self.whole(case)
        places = self.random.sample(range(1, num_operations + 1), num_operations)
        return [functools.partial(self._strike, case, fault, at) for at in places]

    def _strike(self, case, fault, at):
        folder = case.folder(self._next(case))
        status, error = self._run(case, case.start(folder), folder, at, fault)
        where = f"before operation {at}"
        if status != 0 and "Traceback" in error:
            return TRACEBACK, f"{where}: {error}"
        count, number = folder.parent / "count", FAULTS[fault]
        if status == 0 and count.exists() and int(count.read_text()) < at:  # there were fewer this time
            return self._compared(case, folder, where)
        if status not in ((0, 2) if number is None else (-number, 128 + number)):
            return LOST, f"{where}: exit status {status}. {error}"
        if number is None and status == 2 and "No room" not in error:
            return LOST, f"{where}: not said that the disk is full. {error}"
        if number is None and status == 0:
            return self._compared(case, folder, where)
        return self._goes_on(case, folder, where, signalled=fault in ("SIGTERM", "SIGINT"))

    def _instants(self, case):
        seconds = self.whole(case)[2]
        return [functools.partial(self._kill, case, self.random.uniform(0, seconds)) for _ in range(_INSTANTS)]

    def _kill(self, case, delay):
        folder, where = case.folder(self._next(case)), f"after {delay:.3f} s"
        process = started.Started(*case.start(folder), env=case.env, before=case.patch)
        with contextlib.suppress(subprocess.TimeoutExpired):  # which kills
            process.wait(delay)
        if process.returncode == 0:  # it took less time than usual
            return self._compared(case, folder, where)
        return self._goes_on(case, folder, where)

    def _goes_on(self, case, folder, where, signalled=False):
        """The outcome once it is given again."""
        status, error = self._run(case, case.again(folder), folder)
        if status != 0 and "Traceback" in error:
            return TRACEBACK, f"{where}: {error}"
        if status not in (0, 2):
            return LOST, f"{where}: exit status {status}. {error}"
        outcome, why = self._compared(case, folder, where, signalled)
        if status == 2 and outcome != IDENTICAL:
            return REFUSED, f"{where}: {error}"
        return outcome, why

    def _compared(self, case, folder, where, signalled=False):
        ends = self.whole(case)[1], case.end(folder)
        if signalled:
            ends = cases_module.without_other_checkpoints(*ends)
        found = cases_module.differing(*ends)
        if found:
            return LOST, f"{where}: other ends: {', '.join(found)} in {folder}"
        if left := [path.name for path in folder.parent.glob(".tmp-lrlab-*")]:
            return LOST, f"{where}: left beside {folder}: {', '.join(left)}"
        shutil.rmtree(folder.parent)
        return IDENTICAL, ""

    # --- processes ---

    def _next(self, case):
        self._numbers[case.name] += 1
        return self._numbers[case.name]

    def _run(self, case, command, folder, at=0, fault=None):
        """Exit status and stderr of a command, with a fault before operation `at`."""
        count = folder.parent / "count"
        pipe = Pipe(folder.parent / "pipe") if fault == FULL_DISK else None
        before = case.before(folder, at, fault, count, pipe and str(pipe.path))
        process = started.Started(*command, env=case.env, before=before)
        with case.struck(process, at, fault, count):
            _, error = process.communicate()
        return process.returncode, pipe.read() if pipe else error


def attack(base, seconds, only="", seed=0, report=print):
    """
    The table, from row to outcome to number, of rows whose name matches the regular expression `only`. The seconds are
    shared evenly among them; rows and their attacks come in an order shuffled by `seed`, until the time is over.
    """
    table, ends_at = {}, time.monotonic() + seconds
    with cases_module.all_cases(base) as cases:
        rows = [row for row in Attacks(base, cases, seed).rows() if re.search(only, row[0])]
        for index, (name, make) in enumerate(random.Random(seed).sample(rows, len(rows))):
            if (now := time.monotonic()) > ends_at:
                break
            until, attacks = now + (ends_at - now) / (len(rows) - index), make()
            outcomes = table[name] = {"possible": len(attacks), "cases": 0, **dict.fromkeys(OUTCOMES, 0)}
            for one in attacks:
                if time.monotonic() > until and outcomes["cases"]:
                    break
                outcome, why = one()
                outcomes["cases"] += 1
                outcomes[outcome] += 1
                if why:
                    report(f"{name}, {outcome}: {why}")
    return {name: table[name] for name, _ in rows if name in table}


def as_markdown(table):
    columns = ["possible", "cases", *OUTCOMES]
    yield f"| what | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, outcomes in table.items():
        yield f"| {name} | {' | '.join(map(str, outcomes.values()))} |"


def failures(table):
    """How many attacks ended as none may."""
    return sum(outcomes[TRACEBACK] + outcomes[LOST] for outcomes in table.values())
