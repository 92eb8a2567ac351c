"""Fixtures that several test files use."""

import pytest
from hub_server import HubServer


@pytest.fixture
def hub(tmp_path):
    """A Hub of one's own; `env` makes a subprocess use it."""
    with HubServer(tmp_path / "hf_home") as server:
        yield server
