"""What the scripts of a study's page add to it, in a real browser."""

import csv
import json

import pytest
from chromium import needs_axe, needs_chromium
from made_up_studies import made_up_study

from diffusers_lrlab.core import web
from diffusers_lrlab.study.report import explore
from diffusers_lrlab.study.report.contents import ReportContents
from diffusers_lrlab.study.report.explore import page_data
from diffusers_lrlab.study.report.report import write_report

ARMS = ("plain", "fast <b>", "slow")
SEEDS_CHART = "charts.find(chart => chart.name === 'seeds_kl')"
LOSS_CHART = "charts.find(chart => chart.name === 'loss')"


@pytest.fixture(scope="module")
def study():
    """Whose runs differ in an option."""
    return made_up_study(ARMS, ("dino", "moons"), seeds=3, change=_with_its_rate)


def _with_its_rate(run):
    run.config["learning_rate"] = 1e-3 * (1 + ARMS.index(run.arm))
    return run


@pytest.fixture(scope="module")
def index(study, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("explore"), *study)


@pytest.fixture
def page(browser, index):
    """The page at the width of a desk, with all charts drawn."""
    browser.errors.clear()
    opened(browser, index, 1400)
    yield browser
    assert browser.errors == []


def opened(browser, index, width):
    browser.open(index, width, 900, mobile=width == 390)
    browser.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    browser.wait("charts.every(chart => chart.width)")


def box(browser, element):
    """The middle of an element, scrolled into sight."""
    browser.evaluate(f"({element}).scrollIntoView({{block: 'center'}})")
    return browser.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(({element}).getBoundingClientRect())")


def mouse(browser, event, x, y, **more):
    browser.call("Input.dispatchMouseEvent", type=event, x=x, y=y, **more)


def click(browser, element):
    x, y = box(browser, element)
    for event in ("mouseMoved", "mousePressed", "mouseReleased"):
        mouse(browser, event, x, y, **({} if event == "mouseMoved" else {"button": "left", "clickCount": 1}))


def text_box(word):
    """The box to tick beside these words."""
    return f"[...document.querySelectorAll('.controls .tick')].find(e => e.textContent === {json.dumps(word)}).firstChild"


def rows_of(browser, chart):
    return browser.evaluate(f"{chart}.panels.flatMap(panel => panel.rows.map(row => row.shown))")


@pytest.mark.slow
@needs_chromium
def test_a_click_hides_an_arm_everywhere_and_another_shows_it(page):
    lines = f"{LOSS_CHART}.grid.querySelectorAll('path[d^=M], g[stroke=\"#0072B2\"] > path').length"
    before = page.evaluate(lines)
    click(page, text_box("fast <b>"))
    assert page.evaluate(lines) < before
    for chart in (SEEDS_CHART, LOSS_CHART, "charts.find(chart => chart.name === 'differences')"):
        assert {row["arm"] for row in rows_of(page, chart)} <= {"plain", "slow"}
    click(page, text_box("fast <b>"))
    assert page.evaluate(lines) == before


@pytest.mark.slow
@needs_chromium
def test_arms_keep_their_order_and_their_colours(browser, tmp_path):
    """Names that are numbers, too, and in the dark, where pictures are turned."""
    names = ["sixteen", "16", "4", "1"]
    report = write_report(tmp_path, *made_up_study(names, ("dino",), seeds=2))
    opened(browser, report, 1400)
    told = "[...document.querySelectorAll('.controls .tick')].map(tick => tick.textContent)"
    assert browser.evaluate(told)[: len(names)] == names
    browser.set_scheme("dark")
    swatches = "[...document.querySelectorAll('dt svg')].map(svg => getComputedStyle(svg).filter)"
    colours = "[...document.querySelectorAll('dt svg line')].map(line => getComputedStyle(line).stroke)"
    boxes = "[...document.querySelectorAll('.controls .tick')].map(tick => getComputedStyle(tick).borderBottomColor)"
    assert browser.evaluate(swatches) == ["none"] * len(names)
    assert browser.evaluate(colours) == browser.evaluate(boxes)[: len(names)]
    browser.set_scheme("light")


@pytest.mark.slow
@needs_chromium
def test_seeds_and_means_are_hidden_by_a_click(page):
    click(page, text_box("seed 1"))
    assert {row["seed"] for row in rows_of(page, SEEDS_CHART)} == {0, 2}
    assert {row["seed"] for row in rows_of(page, LOSS_CHART)} == {0, 2, "mean"}
    click(page, text_box("mean"))
    assert {row["seed"] for row in rows_of(page, LOSS_CHART)} == {0, 2}


