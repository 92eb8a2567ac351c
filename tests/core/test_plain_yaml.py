"""YAML of downloaded files: plain data, and nothing that grows."""

import pytest
import yaml

from diffusers_lrlab.core.plain_yaml import load_front_matter, load_plain_yaml

# 2 to the power of 60 keys, in less than 1,000 bytes.
GROWING = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: 1}}\n" for n in range(1, 26))
BAD = [GROWING, "a: &x 1", "[" * 5000 + "]" * 5000, "- a\n" * 100_000, "!!python/object/apply:os.system [ls]"]
BAD += ["a: !!timestamp foo"]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:12])
def test_more_than_plain_data_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        load_plain_yaml(text)
    with pytest.raises(yaml.YAMLError):
        load_front_matter(f"\n---\n{text}\n---\n# a card\n")


def test_only_metadata_are_read():
    text = "a: [1, 2.5, {b: null}]\nc: yes\n"
    assert load_plain_yaml(text) == load_front_matter(f"---\n{text}---\nb: &x *x\n---\n") == yaml.safe_load(text)
    assert load_front_matter("---\r\na: 1\r\n---\r\n") == {"a": 1}
    assert load_front_matter("# no metadata\n---\na: &x 1\n---\n") is None
    for endless in ("---\n" + "\n" * 1_000_000, "---\na: 1\n" + "x\n" * 1_000_000, "---\n---\na: &x 1\n---\n"):
        with pytest.raises(yaml.YAMLError):
            load_front_matter(endless)
