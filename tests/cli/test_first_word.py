"""The line that a command prints on a terminal before it imports large libraries."""

import os
import pty
import subprocess
import sys

import pytest
import runs

from diffusers_lrlab.cli.loading import TEXT

ANNOUNCED = "from diffusers_lrlab.cli.loading import announce_loading; announce_loading();"
# A stand-in for torch, since the line is printed before any of it runs.
IMPORTS = (
    "import importlib.util; importlib.util.find_spec('torch'); print('asked', flush=True); import torch; print(torch.told)"
)


def said(code, folder, on_terminal, **more):
    (folder / "torch.py").write_text("told = 'imported'")
    environment = {**runs.environment(), "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", **more}
    parent, child = pty.openpty()
    stderr = child if on_terminal else subprocess.PIPE
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True)
    os.close(child)
    assert done.returncode == 0
    assert done.stdout == "asked\nimported\n"
    try:
        return os.read(parent, 1000).decode() if on_terminal else done.stderr
    except OSError:  # nothing was written
        return ""
    finally:
        os.close(parent)


@pytest.mark.parametrize(
    ("on_terminal", "rank", "expected"), [(True, "0", TEXT), (True, "1", ""), (False, "0", "")], ids=str
)
def test_it_is_printed_once_for_a_terminal(tmp_path, on_terminal, rank, expected):
    assert said(ANNOUNCED * 2 + IMPORTS, tmp_path, on_terminal, RANK=rank).replace("\r\n", "\n") == expected


def test_commands_called_from_python_leave_no_trace(tmp_path):
    code = "from diffusers_lrlab.cli.main import main; main(['check', '/nowhere']);" + IMPORTS
    assert "Loading" not in said(code, tmp_path, on_terminal=True)
