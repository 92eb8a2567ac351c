"""Figures that are saved without being drawn, for runs whose pictures nobody looks at: drawing takes longer than they do."""

import base64
from pathlib import Path

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==")
_drawn = []  # what draws in matplotlib, once it is replaced


def leave_pictures_blank():
    """From now on, in this process."""
    figure, canvas = _classes()
    if not _drawn:
        _drawn.extend((figure.savefig, canvas.print_png, canvas.draw))
    figure.savefig = canvas.print_png = _save_pixel
    canvas.draw = lambda canvas, *_, **__: canvas.get_renderer()  # of pictures that are read as arrays


def draw_pictures():
    """Undoes `leave_pictures_blank`."""
    if _drawn:
        figure, canvas = _classes()
        figure.savefig, canvas.print_png, canvas.draw = _drawn


def _classes():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return Figure, FigureCanvasAgg


def _save_pixel(figure, file, **_):
    file.write(PIXEL) if hasattr(file, "write") else Path(file).write_bytes(PIXEL)
