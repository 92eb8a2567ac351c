"""Compare schedules, optimizers or anything else of a training run over data sets and seeds.

    accelerate launch training_scripts/run_study.py quick --out first-study
    accelerate launch training_scripts/run_study.py my_study.yaml --out my-study --dry_run

The same as `lrlab study run`. Presets: see README, Studies.
"""

import argparse
import sys
from typing import NoReturn

from diffusers_lrlab.cli.study import add_run_arguments, run
from diffusers_lrlab.core.errors import Interrupted, LabError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LabError(f"{message}. See --help.")


def main() -> int:
    """Parses, runs, and turns errors that the user can mend into one message and the exit status 2."""
    try:
        parser = _Parser(description=__doc__.partition("\n")[0], allow_abbrev=False)
        parser.add_argument("what", metavar="SPEC", help="a YAML file, or the name of a preset")
        add_run_arguments(parser)
        options = parser.parse_args()
        run(options, "python training_scripts/run_study.py")
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return 128 + interruption.signal_number
    except KeyboardInterrupt:
        return 130
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
