"""Checks of files that a report names."""

import re

import pytest
import torch
from safetensors.torch import save

from diffusers_lrlab.diffusers_plugin.host.files import problem_with


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("log.json", b"{}", None),  # as a tokenizer's map of special tokens may be
        ("model.bin", b"", "is empty"),
        ("log.json", b"{", "cannot be read .JSONDecodeError"),
        ("log.jsonl", b"", "is empty"),
        ("log.jsonl", b"1\n{", "cannot be read"),
        ("log.parquet", b"PAR1", "cannot be read"),
        ("log.png", b"\x89PNG", "cannot be read"),
        ("log.safetensors", b"{}", "cannot be read"),
        ("log.safetensors", save({}), "is empty"),
        ("marker.txt", b"", None),
        ("log.json", b"[1]", None),
        ("log.jsonl", b"1\n2\n", None),
        ("log.safetensors", save({"x": torch.ones(1)}), None),
    ],
    ids=[
        "empty_dict",
        "empty_weights",
        "broken_json",
        "empty_jsonl",
        "broken_jsonl",
        "broken_parquet",
        "broken_png",
        "broken_safetensors",
        "no_tensors",
        "marker",
        "json",
        "jsonl",
        "safetensors",
    ],
)
def test_files_that_are_looked_at(tmp_path, file, text, problem):
    (tmp_path / file).write_bytes(text)
    for path in (tmp_path / file, tmp_path):
        found = problem_with(path)
        assert found is None if problem is None else re.search(problem, found), found
