"""Small studies that several files of this folder use."""

import json
import shutil

import pytest
from small_studies import BEYOND, HOT, ONE, SPEC, TINY, study, without_report


@pytest.fixture(scope="module")
def bare():
    """No reports unless they are tested."""
    with without_report() as patch:
        yield patch


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """The folder of the tiny model."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def stacked(home):
    with without_report():
        return study(home, home / "stacked", "--executor=stacked")


@pytest.fixture(scope="session")
def local(home):
    with without_report():
        return study(home, home / "local", "--executor=local")


@pytest.fixture
def done(stacked, tmp_path):
    """A copy of a finished study."""
    return shutil.copytree(stacked, tmp_path / "done")


@pytest.fixture(scope="session")
def with_hot(home):
    """One seed; one of three arms diverges."""
    with without_report():
        return study(home, home / "hot", **ONE, arms={**SPEC["arms"], "hot": HOT})


@pytest.fixture(scope="session")
def beyond(home):
    """A study whose best learning rate is at the edge of those tried at first."""
    with without_report():
        return study(home, home / "beyond", "--executor=stacked", **BEYOND)
