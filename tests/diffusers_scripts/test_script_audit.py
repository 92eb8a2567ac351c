"""`lrlab audit` of diffusers' scripts: the same weights, and the curve that ran.

DIFFUSERS_CHECKOUT=path/to/diffusers python -m pytest -m slow tests/diffusers_scripts/test_script_audit.py
"""

import json
import os
import subprocess
import sys

import pytest

from diffusers_lrlab import lr_curve

from . import test_scripts
from .cases import command
from .run_script import __file__ as run_script
from .test_scripts import EXAMPLES, IN_TURN, differing, inputs, weights  # noqa: F401

pytestmark = test_scripts.pytestmark
UPDATES, ACCUMULATION = 8, 4


def ended(case, inputs, folder, *before):  # noqa: F811
    own = command(case, EXAMPLES, inputs, folder, UPDATES, ACCUMULATION, batch_size=1)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = [*before, sys.executable, run_script, *own]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return weights(folder), done.stderr


@pytest.mark.parametrize("case", IN_TURN[:3])
def test_the_audit_changes_no_bit_and_shows_the_curve(tmp_path, inputs, case):  # noqa: F811
    bare, _ = ended(case, inputs, tmp_path / "bare")
    audit = [sys.executable, "-m", "diffusers_lrlab.cli.main", "audit", f"--out={tmp_path}", "--"]
    audited, stderr = ended(case, inputs, tmp_path / "audited", *audit)
    assert differing(bare, audited) == []
    (optimizer,) = json.loads((tmp_path / "lr_audit.json").read_text())["optimizers"]
    assert optimizer["num_updates"] == UPDATES
    assert {*optimizer["backward_passes"]} == {ACCUMULATION}
    applied, findings = optimizer["groups"][0]["lr"], {finding["name"] for finding in optimizer["findings"]}
    if case.name == "unconditional":  # counts micro-batches in its schedule
        asked = lr_curve("cosine", 1e-3, 2 * ACCUMULATION, UPDATES * ACCUMULATION)[:UPDATES]
        assert "too_long" in findings or "still_warming_up" in findings
    else:
        asked = lr_curve("cosine", 1e-3, 2, UPDATES)
        assert "too_long" not in findings
    assert applied == pytest.approx(asked.tolist(), rel=1e-12)
    assert "LR audit: AdamW (LambdaLR of get_cosine_schedule_with_warmup), 8 updates, 4 backward passes each." in stderr
