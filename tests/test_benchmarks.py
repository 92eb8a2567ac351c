"""Every benchmark starts and ends, with the smallest sizes that it has."""

from pathlib import Path

import pytest
import runs
import started

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "common")
WITH_FOLDER = {"lr_finder", "timesteps_trial", "toy2d_study"}
QUICK = {"matmul_paths", "preflight", "scheduler_step"}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in NAMES])
def test_a_benchmark_runs(tmp_path, name):
    out = ["--out", str(tmp_path / "out")] if name in WITH_FOLDER else []
    command = [BENCHMARKS / f"{name}.py", "--tiny", *out]
    status, shown, error = started.run(*command, env=runs.environment(), cwd=tmp_path)
    assert status == 0, error
    assert "|" in shown  # a table
