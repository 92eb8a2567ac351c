"""Pictures of a run's log."""

from types import SimpleNamespace

import numpy as np
import pytest

from diffusers_lrlab.training.plots import plot_losses, plot_lr

pytestmark = pytest.mark.pictures


def test_a_log_that_lost_its_rows_is_drawn_without_them(tmp_path):
    """Somebody removed it before the run went on from its last checkpoint."""
    curves = {
        "lrs": np.linspace(1, 0, 5),
        "momenta": np.full(5, 0.9),
        "lr_factors": None,
        "width": None,
        "follows_metric": False,
    }
    plan = SimpleNamespace(schedule=SimpleNamespace(sets_momentum=True), schedule_spec="demon", **curves)
    plot_losses([], tmp_path / "loss.png")
    plot_lr([], plan, tmp_path / "lr.png")
    assert all((tmp_path / name).stat().st_size for name in ("loss.png", "lr.png"))
