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
from diffusers_lrlab.data.toy2d import (
    MAX_POINTS,
    TOY_DATASETS,
    list_toy_datasets,
    load_toy_dataset,
    toy_log_prob,
    toy_points,
)
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
    assert diffusers_lrlab.list_toy_datasets() == list_toy_datasets() == SETS


@cases("name", SETS)
def test_points_are_finite_float32_near_the_origin_and_shuffled(name):
    points = toy_points(name, 20_000)
    assert (points.shape, points.dtype) == ((20_000, 2), np.float32)
    assert np.abs(points).max() <= 6
    assert np.abs(points.mean(axis=0)).max() < 1.5
    assert (points.std(axis=0) > 0.5).all()
    for axis in (0, 1):  # the first points are a draw from the whole, not from a part
        assert stats.ks_2samp(points[:1000, axis], points[1000:4000, axis]).pvalue > P_THRESHOLD


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
    draws = [toy_points(name, 2000, seed, split) for seed in (42, 43, -1, 2**70) for split in ("train", "test")]
    together = [np.unique(draw, axis=0) for draw in draws]
    assert min(map(len, together)) > 1990
    assert sum(map(len, together)) - len(np.unique(np.concatenate(together), axis=0)) <= 2  # float32 has not more numbers


def test_every_set_draws_other_numbers():
    """Uniform numbers of one stream would tie the sets together."""
    line, board = toy_points("line", 4000), toy_points("checkerboard", 4000)
    for first in line.T:
        for second in board.T % 2:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


def test_a_data_set_has_one_column_of_two_float32():
    dataset = load_toy_dataset("dino", 50, seed=1, split="test")
    assert dataset.features == datasets.Features({"x": datasets.List(datasets.Value("float32"), length=2)})
    assert column(dataset).dtype == np.float32
    np.testing.assert_array_equal(column(dataset), toy_points("dino", 50, 1, "test"))


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
def test_points_have_the_distribution_of_the_template(name):
    """In projections, and in the cells of a grid, which see what no projection does."""
    ours, template = both(name)
    for angle in np.arange(6) * math.pi / 6 + 0.01:
        direction = np.array([math.cos(angle), math.sin(angle)])
        assert stats.ks_2samp(ours @ direction, template @ direction).pvalue > P_THRESHOLD, angle
    counts = [np.histogram2d(*points.T, bins=24, range=[[-6, 6]] * 2)[0].ravel() for points in (ours, template)]
    full = sum(counts) >= 20
    table = np.array([[*part[full], part[~full].sum()] for part in counts])
    assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > P_THRESHOLD


def circle_centres():
    """The places of the template's points before the jitter, with their probabilities in 25ths."""
    found = {}
    for x in (-0.4, -0.2, 0, 0.2, 0.4):
        for y in (-0.4, -0.2, 0, 0.2, 0.4):
            norm = math.sqrt(x * x + y * y) + 1e-10
            place = (round(3 * x / norm, 6), round(3 * y / norm, 6))
            found[place] = found.get(place, 0) + 1
    return np.array(list(found)), np.array(list(found.values()))


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
def test_points_follow_the_density(name):
    """
    Its integral is 1: within 0.2 % if all cells are integrated. For a sample of the cells, the fraction of points that are
    in them takes the place of the one, whose own standard error is 0.3 % or so: within 2 %. Counts in cells pass a
    chi-square test against its integrals, with rare cells and what is not in any as one cell.
    """
    codes, fraction, masses, _, code_of = cells(name)
    assert len(codes) >= 24
    np.testing.assert_allclose(masses.sum() / fraction, 1, rtol=2e-3 if fraction == 1 else 0.02)
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
    far = toy_log_prob(name)(np.array([[100.0, 100.0], [-1e4, 3.0]]))
    assert (far < -500).all()  # not nan


@pytest.mark.slow
@cases("name", WITH_DENSITY)
def test_the_mean_log_density_of_a_draw_is_its_negative_entropy(name):
    """
    By integrals over the cells: within 5 standard errors, and what the integrals may be off. Widths show here. Each point
    has a finite one, rounded to float32 as it is: one at -inf makes an estimate of the KL divergence infinite.
    """
    most, slack = (4000, 0.01) if "shape" in TOY_DATASETS[name].traits else (100_000, 0.001)
    codes, _, masses, entropies, code_of = cells(name)
    points = toy_points(name, 100_000, seed=8)
    logs = toy_log_prob(name)(points[np.isin(code_of(points), codes)][:most])
    error = logs.std() / math.sqrt(len(logs))
    assert abs(logs.mean() - entropies.sum() / masses.sum()) < 5 * error + slack
    assert np.isfinite(toy_log_prob(name)(toy_points(name, most, seed=5))).all()  # one is on the rim of a disc


