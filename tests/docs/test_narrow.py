"""What makes pages of the site fit narrow screens."""

import importlib
import io

import printed
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo


@pytest.fixture(scope="module")
def narrow():
    with printed.docs_modules():
        return importlib.import_module("narrow")


def png(width, dpi=None, text=None, mode="P"):
    about, file = PngInfo(), io.BytesIO()
    if text:
        about.add_text("Smallest text", text)
    Image.new(mode, (width, 10)).save(file, "png", pnginfo=about, **({"dpi": (dpi, dpi)} if dpi else {}))
    return file.getvalue()


@pytest.mark.parametrize(
    ("source", "picture", "least", "width"),
    [
        ("a.png", png(700, 100, "8"), 693, 700),  # 7 inches: 8 points have 11 pixels at 99 pixels an inch
        ("a.png", png(1400, 200, "8"), 693, 866),
        ("a.png", png(360, 100), 285, 356),  # matplotlib's own size of text
        ("model_cards/a/loss.png", png(884), 769, 884),  # a study's plot from before plots named their text
        ("screen.png", png(900), 900, 900),
    ],
)
def test_a_plot_is_not_shown_so_small_that_its_text_cannot_be_read(narrow, source, picture, least, width):
    html = narrow.with_sizes(f'<p><img alt="a plot" src="{source}" /></p>', lambda name: picture)
    assert f'style="min-width: {least}px; width: {width}px"' in html
    assert f'alt="a plot" src="{source}"' in html


@pytest.mark.parametrize(
    ("name", "mode", "is_marked"), [("samples", "RGB", True), ("samples", "P", False), ("loss", "RGB", False)]
)
def test_sampled_images_are_marked_and_plots_of_points_are_not(narrow, name, mode, is_marked):
    html = narrow.with_sizes(f'<img alt="a" src="{name}.png" />', lambda source: png(100, 100, mode=mode))
    assert ('class="as-sampled"' in html) is is_marked


def test_samples_of_a_run_have_no_text(narrow):
    assert "style" not in narrow.with_sizes('<img alt="a" src="x/lrlab/samples.png" />', lambda source: png(10, mode="L"))


def test_code_of_tables_breaks_after_separators_and_other_code_does_not(narrow):
    html = narrow.with_breaks('<table><td><a href="a_b"><code>--min_lr_ratio=0.1</code></a></td></table><code>a_b</code>')
    assert '<a href="a_b"><code>--min_<wbr>lr_<wbr>ratio=<wbr>0.<wbr>1</code>' in html
    assert "<code>a_b</code>" in html


@pytest.mark.parametrize(
    ("cell", "broken"),
    [
        ("<td><code>--a_b</code></td>", "<td><code>--a_b</code></td>"),
        ('<td><code><span class="flag">--a_b</span></code></td>', '<td><code><span class="flag">--a_b</span></code></td>'),
        ("<th><code>--a_b</code></th>", "<th><code>--a_<wbr>b</code></th>"),
        ("<td><code>a/b.py</code></td>", '<td><code>a/<wbr class="folder">b.<wbr>py</code></td>'),
    ],
    ids=["a flag", "a marked flag", "a flag of the head", "a path"],
)
def test_flags_below_the_head_stay_whole_and_paths_break_at_folders(narrow, cell, broken):
    assert narrow.with_breaks(cell) == broken


def test_numbers_stay_with_their_units_except_in_code(narrow):
    html = narrow.with_breaks("<p>1.06 ± 0.03, −0.2 % (−0.5 to +0.1 %) <code>1 % 2</code> 3 to 5 runs</p>")
    assert html == (
        "<p>1.06\u00a0±\u00a00.03, −0.2\u00a0% (−0.5\u00a0to\u00a0+0.1\u00a0%) <code>1 % 2</code> 3 to 5 runs</p>"
    )


def test_flags_in_sentences_are_not_broken(narrow):
    assert narrow.with_breaks("<td>of --objective_kwargs, a -- b</td>") == (
        '<td>of <span class="whole">--objective_kwargs</span>, a -- b</td>'
    )


def test_a_stop_stays_with_its_formula(narrow):
    assert narrow.with_breaks("<math>a</math> with <math>b</math>.") == (
        '<math>a</math> with <span class="whole"><math>b</math>.</span>'
    )
    assert narrow.with_breaks("<math><mi>a</mi></math>. B") == '<span class="whole"><math><mi>a</mi></math>.</span> B'


@pytest.mark.parametrize(
    ("output", "scrolls"),
    [
        ("arm      loss\nlinear   0.1", True),
        ("  error: one sentence", False),
        ('a = 1  <span class="c"># code</span>', False),
    ],
)
def test_output_in_columns_scrolls(narrow, output, scrolls):
    html = narrow.with_columns(f'<div class="highlight"><pre><code>{output}</code></pre></div>')
    assert html.startswith('<div class="language-text highlight">') is scrolls
