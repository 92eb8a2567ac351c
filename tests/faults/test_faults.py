"""A sample of the attacks that `python -m tests.faults` makes all of."""

import pytest
from faults.harness import attack, failures


@pytest.mark.slow
def test_whatever_goes_wrong_it_ends_with_the_same_bits_or_is_refused(tmp_path):
    """An attack or two of each of some kinds, which are the same every time."""
    told = []
    table = attack(tmp_path, seconds=45, report=told.append)
    assert not failures(table), "\n".join(told)
