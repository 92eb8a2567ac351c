"""The command line of training, derived from the dataclasses of the configuration, over YAML files."""

import argparse
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import yaml

from ..core.errors import LabError
from ..core.files import read_utf8
from ..core.options import Option, TextParser, defaults_of, hints_of, options_of
from ..core.plugins import load_installed_plugins, load_plugins
from .config import CONFIG_GROUPS, TrainingConfig


def make_parser(description: str, more_groups: Sequence[Any] = (), prog: str | None = None) -> TextParser:
    """The parser of the options of training, and of further dataclasses of options, which the help shows first."""
    also: list[str] = []  # spellings of older records and of diffusers
    parser = TextParser(
        prog=prog,
        usage="%(prog)s [--option value ...]",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    first = parser.add_argument_group("what most runs need")
    first.add_argument("-h", "--help", action="help", help="show this help message and exit")
    for config_class in (*CONFIG_GROUPS, *more_groups):
        group = parser.add_argument_group(config_class._argument_group_name)
        for name, known in options_of(config_class).items():
            is_first = known.is_first or config_class in more_groups
            hint, default = hints_of(config_class)[name], defaults_of(config_class)[name]
            also += _add_option(first if is_first else group, name, known, hint, default)
    config = first.add_argument("--config", help="YAML file with any of these options; flags override it.")
    config.shown = "--config FILE.yaml"  # type: ignore[attr-defined]
    ending = f" These also work: {', '.join(also)}." if also else ""
    parser.epilog = f"Each option may be written with hyphens in place of underscores.{ending}"
    return parser


def _add_option(group: Any, name: str, known: Option, hint: Any, default: Any) -> list[str]:
    """Adds the flags of an option; returns other spellings than that of the help, in words."""
    wanted, *others = [
        each for each in (hint, *get_args(hint)) if each in (bool, int, float) or get_origin(each) is Literal
    ] or [str]
    spellings = sorted((f"--{name}", *known.aliases), key=lambda flag: flag != known.spelling)
    ending, how = name.rpartition("_")[2], {"type": wanted}
    value = "NAME" if known.registry else {"kwargs": "JSON", "dir": "DIR"}.get(ending, "PATH" if known.is_path else "VALUE")
    if wanted is bool:
        value, how = "", {"type": _switch, "nargs": "?", "const": True}
    elif get_origin(wanted) is Literal:
        choices = {str(choice): choice for choice in get_args(wanted)}
        value = f"{{{','.join(choices)}}}"
        how = {"type": lambda text: choices.get(text, text), "choices": [*choices.values()]}
    elif wanted in (int, float):
        value = "N" if wanted is int else "X"
        if str in get_args(hint):
            value, how = "VALUE", {"type": number_or_auto}
    flags = dict.fromkeys(each for flag in spellings for each in (flag, flag.replace("_", "-")))
    help = argparse.SUPPRESS if known.is_internal else known.help
    action = group.add_argument(*flags, dest=name, default=default, help=help, **how)
    action.option, action.shown = known, f"{spellings[0]} {value}".strip()
    if default is True:
        off = f"--no_{name}"
        group.add_argument(off, off.replace("_", "-"), dest=name, action="store_false", help=argparse.SUPPRESS)
        action.shown += f", {off}"
    return [f"{other} for {spellings[0]}" for other in spellings[1:] if "-" not in other[2:]]


def _switch(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return lowered in ("yes", "true", "t", "y", "1")


def number_or_auto(text: str) -> float | str:
    """A learning rate, or "auto"."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, such as 1e-4, or auto, got {text!r}") from None


class _Formatter(argparse.HelpFormatter):
    """One spelling of each flag, and a switch that is on by default beside its `--no_...`; registered names in the help."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return getattr(action, "shown", None) or super()._format_action_invocation(action)

    def _expand_help(self, action: argparse.Action) -> str:
        if (known := getattr(action, "option", None)) is None:
            return super()._expand_help(action)
        text, default = known.help, action.default
        if known.registry:
            load_installed_plugins()
            text = text.replace("{names}", ", ".join([*known.entries, *known.entries.aliases]))
        if default is True:
            text = f"{text.removesuffix('.')} (on by default)."
        elif default is not None and default is not False:  # the help itself describes a default of `None`
            text = f"{text.removesuffix('.')} (default: {default})."
        return f"{text} In {known.range.text}." if known.range else text


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML would use the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str, option: str) -> dict[str, Any]:
    """The mapping in the YAML file of `option`; anything else is a `LabError`."""
    try:
        options = yaml.load(read_utf8(path, option), _UniqueKeyLoader) or {}  # a SafeLoader
    except OSError as error:
        raise LabError(f"Cannot read {option} {path!r}: {error.strerror}. Give the path of a YAML file.") from None
    except LabError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as an impossible date
        raise LabError(f"{option} {path!r} is not valid YAML: {error}") from None
    if not isinstance(options, dict):
        raise LabError(f"{option} {path!r} must hold a mapping of options to values, such as 'lr_scheduler: cosine'.")
    return options


def _as_arguments(options: dict[str, Any], source: str) -> list[str]:
    """Options as command-line arguments, so that the same checks apply."""
    arguments: list[str] = []
    for key, value in options.items():
        if key == "config" or value is None:
            remedy = "A file cannot include another one." if key == "config" else "Remove the line to get the default."
            raise LabError(f"{source} has {key}: {value}. {remedy}")
        if key == "mixed_precision" and value is False:
            value = "no"  # YAML reads an unquoted no as false
        if isinstance(value, (dict, bool)):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise LabError(f"{source} has {key}: {value}, which is not JSON ({error}). Use numbers and text.") from None
        arguments.append(f"--{key}={value}")
    return arguments


def parse_options(options: dict[str, Any], source: str) -> TrainingConfig:
    """A configuration from options as data, such as those of a study; errors name `source`."""
    return TrainingConfig(**_parse(make_parser(""), [(source, _as_arguments(options, source))]))


def parse_arguments(arguments: Sequence[str], description: str, prog: str | None = None) -> TrainingConfig:
    """A configuration from command-line arguments, which override those of `--config FILE.yaml`."""
    return parse_with(arguments, description, prog=prog)[0]


def parse_with(arguments: Sequence[str], description: str, *more_groups: Any, prog: str | None = None) -> tuple[Any, ...]:
    """
    Like [`parse_arguments`], with further dataclasses of options: returns the training configuration, then one of each.
    """
    parser = make_parser(description, more_groups, prog)
    sources = [("the command line", list(arguments))]
    if path := parser.parse_known_args(arguments)[0].config:
        sources.insert(0, (f"--config {path}", _as_arguments(read_yaml(path, "--config"), f"--config {path!r}")))
    options = _parse(parser, sources)
    # Launchers pass the rank as a flag or in the environment; accelerate reads only the environment.
    if options["local_rank"] == -1:
        options["local_rank"] = int(os.environ.get("LOCAL_RANK", -1))
    others = [group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)}) for group in more_groups]
    return TrainingConfig(**options), *others


def _parse(parser: TextParser, sources: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Values of all fields, where later sources override earlier ones."""
    options: dict[str, Any] = {}
    for source, given in sources:
        values, unknown = parser.parse_known_args(given, argparse.Namespace(**options))
        parser.refuse(unknown, f" in {source}")
        options = vars(values)
    del options["config"]
    load_plugins(options["plugins"])
    return options
