"""Every benchmark starts and ends, with the smallest sizes that it has."""

import subprocess
import sys
from pathlib import Path

import pytest
import runs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "common")
WITH_FOLDER = {"lr_finder", "timesteps_trial", "toy2d_study"}
QUICK = {"scheduler_step", "matmul_paths", "train_step"}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in NAMES])
def test_a_benchmark_runs(tmp_path, name):
    out = ["--out", str(tmp_path / "out")] if name in WITH_FOLDER else []
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--tiny", *out]
    done = subprocess.run(command, env=runs.environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|" in done.stdout  # a table
