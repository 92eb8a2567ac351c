"""Options of `lrlab audit` and of `python -m diffusers_lrlab.audit`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError
from ..core.flags import TextParser
from ..core.ranges import COUNT, POSITIVE, Range

if TYPE_CHECKING:
    from .run import AuditOptions

_OF_EXPECT = ("num_updates", "num_warmup_steps", "learning_rate", "beta1")


def make_parser(usage: str) -> argparse.ArgumentParser:
    parser = TextParser(prog="diffusers_lrlab.audit", usage=usage, description=__doc__, allow_abbrev=False)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("."), metavar="DIR", help="Folder of lr_audit.png and lr_audit.json (default: .).")
    add("--expect", metavar="SPEC", help="Compare each update with this schedule; status 1 if one deviates.")
    add("--num_updates", type=int, metavar="N", help="Updates of the whole run, for --expect (default: those that ran).")
    warmup = "Warm-up for --expect, in updates, or below 1 as a fraction of the run (default: 0)."
    add("--num_warmup_steps", type=float, metavar="W", help=warmup)
    add("--learning_rate", type=float, metavar="LR", help="Peak for --expect (default: the highest that ran).")
    momentum = "Momentum of the optimizer, for a schedule that sets it (default: the highest that ran)."
    add("--beta1", type=float, metavar="X", help=momentum)
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="The program and its own arguments.")


def options_of(options: argparse.Namespace) -> AuditOptions:
    """The options, checked."""
    for name in _OF_EXPECT:
        if getattr(options, name) is not None and options.expect is None:
            raise LabError(f"--{name} has no effect without --expect. Add that or leave it out.")
    COUNT.check("--num_updates", options.num_updates, "it counts the optimizer updates of the whole run")
    Range("[0, inf)").check("--num_warmup_steps", options.num_warmup_steps, "it counts updates, or is a fraction of the run")
    POSITIVE.check("--learning_rate", options.learning_rate, "1e-4 is usual")
    Range("(0, 1)").check("--beta1", options.beta1, "0.9 is usual")
    from .run import AuditOptions

    return AuditOptions(options.out, _expectation(options))


def _expectation(options: argparse.Namespace) -> Any:
    if options.expect is None:
        return None
    from .expected import Expectation

    warmup = options.num_warmup_steps or 0
    warmup = int(warmup) if float(warmup).is_integer() else warmup
    return Expectation(options.expect, options.num_updates, warmup, options.learning_rate, options.beta1)
