"""The remedies that errors name exist for the command that prints them."""

import argparse
import ast
import itertools
import re
from pathlib import Path

import pytest

import diffusers_lrlab
from diffusers_lrlab import cli
from diffusers_lrlab.cli import announce_loading
from diffusers_lrlab.cli.main import _parser
from diffusers_lrlab.core.errors import DiskFull, Interrupted, continued_by
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.launch import make_parser as parser_of_launcher
from diffusers_lrlab.study.context import stops_explained
from diffusers_lrlab.training.arguments import make_parser


def flags_of(parser):
    """The flags of a parser and of its subcommands."""
    inner = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return set(parser._option_string_actions).union(*map(flags_of, itertools.chain(*inner)))


OF_TRAINING = flags_of(make_parser("", [FinderConfig]))
PACKAGE = Path(diffusers_lrlab.__file__).parent
OTHER_PROGRAMS = set(  # accelerate, torchrun, git and LaTeX; placeholders
    "--multi_gpu --num_processes --dynamo_backend --cpu --nproc_per_node --use_fsdp --fsdp_version "
    "--fsdp_state_dict_type --rwrap --porcelain --untracked-files --its_own_option "
    "--option --name --x --no_x --no_ --lr_ --ema_ --hub".split()
)


def texts_with_flags():
    """Texts of the package, but for patches and the hooks of the launcher, which name flags of other programs' scripts."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in ("diffusers_plugin", "upstream"):
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in dict.fromkeys(found) if flags_in(text)]


def flags_in(text):
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", text)


def test_each_flag_that_a_text_names_exists():
    known = flags_of(_parser()) | OF_TRAINING | flags_of(parser_of_launcher())
    named = {flag for text in texts_with_flags() for flag in flags_in(text)}
    assert len(named) > 110
    assert named - known == OTHER_PROGRAMS & named


def test_the_outermost_command_says_how_it_is_continued(tmp_path):
    latest = "give the same command again with --resume_from_checkpoint latest"
    assert "--resume_from_checkpoint" in OF_TRAINING
    with continued_by(latest):
        assert f"whole update. To go on, {latest} (checkpoint-2)." in str(Interrupted(15, Path("checkpoint-2")))
    with continued_by("pull again"), continued_by(latest):
        assert str(DiskFull(Path("a"), "full")).endswith("Free some space, then pull again.")
    with stops_explained(tmp_path), continued_by(latest):
        assert str(DiskFull(Path("a"), "full")).endswith("then give the same command again: finished runs are kept.")
    assert str(DiskFull(Path("a"), "full")).endswith("then give the same command again.")
    assert str(Interrupted(15, Path("checkpoint-2"))).endswith("To go on, give the same command again (checkpoint-2).")


@pytest.mark.parametrize(("on_terminal", "rank", "expected"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_terminal_is_told_that_libraries_are_loaded(monkeypatch, capsys, on_terminal, rank, expected):
    monkeypatch.setattr(cli, "is_watched", lambda: on_terminal)
    monkeypatch.setattr(cli.sys, "modules", {})
    monkeypatch.setenv("RANK", str(rank))
    announce_loading()
    assert capsys.readouterr().err == "Loading libraries ...\n" * expected
