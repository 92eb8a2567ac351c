"""What an option asks for beside what runs: diffusers' own script and one row of each of five trainers, audited.

    python benchmarks/asked_and_ran.py ~/diffusers ~/checkouts --out docs

The first folder is a checkout of diffusers, whose `train_unconditional.py` trains as it is, on a tiny model and random
images. The second holds checkouts of the trainers, with the names of their repositories; their rows are those of
other_trainers.py.
It prints a table, and draws DIR/asked_and_ran*.png, wide and narrow, for light and dark pages.
"""

import os
import sys
import tempfile
from pathlib import Path

import common
from other_trainers import GREY, ORANGE, ROWS, Row, audit_row, audited, made_up, new_figure, plain_axes, save_figure

ROOT = Path(__file__).parents[1]
FOLDERS = {  # of the checkouts; a row of each, by how its users write it
    "simpletuner": ("SimpleTuner", "cosine, warm-up 500 of 1,800"),
    "ai-toolkit": ("ai-toolkit", "linear"),
    "onetrainer": ("OneTrainer", "COSINE_WITH_RESTARTS, 1 cycle"),
    "diffusion-pipe": ("diffusion-pipe", "cosine, warm-up 50"),
    "musubi-tuner": ("musubi-tuner", "rex, warm-up 100 of 1,000"),
}
LIGHT, DARK = ("#24292f", "#59636e"), ("#e6edf3", "#9198a1")  # text and axes on white, and on a dark page
LAYOUTS = {"": (8.4, 3, 9.5), "_narrow": (3.6, 2, 8.2)}  # inches, columns, points


def of_diffusers(checkout, folder):
    """`train_unconditional.py` for 100 updates, with a warm-up of 5."""
    sys.path.insert(0, str(ROOT))
    from tests.diffusers_scripts import cases, run_script

    row = Row("cosine, accumulation 4", {}, "cosine", 5, 100, accumulation=4, lr=1e-3)
    case = cases.CASES["unconditional"]
    script = cases.command(case, checkout / "examples", folder, folder / "out", row.updates, row.accumulation, 1, row.warmup)
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    return audited("diffusers", row, [sys.executable, run_script.__file__, *script])


def of_trainer(host, folder):
    name, asked = FOLDERS[host]
    (row,) = (row for row in ROWS[host] if row.asked == asked)
    return audit_row(host, folder / name, row)


def table(results):
    lines = ["| trainer | asked | ran: share of the peak | the audit's findings |", "|---|---|---|---|"]
    lines += [f"| {name} | {each.row.asked} | {each.ran} | {each.shown_findings} |" for name, each in results.items()]
    return "\n".join(lines)


def draw(results, folder):
    """Small multiples, asked in grey and ran in colour, by the width and the background of the page."""
    for layout, (width, columns, size) in LAYOUTS.items():
        for background, colors in {"": LIGHT, "_dark": DARK}.items():
            path = folder / f"asked_and_ran{layout}{background}.png"
            _draw(results, path, width, columns, size, colors)


def _draw(results, path, width, columns, size, colors):
    from matplotlib.lines import Line2D

    text, lines = colors
    rows = -(-len(results) // columns)
    figure = new_figure(width, 0.6 + 1.75 * rows, dpi=200)
    figure.set_facecolor("none")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (name, each) in zip(panels, results.items(), strict=False):
        plain_axes(axes)
        axes.set_facecolor("none")
        axes.plot(each.expected, color=GREY, linewidth=4.5, alpha=0.75)
        axes.plot(each.lr, color=ORANGE, linewidth=2)
        asked = each.row.asked.replace(", ", ",\n", 1) if columns == 2 else each.row.asked
        axes.set_title(f"{name}\n{asked}", fontsize=size, loc="left", color=text)
        axes.tick_params(labelsize=size, colors=lines)
        axes.spines[["left", "bottom"]].set_color(lines)
        axes.set_ylim(-0.05, 1.12)
        axes.set_yticks([0, 0.5, 1])
        axes.locator_params(axis="x", nbins=3)
    for axes in [*panels][len(results) :]:
        axes.set_visible(False)
    styles = {"asked": (GREY, 4.5), "ran": (ORANGE, 2)}
    handles = [Line2D([], [], color=color, linewidth=thick, label=label) for label, (color, thick) in styles.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=size, labelcolor=text)
    figure.supxlabel("update; rates as shares of the peak", fontsize=size, color=lines)
    save_figure(figure, path)


def main():
    parser = common.make_parser(__doc__)
    parser.add_argument("diffusers", nargs="?", type=Path, metavar="DIFFUSERS")
    parser.add_argument("trainers", nargs="?", type=Path, metavar="TRAINERS")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="for the pictures (default: .)")
    options = common.parse(parser)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.tiny:
            results = {f"trainer {n}": audit_row("diffusion-pipe", folder, row) for n, row in enumerate(made_up(folder))}
        elif options.trainers is None:
            parser.error("give a checkout of diffusers, and the folder of the trainers' checkouts")
        else:
            results = {"diffusers": of_diffusers(options.diffusers.resolve(), folder)}
            results |= {FOLDERS[host][0]: of_trainer(host, options.trainers.resolve()) for host in FOLDERS}
    options.out.mkdir(parents=True, exist_ok=True)
    draw(results, options.out)
    print(f"{common.machine()}\n\n{table(results)}")


if __name__ == "__main__":
    main()
