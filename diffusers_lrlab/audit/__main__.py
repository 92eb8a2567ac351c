"""`accelerate launch -m diffusers_lrlab.audit [options] train.py ...`: the audit of a script that a launcher starts."""

import subprocess
import sys

from ..core.errors import LabError
from ..core.program import exit_status
from .options import make_parser, options_of
from .run import run_audited_rank


def main() -> int:
    """Runs the script in a separate process, and returns its exit status."""
    parser = make_parser("accelerate launch -m diffusers_lrlab.audit [options] (SCRIPT.py | -m MODULE) [its own arguments]")
    # DeepSpeed's launcher puts this before the script's arguments, where the script expects it.
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help="Set by DeepSpeed's launcher; passed on to the script."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="The next argument is a module, not a script.")
    options = parser.parse_args()
    arguments = options.program
    if not arguments:
        raise LabError("Which script? Give its path after the options of the audit, then its own arguments.")
    if options.local_rank is not None:
        arguments = [arguments[0], f"--local_rank={options.local_rank}", *arguments[1:]]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, *["-m"] * options.is_module, *arguments]
    return run_audited_rank(command, options_of(options))


if __name__ == "__main__":
    sys.exit(exit_status(main))
