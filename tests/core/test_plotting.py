"""The size of plots: text that can be read in a column of text."""

import re

import printed
import pytest
from tables import cases

from diffusers_lrlab.core.plotting import new_figure, plain_log_scale, save_figure

DRAWS = sorted(
    path.relative_to(printed.ROOT).as_posix()
    for path in (printed.ROOT / "diffusers_lrlab").rglob("*.py")
    if "new_figure(" in path.read_text(encoding="utf-8")
)


@cases("name", DRAWS)
def test_no_plot_is_wide_or_has_small_text(name):
    text = (printed.ROOT / name).read_text(encoding="utf-8")
    sizes = re.findall(r"(?:fontsize|labelsize)\W{1,4}(?:[\d.]+ if .*? else )?([\d.]+)", text)
    assert [size for size in sizes if float(size) < 8] == []
    assert [width for width in re.findall(r"new_figure\(([\d.]+),", text) if float(width) > 7.2] == []


@pytest.mark.pictures
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_figure_has_the_format_that_its_name_says(tmp_path, ending):
    save_figure(new_figure(2, 2, 80), tmp_path / f"figure.{ending}")
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (tmp_path / f"figure.{ending}").read_bytes().startswith(begin)


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.4, 0.9, ["0.4", "0.5", "0.6", "0.7", "0.8", "0.9"]),
        (0.73, 0.79, ["0.73", "0.74", "0.75", "0.76", "0.77", "0.78", "0.79"]),
        (0.01, 100, ["0.01", "0.1", "1", "10", "100"]),
        (9, 30_000, ["10", "100", "1,000", "10,000"]),
    ],
    ids=["within a decade", "between two digits", "four decades", "thousands"],
)
def test_losses_have_plain_labels_wherever_they_are(low, high, labels):
    axes = new_figure(3, 2, dpi=50).add_subplot()
    plain_log_scale(axes)
    axes.set_ylim(low, high)
    axes.figure.draw_without_rendering()
    found = {label.get_text() for label in axes.get_yticklabels(which="both") if low <= label.get_position()[1] <= high}
    assert sorted(found - {""}, key=lambda text: float(text.replace(",", ""))) == labels
