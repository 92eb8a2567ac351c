"""The toy sets: the laws they are drawn from, their densities, and the folders that `lrlab data export` writes."""

import math
import re
import shlex
from functools import cache
from importlib.resources import files

import datasets
import numpy as np
import pytest
from huggingface_hub import DatasetCard
from PIL import Image
from scipy import stats
from scipy.spatial import cKDTree
from sklearn.datasets import make_moons
from tables import cases

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.toy2d import (
    MAX_POINTS,
    TOY_DATASETS,
    list_toy_datasets,
    load_toy_dataset,
    toy_log_prob,
    toy_points,
)
from diffusers_lrlab.hub.dataset_folder import export_dataset

SETS = list(TOY_DATASETS)
WITH_DENSITY = [name for name in SETS if toy_log_prob(name) is not None]
# Draws have fixed seeds, so a p-value is a number that does not change: this one is met or it is not.
P_THRESHOLD = 1e-3
DINO = np.loadtxt(str(files("data_morph") / "data" / "starter_shapes" / "dino.csv"), delimiter=",", skiprows=1)


@cases("name", SETS)
def test_points_are_finite_float32_near_the_origin_and_shuffled(name):
    before = np.random.get_state()[1].tolist()
    points = toy_points(name, 20_000)
    np.testing.assert_array_equal(toy_points(name, 20_000, 42, "train"), points)
    assert np.random.get_state()[1].tolist() == before
    assert (points.shape, points.dtype) == ((20_000, 2), np.float32)
    assert np.abs(points).max() <= 6
    assert np.abs(points.mean(axis=0)).max() < 1.5
    assert (points.std(axis=0) > 0.5).all()
    for axis in (0, 1):  # the first points are a draw from the whole, not from a part
        assert stats.ks_2samp(points[:1000, axis], points[1000:4000, axis]).pvalue > P_THRESHOLD


KEPT = {  # two points of seed 3
    "circle": [[3.02174473, 0.0402021408], [-0.0137360841, 0.0263718404]],
    "dino": [[0.0914406702, -0.593837023], [-1.65828705, 1.21453047]],
    "line": [[0.645442963, -3.8937993], [0.737276912, 3.64212132]],
    "moons": [[1.59645176, -0.177676335], [-0.366431624, 1.37433493]],
}


@cases("name", KEPT)
def test_points_are_the_same_on_every_machine_and_in_every_process(name):
    """A change would break the resuming of runs."""
    np.testing.assert_allclose(toy_points(name, 2, seed=3), KEPT[name], rtol=1e-6)
    assert load_toy_dataset(name, 20)._fingerprint == load_toy_dataset(name, 20)._fingerprint


@cases("name", SETS)
def test_no_point_is_in_two_draws(name):
    draws = [toy_points(name, 2000, seed, split) for seed in (42, 43, -1, 2**70) for split in ("train", "test")]
    together = [np.unique(draw, axis=0) for draw in draws]
    assert min(map(len, together)) > 1990
    assert sum(map(len, together)) - len(np.unique(np.concatenate(together), axis=0)) <= 2  # float32 has not more numbers


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


@cases("name", TEMPLATES)
def test_points_have_the_distribution_of_the_template(name):
    """In projections, and in the cells of a grid, which see what no projection does."""
    template = TEMPLATES[name](100_000, np.random.default_rng(12345))
    ours = toy_points(name, 100_000, seed=6).astype(np.float64)
    for angle in np.arange(6) * math.pi / 6 + 0.01:
        direction = np.array([math.cos(angle), math.sin(angle)])
        assert stats.ks_2samp(ours @ direction, template @ direction).pvalue > P_THRESHOLD, angle
    counts = [np.histogram2d(*points.T, bins=24, range=[[-6, 6]] * 2)[0].ravel() for points in (ours, template)]
    full = sum(counts) >= 20
    table = np.array([[*part[full], part[~full].sum()] for part in counts])
    assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > P_THRESHOLD


# --- densities -------------------------------------------------------------------------------------------------------

CELL, STEPS, BOUND = 1 / 8, 16, 6  # squares of a board that are integrated by the midpoint rule with steps of 1/128
MOST_CELLS_OF_A_SHAPE = 24  # their densities are sums over up to 2000 points
SMOOTH = [name for name in WITH_DENSITY if name != "circle"]  # that has poles


def square_codes(points):
    """A number for the square that a point is in."""
    places = np.floor((points + BOUND) / CELL).astype(int)
    return places[:, 0] * 10_000 + places[:, 1]


