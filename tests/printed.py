"""What is printed in README and docs/: blocks of code, by language, and the commands in them."""

import argparse
import contextlib
import importlib.util
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from registrations import restored

import diffusers_lrlab
from diffusers_lrlab import launch
from diffusers_lrlab.cli import main as cli
from diffusers_lrlab.core import plugins
from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.models.registry import DENOISERS, has_own_code
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.timesteps.registries import TIMESTEP_SAMPLERS
from diffusers_lrlab.training.arguments import parse_arguments, parse_with

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Programs of others, whose arguments are theirs.
OTHERS = "pip git hf cmp mkdocs ruff codespell mypy lint-imports source cd trackio deepspeed simpletuner".split()


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(*languages):
    """Fenced blocks of these languages, in order."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(page.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def block_with(text, *languages):
    """The first block that contains a text."""
    return next(block for block in blocks(*languages) if text in block.code)


def anchor(title):
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def questions():
    """The commands of the page of questions, each a block in a row of a table."""
    page = ROOT / "docs/which-tool.md"
    for line, text in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if row := re.match(r"\| .*\? \| `(.+?)` \| ", text):
            yield Block(page.relative_to(ROOT).as_posix(), line, "bash", row[1])


def commands():
    """Pairs of the block and the words of a command in it."""
    found = []
    for block in [*blocks("bash"), *questions()]:
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command = words[: words.index(">")] if ">" in words[:end] else words[:end]
                found.append((block, [word for word in command if word != "..."]))
                words = words[end + 1 :]
    return found


class Parsed(BaseException):
    """A program has parsed its arguments, and goes no further."""


def parse(words):
    """
    Parses a command by the parser of what it starts, without starting it.

    Returns:
        What was parsed, or `None` for programs of others.
    """
    while re.match(r"[A-Z_]+=", words[0]):  # a variable of the environment
        words = words[1:]
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if words == ["accelerate", "env"]:
        return None
    if program == "accelerate":
        assert rest[0] == "launch", words
        return parse(["python", *_without_accelerates(rest[1:])])
    if program == "lrlab":
        return _parse_lrlab(rest)
    if program.startswith("python"):
        if rest[0] == "-m":
            return _parse_module(rest[1], rest[2:])
        if rest[0] == "-c":
            return compile(rest[1], "-c", "exec") and None
        return _parse_script(rest[0], rest[1:])
    assert program in OTHERS, f"{program} is not known here: give it a parser, or add it to OTHERS."
    return None


def _without_accelerates(words):
    """A script or `-m MODULE` with its arguments, from what accelerate's own parser leaves."""
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(words)
    return [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]


def _parse_lrlab(words):
    options = cli._parse(words)
    if options.command == "find-lr":
        return parse_with(options.rest, "", FinderConfig)[0]
    if options.command in cli.REST:
        return parse_arguments(options.rest, "")
    return options


def _parse_module(name, words):
    if name == "diffusers_lrlab.launch":
        return launch.make_parser().parse_args(words)
    if name == "diffusers_lrlab.train":
        return parse_arguments(words, "")
    if name == "diffusers_lrlab":
        return _parse_lrlab(words)
    if name in ("tests.fuzz", "tests.faults"):
        return _parse_by_running(ROOT, name, words)
    if name.startswith("tests."):  # takes folders, without a parser
        return importlib.util.find_spec(f"{name}.__main__") and None
    assert name in ("venv", "pytest", "build"), name
    return None


def _parse_script(path, words):
    name = Path(path).name
    if any(f"Save this as `{name}`" in page.read_text(encoding="utf-8") for page in PAGES):
        return None  # a program of the reader's
    if name == "train_ddpm.py":
        return parse_arguments(words, "")
    if name == "find_lr.py":
        return parse_with(words, "", FinderConfig)[0]
    if path.startswith(("docs/", "tests/")):
        return (ROOT / path).read_text(encoding="utf-8") and None  # it is there
    return _parse_by_running((ROOT / path).parent, ROOT / path, words)


def _parse_by_running(folder, program, words):
    """The arguments of a script or module that makes its parser when it runs, which ends there; flags are written out."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def stop(parser, *given, **named):
        options, unknown = parse_known_args(parser, *given, **named)
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        raise Parsed(options, [*unknown, *sorted(flags - {*parser._option_string_actions})])

    folder, modules = str(folder), {*sys.modules}
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        mock.patch.object(sys, "argv", [str(program), *words]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
    ):
        try:
            if isinstance(program, Path):
                runpy.run_path(str(program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except Parsed as parsed:
            options, unknown = parsed.args
        finally:
            for name in {*sys.modules} - modules:
                if isinstance(program, Path) and str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                    del sys.modules[name]  # such as benchmarks/common.py
    assert not unknown, unknown
    return options


@contextlib.contextmanager
def registrations_undone(*registries):
    """Names that an example or a plug-in registers are not there for other tests."""
    known = {*DENOISERS}
    with restored(SCHEDULERS, TIMESTEP_SAMPLERS, DENOISERS, METRICS, plugins._loaded, *registries):
        try:
            yield
        finally:
            for name in DENOISERS.keys() - known:
                if has_own_code(name):
                    delattr(diffusers_lrlab, DENOISERS[name].factory.__name__)


@contextlib.contextmanager
def docs_modules():
    """Lets modules of docs/ be imported."""
    with mock.patch.object(sys, "path", [str(ROOT / "docs"), *sys.path]):
        yield
