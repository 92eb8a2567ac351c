"""Diffusers' own scripts, extended under the launcher, end with the bits of a run that was that long from the start.

DIFFUSERS_CHECKOUT=path/to/diffusers python -m pytest -m slow tests/diffusers_scripts/test_extended_scripts.py
"""

import pytest
import torch

from . import test_scripts
from .cases import command, run
from .test_resume import end_of
from .test_scripts import EXAMPLES, IN_TURN, inputs  # noqa: F401

pytestmark = test_scripts.pytestmark
WSD = "--lr_scheduler=warmup_stable_decay:num_decay_steps=4"


def own_command(case, inputs, folder, updates):  # noqa: F811
    own = command(case, EXAMPLES, inputs, folder, updates)
    own[own.index("--checkpointing_steps") + 1] = "4"
    schedule = own.index("--lr_scheduler")
    return [*own[:schedule], *own[schedule + 2 :], WSD]


@pytest.mark.parametrize("case", [IN_TURN[0], IN_TURN[1], IN_TURN[4]])
def test_an_extended_run_is_as_if_it_had_been_that_long(tmp_path, inputs, case):  # noqa: F811
    """Both go on before the decay, at update 8 of 12."""
    options = ["--exact_resume", "--strict", "--strict_lr_audit", "--fix_lr_clock"]
    epochs = ["--num_updates=12"] if case.name == "unconditional" else []  # which counts epochs
    short = own_command(case, inputs, tmp_path / "short", 12)
    done = run(short, options)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run(short, [*options, *epochs, "--extend=20"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "from its checkpoint of update 8, to 20 updates" in done.stderr
    assert "as if it had been that long from the start, to the bit" in done.stderr
    assert "LR audit: 12 updates, every value that follows the clock was as expected" in done.stderr
    done = run(own_command(case, inputs, tmp_path / "whole", 20), options)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, extended = end_of(tmp_path / "whole"), end_of(tmp_path / "short-20")
    shared = {key for key in whole if not key.startswith("checkpoint-4/")}  # the extended run begins at 8
    assert [key for key in shared if not torch.equal(whole[key], extended[key])] == []
