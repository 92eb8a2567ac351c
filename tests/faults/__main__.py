"""
What becomes of commands that are killed, stopped or out of disk: `python -m tests.faults --minutes 60`.

Kills, signals and full disks come before every file operation in turn.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.harness import as_markdown, attack, failures

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="when to stop, if not everything has been tried")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows of the table whose name matches this")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which things are tried")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = attack(Path(folder), options.minutes * 60, options.only, options.seed)
    print(*as_markdown(table), sep="\n")
    print(f"{sum(row['cases'] for row in table.values())} attacks, {failures(table)} failures, seed {options.seed}.")
    sys.exit(failures(table) > 0)
