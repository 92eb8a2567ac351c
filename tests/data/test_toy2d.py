"""The toy sets: the laws they are drawn from, their densities, and the folders that `lrlab data export` writes."""

import ast
import json
import math
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.resources import files

import datasets
import numpy as np
import pytest
from PIL import Image
from scipy import stats
from scipy.spatial import cKDTree
from sklearn.datasets import make_moons
from tables import cases

import diffusers_lrlab
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.toy2d import MAX_POINTS, list_toy_datasets, load_toy_dataset, toy_log_prob, toy_points
from diffusers_lrlab.data.toy2d_entries import TOY_DATASETS
from diffusers_lrlab.hub.dataset_folder import export_toy_dataset

SETS = list(TOY_DATASETS)
WITH_DENSITY = [name for name in SETS if toy_log_prob(name) is not None]
# Draws have fixed seeds, so a p-value is a number that does not change: this one is met or it is not.
P_THRESHOLD = 1e-3
DINO = np.loadtxt(str(files("data_morph") / "data" / "starter_shapes" / "dino.csv"), delimiter=",", skiprows=1)


# --- draws -----------------------------------------------------------------------------------------------------------


def test_the_sets_of_the_study_and_the_classics_are_there():
    assert {"circle", "dino", "line", "moons"} <= set(SETS)
    assert {"swiss_roll", "checkerboard", "spirals", "eight_gaussians", "rings"} <= set(SETS)
    assert list_toy_datasets() == SETS
    assert diffusers_lrlab.list_toy_datasets() == SETS
    assert diffusers_lrlab.load_toy_dataset is load_toy_dataset


@cases("name", SETS)
def test_points_are_finite_float32_near_the_origin_and_of_its_scale(name):
    points = toy_points(name, 20_000)
    assert points.shape == (20_000, 2)
    assert points.dtype == np.float32
    assert np.isfinite(points).all()
    assert np.abs(points).max() <= 6
    assert np.abs(points.mean(axis=0)).max() < 1.5
    assert (points.std(axis=0) > 0.5).all()
    assert (points.std(axis=0) < 4).all()


@cases("name", SETS)
@cases("n", [1, 2, 3, 7])
def test_a_few_points_can_be_drawn_too(name, n):
    for split in ("train", "test"):
        points = toy_points(name, n, seed=0, split=split)
        assert points.shape == (n, 2)
        assert np.isfinite(points).all()
        assert len(load_toy_dataset(name, n, seed=0, split=split)) == n


@cases("name", SETS)
def test_a_draw_follows_from_its_arguments_and_the_global_generator_is_left_alone(name):
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    points = toy_points(name, 500, seed=3)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.seed(1)
    np.testing.assert_array_equal(toy_points(name, 500, 3, "train"), points)


@cases("name", SETS)
def test_no_point_is_in_two_draws(name):
    """Other splits, and other seeds, also those that are near or negative or beyond 64 bits."""
    draws = [toy_points(name, 2000, seed, split) for seed in (42, 43, 0, -1, 2**70) for split in ("train", "test")]
    for draw in draws:
        assert len(np.unique(draw, axis=0)) > 1990
    together = np.concatenate([np.unique(draw, axis=0) for draw in draws])
    shared = len(together) - len(np.unique(together, axis=0))
    assert shared <= 2  # float32 has that many numbers only


@cases("name", SETS)
def test_the_default_splits_share_no_point(name):
    train, test = toy_points(name, 10_000), toy_points(name, 10_000, split="test")
    both_splits = np.concatenate([np.unique(train, axis=0), np.unique(test, axis=0)])
    assert len(np.unique(both_splits, axis=0)) == len(both_splits)


def test_every_set_draws_other_numbers():
    """Uniform numbers of one stream would tie the sets together."""
    line, board = toy_points("line", 4000), toy_points("checkerboard", 4000)
    for first in (line[:, 0], line[:, 1]):
        for second in (board[:, 0] % 2, board[:, 1] % 2):
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


@cases("name", SETS)
def test_a_set_of_a_thousand_points_is_shuffled(name):
    """Whoever takes the first points takes a draw from the whole, not from a part."""
    points = toy_points(name, 4000)
    for axis in (0, 1):
        assert stats.ks_2samp(points[:1000, axis], points[1000:, axis]).pvalue > P_THRESHOLD


# --- data sets -------------------------------------------------------------------------------------------------------


