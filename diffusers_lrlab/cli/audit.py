"""`lrlab audit`: the learning rate that any torch program really uses."""

import argparse

from ..core.errors import LabError


def audit_arguments(parser: argparse.ArgumentParser) -> None:
    from ..audit.run import add_options

    parser.usage = "lrlab audit [options] -- PROGRAM [its own arguments]"
    add_options(parser)


def audit(options: argparse.Namespace) -> int:
    from ..audit.run import options_of, run_audited

    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        raise LabError("Which program? Give it after the options: lrlab audit -- python train.py --its_own_option.")
    if command[0].endswith(".py"):
        raise LabError(f"{command[0]!r} is not a program. Hint: lrlab audit -- python {command[0]} ...")
    return run_audited(command, options_of(options))
