"""Made-up inputs of every kind, until the time is over: `python -m tests.fuzz --minutes 60`. What fails is printed as lines
for `corpus.jsonl`."""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.fuzzing import Tally, search
from fuzz.targets import TARGETS


def fuzz(seconds, cases, seed, kinds):
    """Tallies by kind, after so many seconds, or once each kind had so many cases."""
    tallies, ends = {kind: Tally() for kind in kinds}, time.monotonic() + seconds
    for turn in itertools.count():
        for kind, tally in tallies.items():
            if time.monotonic() > ends or all(each.cases >= cases for each in tallies.values()):
                return tallies
            if tally.cases < cases:
                search(kind, min(100, cases - tally.cases), seed + turn, tally)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="when to stop at the latest")
    parser.add_argument("--cases", type=int, default=10**9, help="of each kind, after which it stops earlier")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--only", choices=TARGETS, action="append", metavar="KIND", help=f"of {', '.join(TARGETS)}")
    options = parser.parse_args()
    found = fuzz(options.minutes * 60, options.cases, options.seed, options.only or TARGETS)
    print("| inputs | cases | accepted | refused | tracebacks | hangs | slowest, s |", "|---" * 7 + "|", sep="\n")
    for kind, tally in found.items():
        print(f"| {kind} | {' | '.join(map(str, tally.row))} |")
    for kind, tally in found.items():
        for what, given in tally.failures.items():
            print(what, json.dumps({"kind": kind, "input": given}), sep="\n", file=sys.stderr)
    sys.exit(any(tally.failures for tally in found.values()))
