"""The site is built without a warning, and the notebooks run. Both need what the extra `[docs]` brings."""

import importlib
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys

import printed
import pytest
import runs
from chromium import PROGRAM, Chromium, needs_axe, needs_chromium
from filelock import FileLock
from html_checks import mistakes

import diffusers_lrlab

NOTEBOOKS = sorted((printed.ROOT / "docs/notebooks").glob("*.ipynb"))


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f'{", ".join(missing)} not installed: pip install -e ".[docs]"')


needs_mkdocs = needs("mkdocs", "material", "mkdocstrings", "latex2mathml")


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id):
    """The folder of the site, which a warning would have stopped; the workers of pytest share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            done = build(printed.ROOT, base / "site-now")
            assert done.returncode == 0, done.stdout + done.stderr
            (base / "site-now").rename(folder)
    return folder


def build(root, folder):
    """`--strict` counts the warnings that are printed: `--quiet` would hide them from it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, env=runs.environment(), capture_output=True, text=True)


BREAKS = {  # what is added to a page, and what mkdocs says of it
    "a page that is not there": ("[a](no-such-page.md)", "no-such-page.md"),
    "a heading that is not there": ("[a](guarantees.md#no-such-heading)", "no-such-heading"),
    "a file that is not there": ("[a](../no-such-file.txt)", "no-such-file.txt"),
}


@needs_mkdocs
@pytest.mark.slow
def test_a_broken_page_stops_the_site(tmp_path):
    shutil.copytree(printed.ROOT, tmp_path / "clone", ignore=shutil.ignore_patterns(".*", "tests"))
    page = tmp_path / "clone/docs/index.md"
    page.write_text(
        "\n\n".join([page.read_text(encoding="utf-8"), *(text for text, _ in BREAKS.values())]), encoding="utf-8"
    )
    (page.parent / "left-out.md").write_text("# A page that is not in the navigation\n", encoding="utf-8")
    done = build(tmp_path / "clone", tmp_path / "site")
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert {name for name, (_, said_of_it) in BREAKS.items() if said_of_it not in said} == set()
    assert "left-out.md" in said


