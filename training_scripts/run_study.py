"""Compare schedules, optimizers or anything else of a training run over data sets and seeds.

    accelerate launch training_scripts/run_study.py quick --out first-study
    accelerate launch training_scripts/run_study.py my_study.yaml --out my-study --dry_run

The same as `lrlab study run`. Presets: `lrlab study list`.
"""

import sys

from diffusers_lrlab.cli.study import add_run_arguments, run
from diffusers_lrlab.core.options import TextParser
from diffusers_lrlab.core.plugins import load_plugins
from diffusers_lrlab.core.program import exit_status


def compare() -> None:
    """Parses and runs the study."""
    parser = TextParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add_run_arguments(parser)
    options = parser.parse_args()
    load_plugins(options.plugins)
    run(options, "python training_scripts/run_study.py")


def main() -> int:
    """Turns errors that the user can mend into one message and the exit status 2."""
    return exit_status(compare)


if __name__ == "__main__":
    sys.exit(main())