@cases("name", WITH_DENSITY)
def test_a_log_density_is_float64_of_each_point_on_its_own(name):
    points = toy_points(name, 300)
    logs = toy_log_prob(name)(points)
    assert logs.shape == (300,)
    assert logs.dtype == np.float64
    assert toy_log_prob(name)(points[:0]).shape == (0,)
    np.testing.assert_allclose(toy_log_prob(name)(points.astype(np.float64)[::-1])[::-1], logs, rtol=1e-9)
    np.testing.assert_allclose(np.concatenate([toy_log_prob(name)(points[row : row + 1]) for row in range(20)]), logs[:20])


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


@cases("ask", [toy_points, load_toy_dataset])
@cases(
    ("wrong", "told"),
    [
        ({"name": "moon"}, r"'moon'.*Did you mean 'moons'\?.*Known: .*swiss_roll"),
        ({"n": 0}, rf"n=0: must be .*\[1, {MAX_POINTS}\]"),
        ({"n": 2.5}, r"n=2\.5 of \w+\(\): must be a whole number, got"),
        ({"split": "validation"}, r"split='validation' of .*: must be 'train' or 'test', got"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ask, wrong, told):
    with pytest.raises(LabError, match=told):
        ask(**{"name": "line", "n": 5, **wrong})


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
def test_the_readme_says_what_was_done_and_its_commands_work(tmp_path):
    from huggingface_hub import DatasetCard

    folder = tmp_path / "points"
    assert export("dino", folder, "--n", 400, "--n_test", 30, "--seed", 9) == 0
    card = DatasetCard.load(folder / "README.md")
    assert (card.data.license, card.data.size_categories) == ("mit", ["n<1K"])
    assert all(words in card.text for words in ("| `train` | 400 |", "| `test` | 30 |", "Cairo"))
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
    folder = tmp_path / "points"
    export_toy_dataset(name, folder, n=50, n_test=0)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["README.md", "data/train-00000-of-00001.parquet", "manifest.json", "points.png"]
    with Image.open(folder / "points.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 5
    card, entry = (folder / "README.md").read_text(), TOY_DATASETS[name]
    licence = "mit" if "shape" in entry.traits else "apache-2.0"
    assert all(words in card for words in (f"license: {licence}\n", f"# {name}\n", entry.description, entry.source))
    assert (f'toy_log_prob("{name}")' in card) == (name in WITH_DENSITY)
    assert "split: test" not in card
    assert "{{" not in card


@cases(
    ("arguments", "words"),
    [
        (["moon", "{new}"], "'moon'.* Did you mean 'moons'?"),
        (["line", "{new}", "--n", 0], "--n 0: must be a whole number in"),
        (["line", "{new}", "--n_test", -5], "--n_test -5"),
        (["line", "{full}"], "full.* not an empty folder"),
        (["line", "{file}"], "file.txt.* not an empty folder"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path, capsys, arguments, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").write_text("precious")
    (tmp_path / "file.txt").write_text("precious")
    places = {"new": tmp_path / "new", "full": tmp_path / "full", "file": tmp_path / "file.txt"}
    before = sorted(tmp_path.rglob("*"))
    assert export(*(str(argument).format(**places) for argument in arguments)) == 2
    assert re.match(f"error: .*{words}", capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "full" / ".hidden").read_text() == places["file"].read_text() == "precious"


# --- lists -----------------------------------------------------------------------------------------------------------


def test_every_set_is_listed(capsys):
    assert main(["list", "datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--dataset_name" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == SETS
    assert all(TOY_DATASETS[name].description in line for line, name in zip(lines[1:], SETS, strict=True))
    assert main(["list", "datasets", "--json"]) == 0
    (entries,) = json.loads(capsys.readouterr().out).values()
    found = {entry["name"]: entry["facts"]["density"] for entry in entries}
    assert found == {name: "yes" if name in WITH_DENSITY else "no" for name in SETS}
