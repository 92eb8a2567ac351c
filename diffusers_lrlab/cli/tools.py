"""`lrlab plan` and `env`."""

import argparse

from .output import say, say_json
from .training import train


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of lrlab train", "All of them; see `lrlab train --help all`.")


def plan(options: argparse.Namespace) -> None:
    train([*options.rest, "--dry_run"])


def environment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def environment(options: argparse.Namespace) -> None:
    from ..core.environment import describe_devices, describe_environment, missing_packages

    found = describe_environment() | {"devices": describe_devices(), "missing": missing_packages()}
    if options.json:
        say_json(found, indent=2)
        return
    rows = {**found.pop("versions"), **found}
    rows["missing"] = "; ".join(f"{extra}: {', '.join(names)}" for extra, names in rows["missing"].items()) or "nothing"
    rows["devices"] = ", ".join(rows["devices"])
    rows["plugins"] = ", ".join(plugin["name"] for plugin in rows["plugins"]) or "none"
    say("\n".join(f"{name:>16}  {value}" for name, value in rows.items()))