@pytest.mark.slow
@needs_chromium
def test_a_point_shows_its_values_and_opens_its_run(page, study):
    run = study[0][0]
    dot = f"{SEEDS_CHART}.grid.querySelector('circle')"
    x, y = box(page, dot)
    mouse(page, "mouseMoved", x, y)
    page.wait(f"!!{SEEDS_CHART}.grid.querySelector('[aria-label=tip] text')")
    told = page.evaluate(f"{SEEDS_CHART}.grid.querySelector('[aria-label=tip]').textContent")
    assert f"arm: {run.arm}" in told
    assert f"seed: {run.seed}" in told
    assert f"{run.results['kl']:.4g}" in told
    click(page, dot)
    page.wait("!!document.querySelector('dialog[open]')")
    told = page.evaluate("document.querySelector('dialog').textContent")
    for part in (f"{run.arm}, dino, seed {run.seed}", f"runs/{run.id}.json", "learning_rate0.001"):
        assert part in told
    assert "output_dir" not in told
    pictures = page.evaluate("[...document.querySelectorAll('dialog svg')].map(svg => svg.getAttribute('aria-label'))")
    assert pictures == ["training loss", "held-out loss", "learning rate", "Samples"]
    assert page.evaluate("document.querySelectorAll('dialog circle').length") >= 200
    click(page, "document.querySelector('dialog button')")
    page.wait("!document.querySelector('dialog')")


@pytest.mark.slow
@needs_chromium
def test_the_keyboard_reaches_every_run(page, study):
    page.evaluate(
        "(e => { e.value = 5; e.dispatchEvent(new Event('change')); })(document.querySelector('.controls select'))"
    )
    run = sorted(study[0], key=lambda run: run.seed)[5]
    assert page.evaluate("document.querySelector('dialog h2').textContent") == f"{run.arm}, {run.dataset}, seed {run.seed}"


@pytest.mark.slow
@needs_chromium
def test_a_rectangle_zooms_and_a_button_shows_the_whole_again(page, tmp_path):
    domain = f"{LOSS_CHART}.grid.firstChild.scale('x').domain"
    whole = page.evaluate(domain)
    x, y = box(page, f"{LOSS_CHART}.grid.firstChild")
    mouse(page, "mousePressed", x - 60, y - 40, button="left", clickCount=1)
    mouse(page, "mouseMoved", x + 40, y + 30, button="left", buttons=1)
    mouse(page, "mouseReleased", x + 40, y + 30, button="left", clickCount=1)
    page.wait(f"{domain}[0] > {whole[0]}")
    low, high = page.evaluate(domain)
    assert whole[0] < low < high < whole[1]
    page.evaluate(f"{LOSS_CHART}.grid.previousSibling.querySelector('button').click()")
    page.wait(f"{domain}[0] === {whole[0]}")
    assert page.evaluate(domain) == whole


@pytest.mark.slow
@needs_chromium
def test_axes_turn_logarithmic(page):
    kinds = f"['x', 'y'].map(name => {LOSS_CHART}.grid.firstChild.scale(name).type)"
    assert page.evaluate(kinds) == ["linear", "log"]
    ticks = f"[...{LOSS_CHART}.grid.previousSibling.querySelectorAll('input')]"
    page.evaluate(f"{ticks}.forEach(box => box.click())")
    assert page.evaluate(kinds) == ["log", "linear"]


