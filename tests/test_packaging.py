"""The sdist and the wheel hold everything that is committed, and the version is that of the package."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import diffusers_lrlab

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What is committed, or what an sdist holds, without what earlier builds have left."""
    folder = tmp_path_factory.mktemp("source") / "source"
    if (ROOT / ".git").exists():
        run("git", "clone", "--quiet", ROOT, folder, cwd=ROOT)
    else:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*_cache", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """The files of a source distribution, and those of the wheel that is built from it."""
    if "LRLAB_DIST" in os.environ:  # .ci/run has built them
        out = Path(os.environ["LRLAB_DIST"])
    else:
        out = tmp_path_factory.mktemp("dist")
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {*archive.namelist()}
    return in_sdist, in_wheel


def files_of(folder):
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {path for path in paths if not path.startswith(".git/") and "__pycache__" not in path and "egg-info" not in path}


def test_the_sdist_and_the_wheel_leave_nothing_out(source, built):
    assert files_of(source) - built[0] == set()
    code = {path for path in built[1] if ".dist-info/" not in path}
    assert code == {f"diffusers_lrlab/{path}" for path in files_of(source / "diffusers_lrlab")}
    assert "diffusers_lrlab/py.typed" in code
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in built[1])


def test_the_version_is_said_once(built):
    (metadata,) = (path for path in built[1] if path.endswith(".dist-info/METADATA"))
    assert metadata == f"diffusers_lrlab-{diffusers_lrlab.__version__}.dist-info/METADATA"
    for path in ("pyproject.toml", "CITATION.cff", "mkdocs.yml"):
        assert diffusers_lrlab.__version__ not in (ROOT / path).read_text(), path
