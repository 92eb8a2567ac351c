"""What becomes of trainings that are killed, before every file operation in turn: `python -m tests.faults --minutes 60`."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.killed import as_markdown, kill_everywhere

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="when to stop, if not all operations have been taken")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which operations are taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = kill_everywhere(Path(folder), options.minutes * 60, options.seed)
    print(*as_markdown(table), sep="\n")
    sys.exit(any(outcomes["cases"] != outcomes["identical"] for outcomes in table.values()))
