"""Generated inputs of every kind: `python -m tests.fuzz --minutes 60`. What fails is printed as lines for `corpus.jsonl`."""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.targets import TARGETS, Tally, search

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="when to stop")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    options = parser.parse_args()
    tallies, ends = {kind: Tally() for kind in TARGETS}, time.monotonic() + options.minutes * 60
    for turn, kind in enumerate(itertools.cycle(TARGETS)):
        if time.monotonic() > ends:
            break
        search(kind, 100, options.seed + turn // len(TARGETS), tallies[kind])
    print("| inputs | cases | accepted | failures | slowest, s |", "|---" * 5 + "|", sep="\n")
    for kind, tally in tallies.items():
        print(f"| {kind} | {tally.cases} | {tally.accepted} | {len(tally.failures)} | {tally.slowest:.1f} |")
        for what, given in tally.failures.items():
            print(what, json.dumps({"kind": kind, "input": given}), sep="\n", file=sys.stderr)
    cases, failures = sum(each.cases for each in tallies.values()), sum(len(each.failures) for each in tallies.values())
    print(f"{cases} inputs, {failures} failures, seed {options.seed}.")
    sys.exit(failures > 0)
