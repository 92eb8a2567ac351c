"""Counts in sentences: "1 update", and nowhere "1 updates"."""

import ast
import re
from pathlib import Path

import pytest

import diffusers_lrlab
from diffusers_lrlab.core.words import agreeing, counted, duration, singular, times

PACKAGE = Path(diffusers_lrlab.__file__).parent
NOUNS = """arms bands batches bytes channels characters checkpoints copies cores dimensions epochs files hours images levels
    lines losses micro-batches minutes parameters points probes processes rollbacks rows runs samples scripts seconds seeds
    sets shards spikes steps sweeps tensors tests threads timesteps times updates values weights workers""".split()
ADJECTIVES = "common corrupt data generated held-out optimizer real training worker".split()
COUNTED = re.compile(rf" (?:(?:{'|'.join(ADJECTIVES)}) )?(?:{'|'.join(NOUNS)})\b| \w+\((?:s|es)\)")
# Measures and words, which are no counts.
NO_COUNTS = (
    "{number(row['speedup'])} times as fast",
    "{weights} weights, fixed noise",
    "{length} steps long",
    "core/words.py",
)


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "update", "1 update"),
        (2, "process", "2 processes"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "entry", "2 entries"),
        (0.5, "epoch", "0.5 epochs"),
        (2, "branch", "2 branches"),
    ],
)
def test_a_count_and_its_noun(number, noun, text):
    assert counted(number, noun) == text


def test_numbers_are_written_as_asked():
    assert counted(1500, "parameter", ",") == "1,500 parameters"
    assert counted(1.0, "epoch", ".4g") == "1 epoch"
    assert [times(number) for number in (1, 2, 30)] == ["once", "2 times", "30 times"]
    assert [agreeing(number, "is", "are") for number in (1, 2)] == ["is", "are"]


def test_every_name_of_a_kind_of_data_has_a_singular():
    from diffusers_lrlab.training.kinds import KINDS

    assert {name: singular(name) for name in KINDS} == {"images": "image", "latents": "latent", "points": "point"}


def plain_counts(path):
    """Places in a file where a number stands before a plural without [`counted`]."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                continue
            spec = value.format_spec.values[0].value if value.format_spec and value.format_spec.values else ""
            is_measure = isinstance(spec, str) and spec[-1:] in ("g", "f", "e")
            name = ast.unparse(value.value)
            is_constant = name.isupper()
            if COUNTED.match(text.value) and not is_measure and not is_constant and value.conversion == -1:
                yield f"{path.relative_to(PACKAGE)}:{value.lineno}: {{{name}}}{text.value[:30]}"


def test_no_count_in_a_message_is_without_its_noun():
    found = [place for path in PACKAGE.rglob("*.py") for place in plain_counts(path)]
    found = [place for place in found if not any(known in place for known in NO_COUNTS)]
    assert not found, "\n".join(found)


def test_no_template_has_a_plural_beside_its_gap():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                gaps = re.finditer(r"\{\w*\}", node.value)
                found += [f"{path}:{node.lineno}" for gap in gaps if COUNTED.match(node.value, gap.end())]
    assert not found


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (43.21, "43.2 s"), (120, "2 min"), (1758, "29.3 min"), (7200, "2 h"), (9000, "2.5 h"), (1e7, "2,778 h")],
)
def test_times_have_the_unit_that_suits_them(seconds, text):
    assert duration(seconds) == text