@needs_mkdocs
@pytest.mark.slow
def test_the_site_has_what_is_generated(site):
    assert "num_decay_steps" in (site / "reference/schedules.html").read_text(encoding="utf-8")
    assert "--timestep_sampler" in (site / "reference/commands.html").read_text(encoding="utf-8")
    api = (site / "reference/python.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "scheduler_specific_kwargs" in api
    assert f'<small class="version">{diffusers_lrlab.__version__}</small></span>' in api
    assert "<td><code>lr_warmup_steps</code></td>" in api
    assert "<math" in (site / "reference/schedules.html").read_text(encoding="utf-8")
    assert "[<code>" not in api  # names in brackets are links
    assert "adjusted p" in (site / "repository/model_cards/lr-study-2d/index.html").read_text(encoding="utf-8")
    assert (site / "notebooks/schedules-0.png").stat().st_size > 1000


HEADINGS = (
    "[...(document.querySelector('article') || document.body).querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])"
)
SMALLEST_TEXT = """
(() => {
  const walker = document.createTreeWalker(document.querySelector('article') || document.body, NodeFilter.SHOW_TEXT);
  let smallest = Infinity;
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (walker.currentNode.textContent.trim() && parent.checkVisibility() && !parent.closest('svg, script, style, noscript'))
      smallest = Math.min(smallest, parseFloat(getComputedStyle(parent).fontSize));
  }
  return smallest;
})()"""
WHITE_IN_THE_DARK = (
    "[...document.querySelectorAll('article img')].filter(i => getComputedStyle(i).filter === 'none').map(i => i.src)"
)
PICTURES = "[...document.querySelectorAll('article img')].every(i => i.complete && i.naturalWidth && i.alt.length > 10)"


@needs_mkdocs
@pytest.mark.slow
def test_pages_are_in_order_without_a_browser(site):
    assert {page.name: found for page in _own_pages(site) if (found := mistakes(page))} == {}


def _own_pages(site):
    return [path for path in sorted(site.rglob("*.html")) if "repository" not in path.parts and path.name != "404.html"]


@needs_mkdocs
@needs_chromium
@pytest.mark.slow
def test_pages_are_whole_on_a_phone_and_on_a_desk(site):
    """
    Nothing sticks out, text can be read, also that of plots, nothing is asked of the network, pictures are there with a
    text, headings are in order.
    """
    with Chromium(PROGRAM) as browser:
        for page in _own_pages(site):
            for width in (390, 1400):
                browser.open(page, width=width, mobile=width == 390)
                sticks_out = browser.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
                assert not sticks_out, (page, width)
                assert browser.evaluate(SMALLEST_TEXT) >= 10.99, (page, width)
            levels = browser.evaluate(HEADINGS)
            assert levels.count(1) == 1, page
            assert all(below <= above + 1 for above, below in itertools.pairwise(levels)), (page, levels)
            browser.wait(PICTURES)
        assert browser.errors == []
        assert all(request.startswith(("file:", "data:")) for request in browser.requests)


# What a newcomer types, and a page that answers it.
ASKED = {
    "error bars": "tutorials/paper-figure.html",
    "significance": "concepts/studies.html",
    "--lr_scheduler": "reference/schedules.html",
    "cool down from a plateau": "tutorials/extend-and-branch.html",
}


@needs_mkdocs
@needs_chromium
@pytest.mark.slow
def test_the_search_answers_common_questions_from_disk(site):
    """Among the first three results, from a page in a folder: the index is a script, since pages from disk read no files."""
    results = "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3).map(i => i.querySelector('a').href)"
    with Chromium(PROGRAM) as browser:
        for question, page in ASKED.items():
            browser.open(site / "reference/schedules.html")
            browser.evaluate("document.querySelector('.md-search__input').focus()")
            browser.call("Input.insertText", text=question)
            browser.wait(f"{results}.length > 0")
            found = browser.evaluate(results)
            assert any(link.startswith((site / page).as_uri()) for link in found), (question, found)
        assert browser.errors == []
        assert all(request.startswith(("file:", "data:")) for request in browser.requests)


LOOKED_AT_CLOSELY = ("index.html", "schedules.html", "first-study.html", "own-denoiser.html")


@needs_mkdocs
@needs_axe
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_by_everybody(site, scheme):
    """Contrast, texts of pictures, headings, language, names of controls, by the rules of axe-core."""
    with Chromium(PROGRAM) as browser:
        browser.set_scheme(scheme)  # which the site remembers: a browser for each
        found = {}
        for page in _own_pages(site):
            for width in (390, 800, 1400) if page.name in LOOKED_AT_CLOSELY else (1400,):
                browser.open(page, width=width, mobile=width == 390)
                if violations := browser.violations(of_colors=scheme == "dark"):
                    found[page.name, width] = violations
                if scheme == "dark":
                    assert browser.evaluate(WHITE_IN_THE_DARK) == [], page
        assert found == {}
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is (scheme == "light")


@needs("nbclient", "ipykernel")
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    command = [sys.executable, printed.ROOT / "docs/run_notebooks.py", path.stem]
    environment = {**runs.environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_outputs_and_nothing_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in code)
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    assert "/tmp/" not in text
    assert "/home/" not in text
    assert len(text) < 400_000
    for cell in code:
        compile("".join(cell["source"]), path.name, "exec")


@needs("nbclient")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_notebooks_shows_what_they_print(path):
    """The picture is of the outputs as they are kept, so that neither can change without the other."""
    with printed.docs_modules():
        run_notebooks = importlib.import_module("run_notebooks")
    shown = run_notebooks.picture(json.loads(path.read_text(encoding="utf-8")), path.stem)
    assert path.with_suffix(".png").read_bytes() == shown
    page = path.with_name("index.md").read_text(encoding="utf-8")
    assert f"]({path.name})" in page
    assert f"]({path.stem}.png)" in page