@cache
def cells(name):
    """Codes of squares with points of a large draw (of a shape, some), its fraction there, integrals of p and p log p."""
    codes, counts = np.unique(square_codes(toy_points(name, 500_000, seed=100)), return_counts=True)
    if "shape" in TOY_DATASETS[name].traits and len(codes) > MOST_CELLS_OF_A_SHAPE:
        chosen = np.random.default_rng(0).choice(len(codes), MOST_CELLS_OF_A_SHAPE, False, counts / counts.sum())
        codes, counts = codes[chosen], counts[chosen]
    middles = (np.arange(STEPS) + 0.5) * CELL / STEPS
    inside = np.stack(np.meshgrid(middles, middles), axis=-1).reshape(1, -1, 2)
    corners = np.stack([codes // 10_000, codes % 10_000], axis=1)[:, None] * CELL - BOUND
    logs = toy_log_prob(name)((corners + inside).reshape(-1, 2)).reshape(len(codes), -1)
    masses = np.exp(logs) * (CELL / STEPS) ** 2
    return codes, counts.sum() / 5e5, masses.sum(axis=1), (masses * np.where(np.isfinite(logs), logs, 0)).sum(axis=1)


@pytest.mark.slow
@cases("name", SMOOTH)
def test_points_follow_the_density(name):
    """Its integral is 1 within 0.2 %, or 2 % for a sample of cells; counts pass a chi-square test, rare cells as one."""
    codes, fraction, masses, _ = cells(name)
    assert len(codes) >= 24
    np.testing.assert_allclose(masses.sum() / fraction, 1, rtol=2e-3 if fraction == 1 else 0.02)
    num = 100_000
    found, counts = np.unique(square_codes(toy_points(name, num, seed=7)), return_counts=True)
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
    far = toy_log_prob(name)(np.array([[100.0, 100.0], [-1e4, 3.0]]))
    assert (far < -500).all()  # not nan


@pytest.mark.slow
@cases("name", SMOOTH)
def test_the_mean_log_density_of_a_draw_is_its_negative_entropy(name):
    """Within 5 standard errors and the error of the integrals; each point, rounded to float32, has a finite one."""
    most, slack = (4000, 0.01) if "shape" in TOY_DATASETS[name].traits else (100_000, 0.001)
    codes, _, masses, entropies = cells(name)
    points = toy_points(name, 100_000, seed=8)
    logs = toy_log_prob(name)(points[np.isin(square_codes(points), codes)][:most])
    error = logs.std() / math.sqrt(len(logs))
    assert abs(logs.mean() - entropies.sum() / masses.sum()) < 5 * error + slack
    assert np.isfinite(toy_log_prob(name)(toy_points(name, most, seed=5))).all()


def test_the_discs_of_the_circle_are_uniform_in_radius_and_angle():
    """Their density is the weight of a disc over 2 pi r times its radius; one of the points is on the rim of its disc."""
    grid = np.array([(x, y) for x in (-0.4, -0.2, 0, 0.2, 0.4) for y in (-0.4, -0.2, 0, 0.2, 0.4)])  # of the template
    centres = np.round(3 * grid / (np.linalg.norm(grid, axis=1, keepdims=True) + 1e-10), 6)
    centres, weights = np.unique(centres + 0.0, axis=0, return_counts=True)
    points = toy_points("circle", 100_000, seed=5).astype(np.float64)
    distances, nearest = cKDTree(centres).query(points)
    assert stats.chisquare(np.bincount(nearest), weights / 25 * len(points)).pvalue > P_THRESHOLD
    assert stats.kstest(distances, stats.uniform(0, 0.09).cdf).pvalue > P_THRESHOLD
    angles = np.arctan2(*(points - centres[nearest]).T)
    assert stats.kstest(angles, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > P_THRESHOLD
    expected = np.log(weights[nearest] / 25 / (2 * math.pi * 0.09 * distances))
    near = distances > 1e-3  # elsewhere the rounding of the centres above counts
    np.testing.assert_allclose(toy_log_prob("circle")(points)[near], expected[near], atol=2e-3)
    assert np.isfinite(toy_log_prob("circle")(points)).all()


@cases("name", WITH_DENSITY)
def test_a_log_density_is_float64_of_each_point_on_its_own(name):
    points = toy_points(name, 300)
    logs = toy_log_prob(name)(points)
    assert logs.shape == (300,)
    assert logs.dtype == np.float64
    assert toy_log_prob(name)(points[:0]).shape == (0,)
    np.testing.assert_allclose(toy_log_prob(name)(points.astype(np.float64)[::-1])[::-1], logs, rtol=1e-9)


@cases(
    ("name", "outside", "inside"),
    [
        ("line", [(2.001, 0), (-2.001, 0), (0, 4.001), (0, -4.001)], [(0, 0), (1.999, 3.999), (-1.999, -3.999)]),
        ("checkerboard", [(1, 3), (3, 1), (1, -1), (-3, -1), (4.001, 3)], [(1, 1), (-3, -3), (-3, 1), (1, -3), (3, -1)]),
        ("circle", [(3.091, 0), (2.909, 0), (0.065, 0.065), (1.5, 0)], [(3.089, 0), (0.06, 0.06), (0, -2.911)]),
    ],
)
def test_uniform_sets_end_somewhere(name, outside, inside):
    assert (toy_log_prob(name)(np.array(outside, float)) == -np.inf).all()
    assert np.isfinite(toy_log_prob(name)(np.array(inside, float))).all()


@cases("ask", [toy_points, load_toy_dataset])
@cases(
    ("wrong", "told"),
    [
        ({"n": 0}, rf"n=0: must be .*\[1, {MAX_POINTS}\]"),
        ({"split": "validation"}, r"split='validation' of .*: must be 'train' or 'test', got"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ask, wrong, told):
    with pytest.raises(LabError, match=told):
        ask(**{"name": "line", "n": 5, **wrong})
    assert len(ask(list_toy_datasets()[-1], n=5)) == 5


def export(*arguments):
    return main(["data", "export", *map(str, arguments)])


def column(dataset):
    return dataset.with_format("numpy")["x"][:]


@pytest.mark.pictures
@cases(("name", "licence", "has_density"), [("pi", "mit", True), ("moons", "apache-2.0", False)])
def test_a_folder_has_a_card_and_a_picture(tmp_path, name, licence, has_density):
    export_dataset(name, tmp_path / "points", n=50, n_test=0)
    names = {path.relative_to(tmp_path / "points").as_posix() for path in tmp_path.rglob("*.*")}
    assert names == {"README.md", "data/train-00000-of-00001.parquet", "manifest.json", "points.png"}
    with Image.open(tmp_path / "points" / "points.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 5
    card, entry = (tmp_path / "points" / "README.md").read_text(), TOY_DATASETS[name]
    assert all(words in card for words in (f"license: {licence}\n", f"# {name}\n", entry.description, entry.source))
    assert ((f'toy_log_prob("{name}")' in card), "split: test" in card) == (has_density, False)


def test_the_readme_says_what_was_done_and_its_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "points"
    assert export("dino", folder, "--n", 400, "--n_test", 30, "--seed", 9) == 0
    assert str(folder) in capsys.readouterr().out
    card = DatasetCard.load(folder / "README.md")
    assert card.data.size_categories == ["n<1K"]
    assert all(words in card.text for words in ("| `train` | 400 |", "| `test` | 30 |", "Cairo"))
    first, second = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    variables = {}
    exec(first.replace("DIR", str(folder)), variables)
    assert variables["points"].dtype == np.float32
    np.testing.assert_array_equal(variables["points"], toy_points("dino", 400, 9))
    exec(second, variables)
    np.testing.assert_array_equal(column(variables["dataset"]), variables["points"])
    test, point = datasets.load_dataset(str(folder), split="test"), datasets.List(datasets.Value("float32"), length=2)
    np.testing.assert_array_equal(column(test), toy_points("dino", 30, 9, "test"))
    assert test.features == load_toy_dataset("dino", 30).features == datasets.Features({"x": point})
    (shell,) = re.findall(r"```bash\n(.*?)\n```", card.text, re.DOTALL)
    program, *arguments = shlex.split(shell.replace("DIR", str(tmp_path / "again")))
    assert program == "lrlab"
    assert main(arguments) == 0
    for file in ("README.md", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


@cases(
    ("arguments", "words"),
    [
        (["line", "{new}", "--n", 0], "--n 0: must be a whole number in"),
        (["line", "{new}", "--n_test", -5], "--n_test -5"),
        (["line", "{full}"], "full.* not an empty folder"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path, capsys, arguments, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    assert export(*(str(argument).format(new=tmp_path / "new", full=tmp_path / "full") for argument in arguments)) == 2
    assert re.match(f"error: .*{words}", capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before
