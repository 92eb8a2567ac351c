"""`lrlab ema`: an average of another width of the weights of a finished run."""

import argparse
from pathlib import Path

from ..core.extras import require_extra
from ..core.files import folder_beside, new_folder
from .output import say


def ema_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="Folder of a finished run that was trained with --ema posthoc.")
    add("--sigma_rel", type=float, required=True, metavar="S", help="Width of the average, as a share of the run.")
    add("--out", type=Path, metavar="DIR", help="Folder for the pipeline (default: RUN-ema).")


def ema(options: argparse.Namespace) -> None:
    require_extra("train", "`lrlab ema`")
    from ..run.averages import write_average

    out = options.out or folder_beside(options.run, "-ema")
    with new_folder(out, "--out") as temporary:
        found = write_average(options.run, options.sigma_rel, temporary)
    quality = f"residual of the profile {found.residual:.2%}, largest coefficient {found.largest:.3g}"
    say(f"sigma_rel {options.sigma_rel:g}: {quality}\nWrote {out}.")