@pytest.mark.slow
@needs_chromium
def test_what_is_seen_can_be_saved(page, tmp_path):
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    click(page, text_box("slow"))
    for form, files in (("CSV", 1), ("SVG", 2), ("PNG", 3)):
        buttons = f"[...{SEEDS_CHART}.grid.previousSibling.querySelectorAll('button')]"
        page.evaluate(f"{buttons}.find(each => each.textContent === '{form}').click()")
        for _ in range(200):
            if len([path for path in tmp_path.iterdir() if path.suffix in (".csv", ".svg", ".png")]) == files:
                break
            page.evaluate("new Promise(done => setTimeout(done, 20))")
    rows = list(csv.DictReader((tmp_path / "seeds_kl.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["arm"] for row in rows} == {"plain", "fast <b>"}
    assert len(rows) == 2 * 2 * 3
    drawing = (tmp_path / "seeds_kl.svg").read_text(encoding="utf-8")
    assert drawing.count("<circle") == 12
    assert "fast &lt;b&gt;" in drawing
    assert (tmp_path / "seeds_kl.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@needs_chromium
def test_tables_are_sorted_by_a_click(page):
    table = "document.querySelector('#summary ~ .scroll table')"
    heading = f"[...{table}.tHead.rows].at(-1).cells[[...[...{table}.tHead.rows].at(-1).cells].length - 1]"
    column = f"[...{table}.tBodies[0].rows].map(row => parseFloat(row.cells[row.cells.length - 1].textContent))"
    whole = page.evaluate(f"[...{table}.tBodies[0].rows].map(row => row.textContent).sort()")
    names = page.evaluate(f"[...{table}.tBodies[0].rows].every(row => row.cells[1].textContent)")
    for order, expected in (("ascending", sorted), ("descending", lambda found: sorted(found, reverse=True))):
        page.evaluate(f"{heading}.querySelector('button').click()")
        assert page.evaluate(f"{heading}.ariaSort") == order
        found = [value for value in page.evaluate(column) if value is not None]
        assert found == expected(found)
    assert names
    assert len(page.evaluate(f"[...{table}.tBodies[0].rows].map(row => row.textContent)")) == len(whole)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (800, 2), (1400, 2)])
def test_panels_are_side_by_side_where_there_is_room(browser, index, width, columns):
    opened(browser, index, width)
    places = browser.evaluate(
        f"[...{LOSS_CHART}.grid.children].map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert len({left for left, _ in places}) == columns
    assert all(0 <= left < right <= width for left, right in places)
    smallest = (
        "Math.min(...[...document.querySelectorAll('.panels svg text')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert browser.evaluate(smallest) >= 11
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.slow
@needs_chromium
def test_the_page_reads_without_its_scripts_and_prints_as_before(browser, index):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(index, 1400, 900)
    assert browser.evaluate("document.querySelectorAll('.live, .printed').length") == 0
    assert browser.evaluate("document.querySelector('[data-file=\"loss.png\"]').checkVisibility()")
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    opened(browser, index, 1400)
    seen = "['.live', '[data-file=\"loss.png\"]'].map(name => document.querySelector(name).checkVisibility())"
    assert browser.evaluate(seen) == [True, False]
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(seen) == [False, True]
    browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
@needs_chromium
def test_no_other_script_runs(browser, index):
    opened(browser, index, 1400)
    browser.evaluate("document.body.append(make('script', {textContent: 'window.isOther = true'})); 0")
    assert browser.evaluate("window.isOther") is None
    assert "Content Security Policy" in " ".join(browser.errors)
    browser.errors.clear()


@pytest.mark.slow
@needs_axe
def test_a_run_can_be_read_by_everybody(page):
    page.evaluate("showRun(study.runs[0])")
    assert page.violations() == []
    smallest = (
        "Math.min(...[...document.querySelectorAll('dialog text')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert page.evaluate(smallest) >= 11


def test_samples_are_those_of_the_lowest_seeds_where_not_all_have_room(study, monkeypatch):
    monkeypatch.setattr(explore, "MOST_BYTES_OF_SAMPLES", 20_000)
    runs = page_data(ReportContents(*study), [])["runs"]
    have = [run["seed"] for run in runs if "points" in run]
    assert 0 < len(have) < len(runs)
    assert have == [run["seed"] for run in runs][: len(have)]


def test_only_finite_metrics_of_a_run_are_shown():
    results, summary = made_up_study(ARMS, ("dino",), seeds=2)
    results[0].results |= {"kl": float("nan"), "scored_by": "a text"}
    runs = page_data(ReportContents(results, summary), [])["runs"]
    assert [set(run["values"]) for run in runs][:2] == [{"coverage", "training_set_loss"}, {*results[1].results}]
    json.loads(web.as_json(runs))


def test_what_nothing_drives_is_not_plotted():
    def with_momentum(arm):
        def change(run):
            updates = len(run.curves["loss"]["update"])
            run.curves["loss"]["beta1"] = [0.9] * (updates - 1) + [0.5 if run.arm == arm else 0.9]
            return run

        return change

    for arm, shown in (("none", False), ("slow", True)):
        contents = ReportContents(*made_up_study(ARMS, ("dino",), seeds=2, change=with_momentum(arm)))
        assert ("beta1" in {kind.name for kind in contents.curve_kinds}) is shown


@pytest.mark.slow
def test_one_data_set_has_no_ranks(tmp_path):
    for datasets, there in ((("dino",), False), (("dino", "moons"), True)):
        write_report(tmp_path, *made_up_study(ARMS, datasets, seeds=2))
        assert (tmp_path / "report" / "ranks_kl.png").exists() is there


def test_the_libraries_have_their_licences_beside_them():
    folder = web.STYLE.parent / "vendor"
    for name in ("d3", "plot"):
        assert "Permission to use, copy, modify" in (folder / f"LICENSE-{name}.txt").read_text(encoding="utf-8")
