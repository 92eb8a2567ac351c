"""A sample of the kills that `python -m tests.faults` takes all of."""

import pytest
from faults.killed import kill_everywhere


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_bits(tmp_path):
    told = []
    table = kill_everywhere(tmp_path, seconds=60, report=told.append)
    assert all(outcomes["cases"] == outcomes["identical"] for outcomes in table.values()), "\n".join(told)
