"""The command line of training, derived from the dataclasses of the configuration, over YAML files."""

import argparse
import copy
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import yaml
from transformers.hf_argparser import HfArgumentParser

from ..core.errors import LabError, did_you_mean, shortened
from ..core.files import read_utf8
from ..core.flags import TextParser
from ..core.options import Option
from ..core.plugins import load_installed_plugins, load_plugins
from .config import CONFIG_GROUPS, TrainingConfig


class _Parser(TextParser, HfArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any):
        self.first: set[str] = set()  # options that `--help` shows first
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        return _help(self, self.first)


def make_parser(description: str, more_groups: Sequence[Any] = (), prog: str | None = None) -> _Parser:
    load_installed_plugins()  # the help shows their names
    parser = _Parser(
        [*CONFIG_GROUPS, *more_groups],
        prog=prog,
        usage="%(prog)s [--option value ...]",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.first = {"help", "config", *(field.name for group in more_groups for field in dataclasses.fields(group))}
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file with any of these options; flags override it.")
    for action in parser._actions:
        if (known := getattr(action.help, "option", None)) is not None:
            action.spelling = known.spelling  # type: ignore[attr-defined]
            parser.first |= {action.dest} if known.is_first else set()
            action.help, action.metavar = _help_of(action, known), _metavar_of(action, known)
        if action.dest == "learning_rate":
            action.type = number_or_auto
    return parser


def _help_of(action: argparse.Action, known: Option) -> str:
    """The help of an option with its names, default and range; a default of `None` is described by the help itself."""
    if known.is_internal:
        return argparse.SUPPRESS
    text = known.help
    if known.registry:
        text = text.replace("{names}", ", ".join([*known.entries, *known.entries.aliases]))
    if action.default is True:
        text = f"{text.removesuffix('.')} (on by default)."
    elif action.default is not None and action.default is not False:
        text = f"{text.removesuffix('.')} (default: {action.default})."
    return f"{text} In {known.range.text}." if known.range else text


def _metavar_of(action: argparse.Action, known: Option) -> str | None:
    if action.choices is not None or _is_switch(action):
        return None
    if action.type in (int, float):
        return "N" if action.type is int else "X"
    ending = action.dest.rpartition("_")[2]
    return "NAME" if known.registry else {"kwargs": "JSON", "dir": "DIR"}.get(ending, "PATH" if known.is_path else "VALUE")


def number_or_auto(text: str) -> float | str:
    """A learning rate, or "auto"."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, such as 1e-4, or auto, got {text!r}") from None


class _Formatter(argparse.HelpFormatter):
    """One spelling of each flag, and a switch that is on by default beside its `--no_...`."""

    def add_argument(self, action: argparse.Action) -> None:
        if not _is_negation(action):  # shown beside its switch
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        flags = [*action.option_strings] if action.dest == "help" else _spellings(action)[:1]
        if _is_switch(action):  # which takes a value only in YAML files
            shown.nargs = 0
            if action.default is True:
                flags.append(f"--no_{action.dest}")
        shown.option_strings = flags
        return super()._format_action_invocation(shown)


def _help(parser: argparse.ArgumentParser, first: Set[str]) -> str:
    """The options whose names are in `first`, the others by group, then spellings of older records and of diffusers."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    sections = [("what most runs need", [action for action in parser._actions if action.dest in first])]
    sections += [
        (str(group.title), [action for action in group._group_actions if action.dest not in first])
        for group in parser._action_groups
    ]
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    also = [
        f"{other} for {flag}" for action in parser._actions for flag, *others in [_spellings(action)] for other in others
    ]
    ending = f" These also work: {', '.join(also)}." if also else ""
    formatter.add_text(f"Each option may be written with hyphens in place of underscores.{ending}")
    return formatter.format_help()


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == "?" and action.const is True


def _is_negation(action: argparse.Action) -> bool:
    """Whether this is the `--no_x` that `HfArgumentParser` adds to a switch `--x`."""
    return isinstance(action, argparse._StoreFalseAction) and action.option_strings[0] == f"--no_{action.dest}"


def _spellings(action: argparse.Action) -> list[str]:
    """The flags without those spelled with hyphens, which work for every option: first the one that the help shows."""
    flags = [flag for flag in action.option_strings if flag.startswith("--") and "-" not in flag[2:]]
    return sorted(flags, key=lambda flag: flag != getattr(action, "spelling", ""))


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


def _parse(parser: _Parser, sources: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Values of all fields, where later sources override earlier ones."""
    options: dict[str, Any] = {}
    for source, given in sources:
        values, unknown = parser.parse_known_args(given, argparse.Namespace(**options))
        if unknown:
            flags = [flag for action in parser._actions for flag in action.option_strings]
            hint = did_you_mean(unknown[0].split("=")[0], flags)
            raise LabError(f"Unknown argument {shortened(unknown[0])} in {source}.{hint} See --help.")
        options = vars(values)
    del options["config"]
    load_plugins(options["plugins"])
    return options
