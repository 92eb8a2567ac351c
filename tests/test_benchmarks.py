"""Every benchmark starts and ends, with the smallest sizes that it has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import started

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in ("common", "template", "host_loops"))
WITH_FOLDER = {"flow_or_ddpm_digits", "lr_finder", "toy2d_study"}
QUICK = {"preflight", "scheduler_step"}
# Those that time imports.
STARTS_PYTHON = {"diffusers_imports", "first_minutes"}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in NAMES])
def test_a_benchmark_runs(tmp_path, name):
    out = ["--out", str(tmp_path / "out")] if name in WITH_FOLDER else []
    command = [BENCHMARKS / f"{name}.py", "--tiny", *out]
    before = None if name in STARTS_PYTHON else started.fork_what_is_run
    status, shown, error = started.run(*command, env=runs.environment(), cwd=tmp_path, before=before)
    assert status == 0, error
    assert "|" in shown  # a table


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_needs_no_data_sets_or_statistics(tmp_path):
    """A lent machine has torch and what is usual beside it."""
    absent = {"datasets", "data_morph", "matplotlib", "pyarrow", "scipy", "sklearn", "statsmodels"}
    code = f"""
import runpy, sys
sys.path[:0] = [{str(BENCHMARKS.parent / "tests" / "scripts")!r}, {str(BENCHMARKS)!r}]
import without_packages
without_packages.hide({absent!r})
sys.argv = ["gpu.py", "--tiny"]
runpy.run_path({str(BENCHMARKS / "gpu.py")!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=runs.environment(), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row.get("part") for row in rows} == {None, "roofs", "unet", "split", "stacks", "members", "data", "losses"}
    assert not any("error" in row for row in rows)
