"""`lrlab floor`: the loss of a perfect model, by noise level."""

import argparse
import tempfile
from pathlib import Path

from ..core.errors import LabError
from ..core.ranges import Range
from .output import say, say_json


def floor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab floor [--run DIR] [--max_images N] [--out PLOT.png] [--json] [--option value ...]"
    add = parser.add_argument
    add(
        "--run",
        type=Path,
        metavar="DIR",
        help="Folder of a run, whose data and objective are used and whose losses are shown beside the floor.",
    )
    add("--max_images", type=int, default=10_000, metavar="N", help="Training images used (default: %(default)s).")
    add("--out", type=Path, metavar="PLOT.png", help="Also plot the result.")
    add("--json", action="store_true", help="Print JSON.")
    parser.add_argument_group("options of lrlab train", "Data and objective, without --run; see `lrlab train --help`.")


def floor(options: argparse.Namespace) -> None:
    import yaml

    from ..training.arguments import parse_arguments

    Range("[4, 1e6]", whole=True).check("--max_images", options.max_images, "10000 is usual")
    if options.run is not None and options.rest:
        raise LabError(
            f"{options.rest[0]!r} has no effect with --run, whose record sets the data and objective. Hint: leave one out."
        )
    arguments = options.rest
    with tempfile.TemporaryDirectory() as temporary:
        if options.run is not None:
            from ..hub.rerun import repeated_options

            file = Path(temporary) / "recorded.yaml"
            file.write_text(yaml.safe_dump(repeated_options(options.run, trains=False)), encoding="utf-8")
            arguments = ["--config", str(file)]
        # No folder is written.
        config = parse_arguments([*arguments, "--output_dir", str(Path(temporary) / "none")], "")
        from ..run.floor import loss_floor  # imported after the command line is understood: it takes seconds

        found = loss_floor(config, options.max_images, options.run)
    if options.out is not None:
        found.plot(options.out)
    if options.json:
        say_json(found.as_data(), indent=2)
    else:
        say(found.describe() + ("" if options.out is None else f"\nWrote {options.out}."))
