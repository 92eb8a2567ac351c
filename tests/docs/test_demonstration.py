"""The demonstration: its data, and the page in a real browser."""

import json
import sys

import numpy as np
import printed
import pytest
from chromium import needs_axe, needs_chromium
from html_checks import mistakes

from diffusers_lrlab import lr_curve
from diffusers_lrlab.preview.countings import COUNTINGS
from diffusers_lrlab.schedules.resolve import resolve_schedule

sys.path.insert(0, str(printed.ROOT / "docs/demonstration"))

import make_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page of fewer choices, which is made sooner."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LENGTHS", (200,)), ("WARMUPS", (0, 20)), ("SHARES", (1, 4))):
            patch.setattr(make_page, name, value)
        path = tmp_path_factory.mktemp("demonstration")
        (path / "index.html").write_text(make_page.page(), encoding="utf-8")
        return path


@pytest.fixture
def page(browser, folder):
    browser.open(folder / "index.html", 1400, 900)
    browser.wait("schedules.width > 0")
    yield browser
    assert browser.errors == []


def choose(page, list_, value):
    page.evaluate(f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})(chosen.{list_})")


@pytest.mark.parametrize(
    ("program", "layout", "peak", "last"),  # as the audit found them: docs/trainers, and the law of one clock
    [
        ("sd-scripts, musubi-tuner", {"num_processes": 4}, 5, 6.49e-05),
        ("sd-scripts, musubi-tuner", {"accumulation": 4}, 20, 7.62e-05),
        ("OneTrainer", {"accumulation": 4}, 5, 6.49e-05),
        ("OneTrainer", {}, 20, 7.62e-05),
    ],
)
def test_programs_count_as_the_audit_of_their_own_code_found(program, layout, peak, last):
    layout = {"accumulation": 1, "num_processes": 1, **layout}
    assert COUNTINGS[program].is_tested("cosine", layout["num_processes"])
    lrs, _ = resolve_schedule("cosine").at(COUNTINGS[program].clock(200, 20, **layout), 1.0, 0.9)
    assert np.argmax(lrs) == peak
    assert lrs[-1] == pytest.approx(last, rel=2e-3)


def test_what_was_not_tested_is_not_shown():
    assert not COUNTINGS["OneTrainer"].is_tested("cosine", 4)
    assert not COUNTINGS["sd-scripts, musubi-tuner"].is_tested("rex", 1)


def test_what_was_asked_is_the_curve_of_the_registry(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    shown = data["schedules"]
    asked = shown["curves"][shown["runs"]["linear"]["200 20 4 4"][data["asked"]]]
    expected = lr_curve("linear", 1.0, 20, 200)[shown["updates"]["200"]]
    np.testing.assert_allclose(asked, expected, rtol=5e-3)
    assert "200 20 1 1" not in shown["runs"]["constant"]  # it takes no warm-up
    for noise in data["densities"].values():
        assert np.mean(noise["samplers"]["uniform"]) == pytest.approx(1)
        area = np.trapezoid(noise["per_log_snr"], -np.array(noise["log_snr"]))
        assert area == pytest.approx(1, abs=0.05)  # of the uniform density, over log SNR


def test_the_page_is_in_order_without_a_browser(folder):
    assert mistakes(folder / "index.html") == []
    assert (folder / "index.html").stat().st_size < 1.5e6


@pytest.mark.slow
@needs_chromium
def test_choices_change_what_is_shown(page):
    said = "document.getElementById('told').textContent"
    choose(page, "accumulation", "1")
    assert "not as asked" not in page.evaluate(said)
    choose(page, "accumulation", "4")
    assert "train_unconditional.py: peak at update 80, 93.4 % of it at the end, not as asked" in page.evaluate(said)
    choose(page, "beside", "linear")
    assert page.evaluate("schedules.grid.children.length") == 2
    choose(page, "schedule", "constant")
    choose(page, "beside", "none")
    assert page.evaluate(said) == "constant takes no such warm-up."


@needs_chromium
def test_a_curve_shows_its_values(page):
    panel = "(() => { const svg = schedules.grid.firstChild, row = schedules.panels[0].rows[40]; "
    panel += "const box = svg.getBoundingClientRect();"
    x, y = page.evaluate(f"{panel} return [box.x + svg.scale('x').apply(row.x), box.y + svg.scale('y').apply(row.y)]; }})()")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait("!!schedules.grid.querySelector('[aria-label=tip] text')")
    assert "share of the peak" in page.evaluate("schedules.grid.querySelector('[aria-label=tip]').textContent")


@needs_chromium
def test_without_scripts_the_page_says_what_it_would_show(browser, folder):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(folder / "index.html", 1400, 900)
    text = browser.evaluate("document.querySelector('noscript').innerText")
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "85 % of its peak" in text
    clock = COUNTINGS["diffusers' train_unconditional.py"].clock(10_000, 0, 4, 1)
    lrs, _ = resolve_schedule("cosine").at(clock, 1.0, 0.9)
    assert lrs[-1] / lrs.max() == pytest.approx(0.85, abs=0.005)


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_by_everybody(browser, folder, scheme):
    browser.set_scheme(scheme)
    for width in (390, 800, 1400):
        browser.open(folder / "index.html", width, 900, mobile=width == 390)
        browser.wait("schedules.width > 0")
        assert browser.violations() == []
        assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        smallest = (
            "Math.min(...[...document.querySelectorAll('svg text')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert browser.evaluate(smallest) >= 11
    browser.set_scheme("")
    assert browser.errors == []
