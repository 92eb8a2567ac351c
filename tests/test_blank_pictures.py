"""Plots are drawn for tests that ask for it, and for no others."""

import pytest
from blank_pictures import PIXEL

from diffusers_lrlab.core.plotting import new_figure, save_figure


def saved(folder):
    pytest.importorskip("matplotlib")
    figure = new_figure(2, 1, dpi=100)
    save_figure(figure, folder / "a.png")
    figure.canvas.draw()
    return (folder / "a.png").read_bytes(), bytes(figure.canvas.buffer_rgba())


@pytest.mark.pictures
def test_a_plot_is_drawn(tmp_path):
    file, pixels = saved(tmp_path)
    assert file.startswith(b"\x89PNG")
    assert file != PIXEL
    assert len(pixels) == 200 * 100 * 4
    assert {*pixels} == {255}  # the white ground of a figure without axes


def test_a_plot_is_left_blank(tmp_path):
    file, pixels = saved(tmp_path)
    assert file == PIXEL
    assert {*pixels} == {0}