@cases("name", SETS)
@cases("split", ["train", "test"])
def test_a_data_set_has_one_column_of_two_float32(name, split):
    dataset = load_toy_dataset(name, 50, seed=1, split=split)
    assert dataset.features == datasets.Features({"x": datasets.List(datasets.Value("float32"), length=2)})
    assert dataset.with_format("numpy")["x"][:].dtype == np.float32
    np.testing.assert_array_equal(dataset.with_format("numpy")["x"][:], toy_points(name, 50, 1, split))
    np.testing.assert_array_equal(np.array(dataset[7]["x"], np.float32), toy_points(name, 50, 1, split)[7])


@cases("name", SETS)
def test_fingerprints_follow_the_data(name):
    def fingerprint(**options):
        return load_toy_dataset(name, **{"n": 20, **options})._fingerprint

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(seed=1), fingerprint(split="test"), fingerprint(n=21)}) == 4


@pytest.mark.slow
def test_points_and_fingerprints_are_the_same_in_another_process():
    """Which `hash` of a string, or the order of a set, would spoil."""
    script = (
        "from diffusers_lrlab.data.toy2d import *\n"
        "print({n: (load_toy_dataset(n, 20)._fingerprint, toy_points(n, 20).tolist()) for n in list_toy_datasets()})"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    here = {name: (load_toy_dataset(name, 20)._fingerprint, toy_points(name, 20).tolist()) for name in SETS}
    assert ast.literal_eval(done.stdout) == here


# --- the study's sets ------------------------------------------------------------------------------------------------


def template_moons(n, rng):
    points, _ = make_moons(n, noise=0.03, random_state=int(rng.integers(2**31)))
    return np.stack([2 * (points[:, 0] + 0.3) - 1, 3 * (points[:, 1] + 0.3) - 1], axis=1)


def template_line(n, rng):
    return 4 * np.stack([rng.uniform(-0.5, 0.5, n), rng.uniform(-1, 1, n)], axis=1)


def template_circle(n, rng):
    x = np.round(rng.uniform(-0.5, 0.5, n) / 2, 1) * 2
    y = np.round(rng.uniform(-0.5, 0.5, n) / 2, 1) * 2
    norm = np.sqrt(x**2 + y**2) + 1e-10
    r, angle = rng.uniform(0, 0.03, n), rng.uniform(0, 2 * math.pi, n)
    return 3 * np.stack([x / norm + r * np.cos(angle), y / norm + r * np.sin(angle)], axis=1)


def template_dino(n, rng):
    assert len(DINO) == 142
    points = DINO[rng.integers(len(DINO), size=n)] + 0.15 * rng.normal(size=(n, 2))
    return np.stack([(points[:, 0] / 54 - 1) * 4, (points[:, 1] / 48 - 1) * 4], axis=1)


TEMPLATES = {"circle": template_circle, "dino": template_dino, "line": template_line, "moons": template_moons}
TEMPLATE_POINTS = 100_000


@cache
def both(name):
    """Points of ours and of the template."""
    template = TEMPLATES[name](TEMPLATE_POINTS, np.random.default_rng(12345))
    return toy_points(name, TEMPLATE_POINTS, seed=6).astype(np.float64), template


@cases("name", TEMPLATES)
def test_moments_are_those_of_the_template(name):
    """Up to 5 standard errors of a difference of two means."""
    ours, template = both(name)
    for power_x in range(5):
        for power_y in range(5 - power_x):
            first, second = (points[:, 0] ** power_x * points[:, 1] ** power_y for points in (ours, template))
            error = math.sqrt((first.var() + second.var()) / TEMPLATE_POINTS)
            assert abs(first.mean() - second.mean()) <= 5 * error, (power_x, power_y)


@cases("name", TEMPLATES)
def test_projections_have_the_distribution_of_the_template(name):
    ours, template = both(name)
    for angle in np.arange(6) * math.pi / 6 + 0.01:
        direction = np.array([math.cos(angle), math.sin(angle)])
        assert stats.ks_2samp(ours @ direction, template @ direction).pvalue > P_THRESHOLD, angle
    for centre in ((0, 0), (2, 1), (-1, 3)):
        distances = [np.linalg.norm(points - centre, axis=1) for points in (ours, template)]
        assert stats.ks_2samp(*distances).pvalue > P_THRESHOLD, centre


@cases("name", TEMPLATES)
def test_a_grid_of_cells_has_the_counts_of_the_template(name):
    """Which sees what no projection does."""
    counts = [np.histogram2d(*points.T, bins=24, range=[[-6, 6]] * 2)[0].ravel() for points in both(name)]
    full = sum(counts) >= 20
    table = np.array([[*part[full], part[~full].sum()] for part in counts])
    assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > P_THRESHOLD


@cases("name", TEMPLATES)
def test_bounds_are_those_of_the_template(name):
    ours, template = both(name)
    slack = {"moons": 0.15, "dino": 0.03}.get(name, 0.002)  # normal noise has no bounds; this is 2 of its deviations
    np.testing.assert_allclose(ours.min(axis=0), template.min(axis=0), atol=slack)
    np.testing.assert_allclose(ours.max(axis=0), template.max(axis=0), atol=slack)


def test_the_line_fills_its_rectangle_evenly():
    x, y = both("line")[0].T
    assert stats.kstest(x, stats.uniform(-2, 4).cdf).pvalue > P_THRESHOLD
    assert stats.kstest(y, stats.uniform(-4, 8).cdf).pvalue > P_THRESHOLD
    assert np.abs(x).max() <= 2
    assert np.abs(y).max() <= 4
    assert np.abs(x).max() > 1.999
    assert np.abs(y).max() > 3.998


def circle_centres():
    """The places of the template's points before the jitter, with their probabilities in 25ths."""
    found = {}
    for x in (-0.4, -0.2, 0, 0.2, 0.4):
        for y in (-0.4, -0.2, 0, 0.2, 0.4):
            norm = math.sqrt(x * x + y * y) + 1e-10
            place = (round(3 * x / norm, 6), round(3 * y / norm, 6))
            found[place] = found.get(place, 0) + 1
    return np.array(list(found)), np.array(list(found.values()))


def test_the_circle_has_16_directions_and_an_origin_as_likely_as_in_the_template():
    centres, weights = circle_centres()
    assert len(centres) == 17
    assert sorted(weights) == [1] * 9 + [2] * 8
    for points in both("circle"):
        distances, nearest = cKDTree(centres).query(points)
        assert distances.max() <= 0.0901
        counts = np.bincount(nearest, minlength=17)
        assert stats.chisquare(counts, weights / 25 * len(points)).pvalue > P_THRESHOLD
        origin = np.flatnonzero((centres == 0).all(axis=1))
        assert abs(counts[origin].item() / len(points) - 0.04) < 0.003


def test_the_jitter_of_the_circle_is_uniform_in_radius_and_angle_and_the_same_everywhere():
    centres, _ = circle_centres()
    points = both("circle")[0]
    distances, nearest = cKDTree(centres).query(points)
    offsets = points - centres[nearest]
    angles = np.arctan2(offsets[:, 1], offsets[:, 0])
    assert stats.kstest(distances, stats.uniform(0, 0.09).cdf).pvalue > P_THRESHOLD
    assert stats.kstest(angles, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > P_THRESHOLD
    assert abs(np.corrcoef(distances, np.cos(angles))[0, 1]) < 5 / math.sqrt(len(points))
    for index in range(17):
        here = nearest == index
        assert stats.kstest(distances[here], stats.uniform(0, 0.09).cdf).pvalue > P_THRESHOLD
        assert stats.kstest(angles[here], stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > P_THRESHOLD


def test_the_dinosaur_is_its_142_points_with_a_noise_of_0_15():
    points = (both("dino")[0] / 4 + 1) * (54, 48)
    places, weights = np.unique(DINO, axis=0, return_counts=True)
    _, nearest = cKDTree(places).query(points)
    counts = np.bincount(nearest, minlength=len(places))
    assert stats.chisquare(counts, weights / 142 * len(points)).pvalue > P_THRESHOLD
    # Points that have others near are left out, whose noise leads to another one at times.
    apart = cKDTree(places).query(places, k=2)[0][:, 1] > 8 * 0.15
    assert apart.mean() > 0.9
    residuals = (points - places[nearest])[apart[nearest]]
    np.testing.assert_allclose(residuals.std(axis=0), 0.15, rtol=5 / math.sqrt(2 * len(residuals)))
    np.testing.assert_allclose(residuals.mean(axis=0), 0, atol=5 * 0.15 / math.sqrt(len(residuals)))
    assert abs(np.corrcoef(*residuals.T)[0, 1]) < 5 / math.sqrt(len(residuals))
    for axis in (0, 1):
        assert stats.kstest(residuals[:, axis], stats.norm(0, 0.15).cdf).pvalue > P_THRESHOLD


def test_the_moons_are_two_half_circles_of_equal_weight_with_a_noise_of_0_03():
    points = (both("moons")[0] + 1) / (2, 3) - 0.3
    for centre, sign in (((0, 0), 1), ((1, 0.5), -1)):
        offsets = (points - centre) * (1, sign)
        distances, angles = np.linalg.norm(offsets, axis=1), np.arctan2(offsets[:, 1], offsets[:, 0])
        # Without the ends, where noise leads out of the sector, and with what is near this half circle alone.
        own = (np.abs(distances - 1) < 0.2) & (angles > 0.2) & (angles < math.pi - 0.2)
        assert abs(own.mean() - 0.5 * (math.pi - 0.4) / math.pi) < 0.003
        np.testing.assert_allclose((distances[own] - 1).std(), 0.03, rtol=0.02)
        assert abs((distances[own] - 1).mean() - 0.03**2 / 2) < 5 * 0.03 / math.sqrt(own.sum())
        assert stats.kstest(angles[own], stats.uniform(0.2, math.pi - 0.4).cdf).pvalue > P_THRESHOLD


# --- densities -------------------------------------------------------------------------------------------------------

CELL, STEPS, BOUND = 1 / 8, 16, 6  # squares of a board that are integrated by the midpoint rule with steps of 1/128
MOST_CELLS_OF_A_SHAPE = 24  # their densities are sums over up to 2000 points


def square_codes(points):
    """A number for the square that a point is in."""
    places = np.floor((points + BOUND) / CELL).astype(int)
    return places[:, 0] * 10_000 + places[:, 1]


def square_cells(name):
    """Squares that hold points of a large draw (of a shape: a sample of them), and the integrals of p and p log p there."""
    codes, counts = np.unique(square_codes(toy_points(name, 500_000, seed=100)), return_counts=True)
    if "shape" in TOY_DATASETS[name].traits and len(codes) > MOST_CELLS_OF_A_SHAPE:
        chosen = np.random.default_rng(0).choice(len(codes), MOST_CELLS_OF_A_SHAPE, False, counts / counts.sum())
        codes, counts = codes[chosen], counts[chosen]
    middles = (np.arange(STEPS) + 0.5) * CELL / STEPS
    inside = np.stack(np.meshgrid(middles, middles), axis=-1).reshape(1, -1, 2)
    corners = np.stack([codes // 10_000, codes % 10_000], axis=1)[:, None] * CELL - BOUND
    return codes, counts.sum() / 5e5, *integrals(name, corners + inside, (CELL / STEPS) ** 2), square_codes


POLAR_RINGS, POLAR_SECTORS = 3, 4


def polar_codes(points):
    distances, nearest = cKDTree(circle_centres()[0]).query(points)
    offsets = points - circle_centres()[0][nearest]
    ring = np.minimum((distances / 0.09 * POLAR_RINGS).astype(int), POLAR_RINGS - 1)
    sector = ((np.arctan2(offsets[:, 1], offsets[:, 0]) / math.pi + 1) / 2 * POLAR_SECTORS).astype(int) % POLAR_SECTORS
    return (nearest * POLAR_RINGS + ring) * POLAR_SECTORS + sector


def polar_cells(name):
    """Sectors of the rings around the centres of the circle's discs, where the density has poles."""
    radii = (np.arange(POLAR_RINGS * 60).reshape(POLAR_RINGS, 1, -1, 1) + 0.5) * (0.09 / POLAR_RINGS / 60)
    angles = (np.arange(POLAR_SECTORS * 8).reshape(1, POLAR_SECTORS, 1, -1) + 0.5) * (2 * math.pi / POLAR_SECTORS / 8)
    offsets = np.stack(np.broadcast_arrays(radii * np.cos(angles - math.pi), radii * np.sin(angles - math.pi)), axis=-1)
    points = circle_centres()[0][:, None, None, None, None] + offsets
    sizes = np.broadcast_to(radii, offsets.shape[:-1]) * (0.09 / POLAR_RINGS / 60) * (2 * math.pi / POLAR_SECTORS / 8)
    cells = 17 * POLAR_RINGS * POLAR_SECTORS
    sizes = np.broadcast_to(sizes, points.shape[:-1]).reshape(cells, -1)
    return np.arange(cells), 1.0, *integrals(name, points.reshape(cells, -1, 2), sizes), polar_codes


def integrals(name, points, size):
    logs = toy_log_prob(name)(points.reshape(-1, 2)).reshape(points.shape[:2])
    masses = np.exp(logs) * size
    return masses.sum(axis=1), (masses * np.where(np.isfinite(logs), logs, 0)).sum(axis=1)


# Sets whose density a grid of squares does not suit.
CELLS = {"circle": polar_cells}


@cache
def cells(name):
    """Codes of cells, the fraction of a large draw in all of them, integrals of p and of p log p, points -> codes."""
    return CELLS.get(name, square_cells)(name)


def test_densities_are_there_where_the_table_says_so():
    for name in SETS:
        assert TOY_DATASETS[name].facts["density"] == ("yes" if name in WITH_DENSITY else "no")
    assert {"circle", "line", "dino", "checkerboard", "eight_gaussians", "rings"} <= set(WITH_DENSITY)
    assert toy_log_prob("moons") is None


@pytest.mark.slow
@cases("name", WITH_DENSITY)
def test_a_density_integrates_to_one(name):
    """
    Within 0.2 % if all cells are integrated. For a sample of the cells, the fraction of points that are in them takes the
    place of the one, whose own standard error is 0.3 % or so: within 2 %.
    """
    codes, fraction, masses, _, _ = cells(name)
    assert len(codes) >= 24
    np.testing.assert_allclose(masses.sum() / fraction, 1, rtol=2e-3 if fraction == 1 else 0.02)


@pytest.mark.slow
@cases("name", WITH_DENSITY)
def test_a_density_is_nothing_where_no_points_are(name):
    """Not inside the square of all sets either: what is far from every point of a large draw counts for 0.1 % at most."""
    others = np.random.default_rng(0).uniform(-BOUND, BOUND, (1200, 2))
    near = cKDTree(toy_points(name, 100_000, seed=100)).query(others)[0] < 0.2
    logs = toy_log_prob(name)(others[~near])
    assert np.exp(logs).sum() * (2 * BOUND) ** 2 / len(others) < 1e-3
    far = toy_log_prob(name)(np.array([[100.0, 100.0], [-1e4, 3.0]]))
    assert (far < -500).all()
    assert not np.isnan(far).any()


@pytest.mark.slow
@cases("name", WITH_DENSITY)
def test_points_follow_the_density(name):
    """Counts in cells against its integrals: a chi-square test, with rare cells and what is not in any as one cell."""
    codes, _, masses, _, code_of = cells(name)
    num = 100_000
    found, counts = np.unique(code_of(toy_points(name, num, seed=7)), return_counts=True)
    lookup = dict(zip(found.tolist(), counts.tolist(), strict=True))
    observed = np.array([lookup.get(code, 0) for code in codes.tolist()])
    full = masses * num >= 10
    observed, expected = observed[full], masses[full] * num
    assert len(observed) >= 20
    rest, expected_rest = num - observed.sum(), num - expected.sum()
    if expected_rest > 10:
        observed, expected = np.append(observed, rest), np.append(expected, expected_rest)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, len(observed) - 1) > P_THRESHOLD


@pytest.mark.slow
@cases("name", WITH_DENSITY)
def test_the_mean_log_density_of_a_draw_is_its_negative_entropy(name):
    """By integrals over the cells: within 5 standard errors, and what the integrals may be off. Widths show here."""
    most, slack = (4000, 0.01) if "shape" in TOY_DATASETS[name].traits else (100_000, 0.001)
    codes, _, masses, entropies, code_of = cells(name)
    points = toy_points(name, 100_000, seed=8)
    logs = toy_log_prob(name)(points[np.isin(code_of(points), codes)][:most])
    error = logs.std() / math.sqrt(len(logs))
    assert abs(logs.mean() - entropies.sum() / masses.sum()) < 5 * error + slack


def test_known_entropies_are_met():
    for name, area in {"line": 4 * 8, "checkerboard": 8 * 2 * 2}.items():
        np.testing.assert_allclose(toy_log_prob(name)(toy_points(name, 50_000)), -math.log(area), rtol=1e-12)
    weights = circle_centres()[1] / 25
    known = (weights * np.log(weights)).sum() - math.log(2 * math.pi * 0.09) - math.log(0.09) + 1
    logs = toy_log_prob("circle")(toy_points("circle", 200_000))
    assert abs(logs.mean() - known) < 5 * logs.std() / math.sqrt(len(logs))


@pytest.mark.slow
@cases("name", WITH_DENSITY)
def test_every_point_of_a_draw_has_a_finite_log_density(name):
    """Rounded to float32 as they are; one of them at -inf makes an estimate of the KL divergence infinite."""
    num = 3000 if "shape" in TOY_DATASETS[name].traits else 100_000
    logs = toy_log_prob(name)(toy_points(name, num, seed=5))  # of the circle, with a point on the rim of a disc
    assert np.isfinite(logs).sum() == num


@cases("name", WITH_DENSITY)
def test_a_log_density_is_float64_of_each_point_on_its_own(name):
    points = toy_points(name, 300)
    logs = toy_log_prob(name)(points)
    assert logs.shape == (300,)
    assert logs.dtype == np.float64
    np.testing.assert_allclose(toy_log_prob(name)(points.astype(np.float64)[::-1])[::-1], logs, rtol=1e-9)
    np.testing.assert_allclose(np.concatenate([toy_log_prob(name)(points[row : row + 1]) for row in range(20)]), logs[:20])


@cases("name", WITH_DENSITY)
def test_the_log_density_of_no_points_is_empty(name):
    assert toy_log_prob(name)(np.zeros((0, 2))).shape == (0,)


@pytest.mark.parametrize(
    ("name", "outside", "inside"),
    [
        ("line", [(2.001, 0), (-2.001, 0), (0, 4.001), (0, -4.001), (3, 3)], [(0, 0), (1.999, 3.999), (-1.999, -3.999)]),
        (
            "checkerboard",
            [(1, 3), (3, 1), (-1, 1), (1, -1), (-3, -1), (4.001, 3), (-4.001, -3)],
            [(1, 1), (3, 3), (-1, -1), (-3, -3), (-3, 1), (1, -3), (3, -1), (-1, 3)],
        ),
        ("circle", [(3.091, 0), (2.909, 0), (0.065, 0.065), (1.5, 0), (0, -3.091)], [(3.089, 0), (0.06, 0.06), (0, -2.911)]),
    ],
)
def test_uniform_sets_end_somewhere(name, outside, inside):
    assert (toy_log_prob(name)(np.array(outside, float)) == -np.inf).all()
    assert np.isfinite(toy_log_prob(name)(np.array(inside, float))).all()


# --- errors ----------------------------------------------------------------------------------------------------------


@cases("ask", [toy_points, load_toy_dataset, toy_log_prob])
@cases(("wrong", "meant"), [("moon", "moons"), ("dyno", "dino"), ("Circle", "circle"), ("ring", "rings")])
def test_an_unknown_name_gets_a_hint(ask, wrong, meant):
    with pytest.raises(LabError, match=rf"{wrong!r}.*Did you mean {meant!r}\?.*Known: .*swiss_roll"):
        ask(wrong)


@cases("ask", [toy_points, load_toy_dataset])
@cases("n", [0, -1, 2.5, True, "10", None, MAX_POINTS + 1, 10**30, float("nan")], ids=repr)
def test_numbers_of_points_that_are_none_are_refused(ask, n):
    with pytest.raises(
        LabError,
        match=rf"n={re.escape(repr(n))}: must be .*\[1, {MAX_POINTS}\]|n=.* of \w+\(\): must be a whole number, got",
    ):
        ask("line", n)


@cases("ask", [toy_points, load_toy_dataset])
@cases("seed", [1.5, True, "42", None], ids=repr)
def test_seeds_that_are_no_whole_numbers_are_refused(ask, seed):
    with pytest.raises(LabError, match=r"seed=.* of \w+\(\): must be a whole number, got"):
        ask("line", 5, seed)


@cases("ask", [toy_points, load_toy_dataset])
@cases("split", ["validation", "Train", "", None, 0], ids=repr)
def test_splits_that_there_are_not_are_refused(ask, split):
    with pytest.raises(LabError, match=rf"split={re.escape(repr(split))} of .*: must be 'train' or 'test', got"):
        ask("line", 5, 42, split)


# --- exports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """`load_dataset` as a user calls it, without a trace in the cache of whoever runs the tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def export(*arguments):
    return main(["data", "export", *map(str, arguments)])


def column(dataset):
    return dataset.with_format("numpy")["x"][:]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", ["circle", "dino", "moons"])
def test_an_export_is_loaded_with_the_same_points(tmp_path, name, capsys):
    folder = tmp_path / "points"
    assert export(name, folder, "--n", 300, "--n_test", 70, "--seed", 5) == 0
    assert str(folder) in capsys.readouterr().out
    loaded = datasets.load_dataset(str(folder))
    assert list(loaded) == ["train", "test"]
    for split, num in {"train": 300, "test": 70}.items():
        direct = load_toy_dataset(name, num, 5, split)
        assert loaded[split].features == direct.features
        np.testing.assert_array_equal(column(loaded[split]), column(direct))
        stream = datasets.load_dataset(str(folder), split=split, streaming=True)
        assert [row["x"] for row in stream] == direct["x"][:]


@pytest.mark.usefixtures("own_cache")
def test_a_folder_with_the_name_of_a_set_is_given_as_a_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "export", "dino", "dino", "--n", "40", "--n_test", "40"]) == 0
    assert "or --dataset_name ./dino to train on it." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_real_command_exports_into_the_current_folder(tmp_path):
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "diffusers_lrlab.cli.main",
        "data",
        "export",
        "rings",
        "points",
        "--n",
        "40",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Wrote points: load_dataset('points'), or --dataset_name points to train on it.\n"
    loaded = datasets.load_dataset(str(tmp_path / "points"))
    np.testing.assert_array_equal(column(loaded["train"]), toy_points("rings", 40))
    np.testing.assert_array_equal(column(loaded["test"]), toy_points("rings", 10_000, split="test"))


def test_an_export_says_nothing_on_stderr(tmp_path, capfd):
    """As the other commands; progress bars are for terminals."""
    assert export("line", tmp_path / "points", "--n", 5, "--n_test", 0) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("own_cache")
def test_the_readme_says_what_was_done_and_its_commands_work(tmp_path, capsys):
    from huggingface_hub import DatasetCard

    folder = tmp_path / "points"
    assert export("dino", folder, "--n", 400, "--n_test", 30, "--seed", 9) == 0
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert card.data.size_categories == ["n<1K"]
    assert "dino" in card.data.pretty_name
    (configuration,) = card.data.configs
    assert {entry["split"]: entry["path"] for entry in configuration["data_files"]} == {
        "train": "data/train-*.parquet",
        "test": "data/test-*.parquet",
    }
    assert "| `train` | 400 |" in card.text
    assert "| `test` | 30 |" in card.text
    assert "Cairo" in card.text
    first, second = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    variables = {}
    exec(first.replace("DIR", str(folder)), variables)
    assert variables["points"].dtype == np.float32
    np.testing.assert_array_equal(variables["points"], toy_points("dino", 400, 9))
    exec(second, variables)
    np.testing.assert_array_equal(column(variables["dataset"]), variables["points"])
    (shell,) = re.findall(r"```bash\n(.*?)\n```", card.text, re.DOTALL)
    program, *arguments = shlex.split(shell.replace("DIR", str(tmp_path / "again")))
    assert program == "lrlab"
    assert main(arguments) == 0
    for file in ("README.md", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.pictures
@pytest.mark.slow
@cases("name", SETS)
def test_every_set_is_exported_with_a_card_and_a_picture(tmp_path, name):
    from huggingface_hub import DatasetCard

    folder = tmp_path / "points"
    export_toy_dataset(name, folder, n=50, n_test=0)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["README.md", "data/train-00000-of-00001.parquet", "manifest.json", "points.png"]
    with Image.open(folder / "points.png") as picture:
        picture.load()
        assert min(picture.size) > 200
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 5
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == ("mit" if "shape" in TOY_DATASETS[name].traits else "apache-2.0")
    assert f"# {name}\n" in card.text
    assert TOY_DATASETS[name].description in card.text
    assert TOY_DATASETS[name].source in card.text
    assert (f'toy_log_prob("{name}")' in card.text) == (name in WITH_DENSITY)
    assert "test" not in {entry["split"] for entry in card.data.configs[0]["data_files"]}
    assert "{{" not in card.text


@pytest.mark.usefixtures("own_cache")
def test_no_points_to_test_on_give_no_split(tmp_path):
    assert export("line", tmp_path / "points", "--n", 20, "--n_test", 0) == 0
    assert list(datasets.load_dataset(str(tmp_path / "points"))) == ["train"]
    assert "`test`" not in (tmp_path / "points" / "README.md").read_text()


@pytest.mark.usefixtures("own_cache")
def test_a_single_point_can_be_exported_into_an_empty_folder(tmp_path):
    folder = tmp_path / "points"
    folder.mkdir()
    assert export("moons", folder, "--n", 1, "--n_test", 1) == 0
    assert {split: len(data) for split, data in datasets.load_dataset(str(folder)).items()} == {"train": 1, "test": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["points"]


@pytest.mark.parametrize("parent", ["new/and/deep", "with space", "ünï"])
def test_folders_are_made_whatever_they_are_called(tmp_path, parent):
    assert export("line", tmp_path / parent / "points", "--n", 5, "--n_test", 0) == 0
    assert (tmp_path / parent / "points" / "README.md").is_file()


@cases(
    ("num", "words"),
    [(999, "n<1K"), (1000, "1K<n<10K"), (99_999, "10K<n<100K"), (100_000, "100K<n<1M"), (110_000, "100K<n<1M")],
)
def test_the_card_has_the_hubs_words_for_sizes(num, words):
    from diffusers_lrlab.hub.dataset_folder import _card

    assert f"- {words}\n" in _card("line", {"train": num}, 42)


def everything_under(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@cases(
    ("arguments", "words"),
    [
        (["moon", "{new}"], ["'moon'", "Did you mean 'moons'?"]),
        (["line", "{new}", "--n", 0], ["--n 0: must be a whole number in [1, "]),
        (["line", "{new}", "--n", -5], ["--n -5"]),
        (["line", "{new}", "--n", 2.5], ["--n", "2.5"]),
        (["line", "{new}", "--n", MAX_POINTS + 1], [str(MAX_POINTS + 1), str(MAX_POINTS)]),
        (["line", "{new}", "--n_test", 1e3], ["--n_test", "1000.0"]),
        (["line", "{new}", "--seed", "x"], ["--seed", "'x'"]),
        (["line", "{new}", "--seeds", 1], ["'--seeds'", "Did you mean '--seed'?"]),
        (["line", "{full}"], ["full", "not an empty folder"]),
        (["line", "{file}"], ["file.txt", "not an empty folder"]),
        (["line", "{file}/below"], ["file.txt"]),
        (["line"], ["DIR"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path, capsys, arguments, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").write_text("precious")
    (tmp_path / "file.txt").write_text("precious")
    places = {"new": tmp_path / "new", "full": tmp_path / "full", "file": tmp_path / "file.txt"}
    before = everything_under(tmp_path)
    assert export(*(str(argument).format(**places) for argument in arguments)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert everything_under(tmp_path) == before


def test_a_wrong_number_of_points_to_test_on_is_called_by_its_name(tmp_path, capsys):
    """0 is allowed for it, unlike for --n."""
    assert export("line", tmp_path / "new", "--n_test", -5) == 2
    error = capsys.readouterr().err
    assert "-5" in error
    assert "n_test" in error
    assert not list(tmp_path.iterdir())


@cases("n_test", [True, 2.5, 10.0, "10", -1, MAX_POINTS + 1], ids=repr)
def test_points_to_test_on_are_a_whole_number_from_python_too(tmp_path, n_test):
    with pytest.raises(LabError, match=re.escape(repr(n_test))):
        export_toy_dataset("line", tmp_path / "new", n=5, n_test=n_test)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [".", "./", "../empty"])
def test_the_current_folder_is_a_folder_like_others(tmp_path, monkeypatch, capsys, where):
    """It is empty, so it is written or refused in a sentence."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    if export("line", where, "--n", 5, "--n_test", 0):
        assert capsys.readouterr().err.startswith("error: ")
        assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    else:
        assert (tmp_path / "empty" / "README.md").is_file()


def test_an_export_that_fails_in_the_middle_leaves_nothing(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffusers_lrlab.training.plots.plot_splits", fail)
    assert export("line", tmp_path / "new", "--n", 5) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- lists -----------------------------------------------------------------------------------------------------------


def test_every_set_is_listed(capsys):
    assert main(["list", "datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--dataset_name" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == SETS
    for line, name in zip(lines[1:], SETS, strict=True):
        assert TOY_DATASETS[name].description in line


def test_every_set_is_listed_as_json(capsys):
    assert main(["list", "datasets", "--json"]) == 0
    (entries,) = json.loads(capsys.readouterr().out).values()
    assert [entry["name"] for entry in entries] == SETS
    for entry in entries:
        assert entry["facts"]["density"] == ("yes" if entry["name"] in WITH_DENSITY else "no")
        assert entry["source"]


def test_every_set_is_listed_as_markdown(capsys):
    assert main(["list", "datasets", "--markdown"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "density in closed form" in header
    assert [re.match(r"\| `(\w+)` \|", row).group(1) for row in rows] == SETS
    assert len({row.count("|") for row in (header, *rows)}) == 1
