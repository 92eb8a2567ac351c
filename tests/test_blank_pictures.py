"""Plots are drawn for tests that ask for it, and for no others."""

import pytest
from blank_pictures import PIXEL

from diffusers_lrlab.core.plotting import new_figure, save_figure


def saved(folder):
    pytest.importorskip("matplotlib")
    figure = new_figure(2, 1, dpi=100)
    save_figure(figure, folder / "a.png")
    figure.canvas.draw()
    opacity = bytes(figure.canvas.buffer_rgba())[3::4]
    return (folder / "a.png").read_bytes(), opacity


@pytest.mark.pictures
def test_a_plot_is_drawn(tmp_path):
    file, opacity = saved(tmp_path)
    assert file.startswith(b"\x89PNG")
    assert file != PIXEL
    assert len(opacity) == 200 * 100
    assert {*opacity} == {255}  # the white ground of a figure


def test_a_plot_is_left_blank(tmp_path):
    file, opacity = saved(tmp_path)
    assert file == PIXEL
    assert {*opacity} == {0}
