"""Combinations of power-function profiles against vectors, quadrature and averages that were really run."""

import numpy as np
import pytest
from tables import cases

from diffusers_lrlab import LabError
from diffusers_lrlab.averaging.forms import EMAForm, gamma_of_width
from diffusers_lrlab.averaging.posthoc import (
    Profiles,
    combine,
    snapshot_updates,
)

STORED = Profiles.of_widths([2, 2, 4, 4, 6, 6, 8, 8], 4 * [0.05, 0.1])


def one(end, width):
    return Profiles.of_widths([end], [width])


def density(profiles, at):
    """Profiles at times: `(num times, num profiles)`."""
    ends, powers = profiles.ends, profiles.gammas
    return np.where(at[:, None] <= ends, (powers + 1) * at[:, None] ** powers / ends ** (powers + 1), 0.0)


def nodes(ends, per_piece=400):
    """Times and weights of Gauss-Legendre quadrature between neighbouring ends, at which profiles jump."""
    x, w = np.polynomial.legendre.leggauss(per_piece)
    edges = [0.0, *sorted({*map(float, ends)})]
    pieces = [((high - low) / 2, (high + low) / 2) for low, high in zip(edges, edges[1:], strict=False)]
    return np.concatenate([half * x + middle for half, middle in pieces]), np.concatenate([half * w for half, _ in pieces])


def test_the_power_of_a_width_has_that_width():
    """Eq. 123: the standard deviation of the profile t^gamma."""
    for width in (0.01, 0.05, 0.1, 0.2, 0.28):
        gamma = gamma_of_width(width)
        assert (gamma + 1) ** 0.5 / ((gamma + 2) * (gamma + 3) ** 0.5) == pytest.approx(width, rel=1e-12)


@cases("width", (0.02, 0.05, 0.075, 0.1, 0.15, 0.25))
def test_coefficients_and_residual_are_those_of_least_squares_by_quadrature(width):
    target = one(8, width)
    at, weights = nodes(STORED.ends)
    root = np.sqrt(weights)[:, None]
    profiles, wanted = root * density(STORED, at), root * density(target, at)
    raw = np.linalg.lstsq(profiles, wanted[:, 0])[0]
    found = combine(STORED, target)
    np.testing.assert_allclose(found.coefficients * found.raw_sum, raw, atol=1e-11)
    assert found.coefficients.sum() == pytest.approx(1, rel=1e-12)
    assert found.largest == np.abs(found.coefficients).max()
    left = np.linalg.norm(profiles @ found.coefficients - wanted[:, 0]) / np.linalg.norm(wanted)
    assert found.residual == pytest.approx(left, abs=1e-7)  # the root of a difference of nearly equal numbers


def test_a_stored_average_is_itself_and_later_snapshots_are_not_used():
    found = combine(STORED, one(6, 0.05))
    np.testing.assert_allclose(found.coefficients, [0, 0, 0, 0, 1, 0, 0, 0], atol=1e-12)
    assert found.residual < 1e-7
    assert not combine(STORED, one(6, 0.15)).coefficients[6:].any()


def run_average(values, width, start=0, every=1):
    """A power-function average of a series, by the decays of a run."""
    form, average, along = EMAForm.of(f"power_function:sigma_rel={width},start_update={start},update_every={every}"), 0.0, []
    for value, decay in zip(values, form.decays(len(values)), strict=True):
        average = decay * average + (1 - decay) * value
        along.append(average)
    return np.array(along)


@cases(("start", "every"), [(0, 1), (400, 1), (0, 7)])
def test_a_combination_is_close_to_the_average_that_was_run(start, every):
    """On a random walk, whose spread is 1, as the reference has it for 8 snapshots."""
    num, widths = 4096, [0.05, 0.1]
    walk = np.cumsum(np.random.default_rng(1).normal(size=num)) / num**0.5
    updates = snapshot_updates(num, 8, start, every)
    tracks = [run_average(walk, width, start, every) for width in widths]
    stored = [track[update - 1] for update in updates for track in tracks]
    ends = [update - start for update in updates for _ in widths]
    profiles = Profiles.of_widths(ends, len(updates) * widths)
    for width, error in {0.05: 1e-12, 0.075: 0.01, 0.15: 0.01, 0.2: 0.02, 0.25: 0.03}.items():
        found = combine(profiles, one(ends[-1], width))
        assert found.coefficients @ stored == pytest.approx(
            run_average(walk, width, start, every)[updates[-1] - 1], abs=error
        )


def test_snapshots_are_equally_spaced_and_end_with_the_run():
    assert snapshot_updates(100, 4) == [25, 50, 75, 100]
    assert snapshot_updates(10, 3) == [3, 6, 10]
    assert snapshot_updates(100, 4, start_update=20) == [40, 60, 80, 100]
    assert snapshot_updates(100, 4, update_every=3) == [24, 48, 75, 99]
    for arguments in ((3, 4), (100, 4, 100), (100, 4, 97), (100, 8, 0, 20)):
        with pytest.raises(LabError, match="--ema posthoc takes"):
            snapshot_updates(*arguments)
