"""The site is built without a warning, and the notebooks run. Both need what the extra `[docs]` brings."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys

import printed
import pytest
import runs
from chromium import Chromium, needs_chromium
from filelock import FileLock
from html_checks import mistakes

import diffusers_lrlab

NOTEBOOKS = sorted((printed.ROOT / "docs/notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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
            # `--strict` counts the warnings that are printed: `--quiet` would hide them from it.
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(base / "site-now")]
            done = subprocess.run(command, cwd=printed.ROOT, env=runs.environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            (base / "site-now").rename(folder)
    return folder


@pytest.fixture
def pages(site):
    return [path for path in sorted(site.rglob("*.html")) if "repository" not in path.parts and path.name != "404.html"]


@needs_mkdocs
@pytest.mark.slow
def test_the_site_has_what_is_generated(site, pages):
    schedules, commands, api, card = (
        (site / path).read_text(encoding="utf-8")
        for path in (
            *(f"reference/{name}.html" for name in ("schedules", "commands", "python")),
            "repository/model_cards/lr-study-2d/index.html",
        )
    )
    assert "num_decay_steps" in schedules
    assert "<math" in schedules
    assert "--timestep_sampler" in commands
    assert f'<small class="version">{diffusers_lrlab.__version__}</small></span>' in api
    assert "[<code>" not in api  # names in brackets are links
    assert "adjusted p" in card
    assert (site / "notebooks/schedules-0.png").stat().st_size > 1000
    assert {page.name: found for page in pages if (found := mistakes(page))} == {}


PICTURES = "[...document.querySelectorAll('article img')].every(i => i.complete && i.naturalWidth && i.alt.length > 10)"
STICKS_OUT = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
RESULTS = "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3).map(i => i.querySelector('a').href)"
ASKED = {  # what a newcomer types, and a page that answers it
    "error bars": "tutorials/paper-figure.html",
    "significance": "concepts/studies.html",
    "--lr_scheduler": "reference/schedules.html",
    "cool down from a plateau": "tutorials/extend-and-branch.html",
}


@needs_mkdocs
@needs_chromium
def test_pages_fit_a_phone_and_the_search_answers(site, pages):
    """From disk: nothing is asked of the network, nothing sticks out, pictures are there, answers are in the first three."""
    with Chromium() as browser:
        for page in pages:
            for width in (390, 1400):
                browser.open(page, width=width, mobile=width == 390)
                assert not browser.page.evaluate(STICKS_OUT), (page, width)
            browser.page.wait_for_function(PICTURES)
        for question, page in ASKED.items():
            browser.open(site / "reference/schedules.html")
            browser.page.focus(".md-search__input")
            browser.page.keyboard.insert_text(question)
            browser.page.wait_for_function(f"{RESULTS}.length > 0")
            found = browser.page.evaluate(RESULTS)
            assert any(link.startswith((site / page).as_uri()) for link in found), (question, found)
        assert browser.errors == []
        assert all(request.startswith(("file:", "data:")) for request in browser.requests)


@needs_mkdocs
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_by_everybody(pages, scheme):
    """Contrast, texts of pictures, headings, language, names of controls, by the rules of axe-core."""
    with Chromium() as browser:
        browser.page.emulate_media(color_scheme=scheme)  # which the site remembers: a browser for each
        found = {}
        for page in pages:
            browser.open(page, width=1400)
            if violations := browser.violations(of_colors=scheme == "dark"):
                found[page.name] = violations
        assert found == {}
        ground = browser.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is (scheme == "light")


@needs("nbclient", "ipykernel")
@pytest.mark.slow
@each_notebook
def test_a_notebook_runs(path):
    command = [sys.executable, printed.ROOT / "docs/run_notebooks.py", path.stem]
    done = subprocess.run(command, env={**runs.environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("nbclient")
@each_notebook
def test_a_notebook_has_its_outputs_and_nothing_of_a_machine(path):
    """The picture on the page of notebooks is of the outputs as they are kept."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    outputs = [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert not any(folder in text for folder in ("/tmp/", "/home/"))
    assert len(text) < 400_000
    with printed.docs_modules():
        shown = importlib.import_module("run_notebooks").picture(notebook, path.stem)
    assert path.with_suffix(".png").read_bytes() == shown
    index = path.with_name("index.md").read_text(encoding="utf-8")
    assert {f"]({path.name})", f"]({path.stem}.png)"} <= {*re.findall(r"\]\([^)]*\)", index)}
