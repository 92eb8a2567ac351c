"""The report of a study: its tables, plots and page, from made-up runs."""

import base64
import html
import io
import math
import re
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from chromium import needs_chromium
from html_checks import mistakes
from made_up_studies import UPDATES, made_up_run, made_up_study, summary_of
from PIL import Image
from tables import cases

from diffusers_lrlab.core.environment import citation
from diffusers_lrlab.study.analysis.statistics import compare
from diffusers_lrlab.study.analysis.summary import Verdict, findings
from diffusers_lrlab.study.context import StudyProgress
from diffusers_lrlab.study.report import plots, tables
from diffusers_lrlab.study.report.contents import ReportContents
from diffusers_lrlab.study.report.curves import CURVE_KINDS, MOST_POINTS, mean_curves, styles
from diffusers_lrlab.study.report.report import write_report
from diffusers_lrlab.study.report.sentences import STILL_FALLING, Answer, has_end, limitations, still_falling
from diffusers_lrlab.study.report.tables import (
    Table,
    interval,
    number,
    percent,
    plus_minus,
    probability,
    to_markdown,
)

TUNING = [
    {"arm": "a", "dataset": "dino", "learning_rate": rate, "score": 0.5, "chosen": rate == 1e-3, "at_edge": rate == 1e-3}
    for rate in (1e-4, 1e-3)
]


def tables_of(page):
    """Texts of the cells of every table, by its title."""
    boxes = re.findall(r'class=scroll [^>]*aria-label="([^"]*)"><table>(.*?)</table>', page, re.DOTALL)
    return {html.unescape(title): [_cells_of(row) for row in box.split("<tr")[1:]] for title, box in boxes}


def _cells_of(row):
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", row, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in cells]


def verdict(word, arm="b", reference="a", difference=None, metric="kl"):
    """A made-up verdict, as a summary has it."""
    return asdict(Verdict(arm, reference, "dino", metric, difference, None, None, 0.5, word))


def page_of(tmp_path, results, summary):
    index = write_report(tmp_path, results, summary)
    assert index == tmp_path / "report" / "index.html"
    return index.read_text(encoding="utf-8")


# --- tables ----------------------------------------------------------------------------------------------------------


def test_numbers_for_people():
    spreads = [(0.36412, 0.00456), (0.36412, None), (127.74, 12.3), (-1.5, 0.25), (1234567.0, 100.0), (math.inf, 1.0)]
    shown = ["0.3641 ± 0.0046", "0.3641", "128 ± 12", "−1.50 ± 0.25", "1.235e+06 ± 1e+02", "–"]
    assert [plus_minus(*pair) for pair in spreads] == shown
    assert [number(value) for value in (None, math.nan, 0, -0.12345, 1e-7)] == ["–", "–", "0", "−0.1235", "1e−07"]
    assert [probability(value) for value in (None, 0.0004, 0.04999, 0.05, 1)] == ["–", "< 0.001", "< 0.05", "0.050", "1.000"]
    assert [percent(value) for value in (0.1234, -0.005, 1.5, 0.0)] == ["12 %", "−0.50 %", "150 %", "0 %"]
    assert [interval(None, 1), interval(-0.1234, 0.5678), interval(2, 2)] == ["–", "−0.12 to 0.57", "2 to 2"]


def test_markdown_shows_texts_as_they_are():
    frame = pd.DataFrame([["x & y", "better", "1 ± 2"], ["<i>", "–", "$3 %"]], columns=["a|b", "", "c_d"])
    table = Table("t", "T", frame, "100 %", 1)
    assert to_markdown(table).splitlines() == [
        r"| a\|b |  | c\_d |", "|---|---:|---:|", r"| x \& y | **better** | 1 ± 2 |", r"| \<i\> | – | \$3 % |", "", "100 %",
    ]  # fmt: skip


def test_page_and_markdown_have_the_numbers_of_the_summary(tmp_path):
    results, summary = made_up_study(("a", "b", "c"), ("dino", "moons"))
    summary["findings"]["kl"] += [verdict("better", difference=-0.25, reference="c"), verdict("cannot tell", reference="c")]
    page = page_of(tmp_path, results, summary)
    shown = tables_of(page)
    for metric in ("kl", "coverage"):
        head, *rows = shown[tables.metric_label(metric)]
        words = {
            (found["dataset"], found["arm"]): found["word"]
            for found in summary["findings"][metric]
            if found["reference"] == "a"
        }
        for cells, row in zip(rows, tables.rows_of(summary, metric), strict=True):
            found = dict(zip(head, cells, strict=True))
            assert cells[:2] == [row["dataset"], row["arm"]]
            assert found["mean ± std"] == plus_minus(row["mean"], row["std"])
            if row["arm"] != "a":
                assert found["verdict"] == words[row["dataset"], row["arm"]]
                assert found["difference"] == number(row["diff"])
                assert found["adjusted p"] == probability(row["p_adjusted"])
        assert to_markdown(tables.summary_table(summary, metric)) in (tmp_path / "report/report.md").read_text(
            encoding="utf-8"
        )
    differences_first = [row[4] != "cannot tell" for row in shown["All findings in numbers"][1:]]
    assert differences_first == sorted(differences_first, reverse=True)
    assert page.index("<details>", page.index('id="findings"')) < page.index("−0.25")  # folded


# --- sentences -------------------------------------------------------------------------------------------------------


@cases(
    ("verdicts", "expected"),
    [
        ({"dino": "worse", "moons": "worse"}, "b against a: worse on both data sets."),
        (
            {"dino": "cannot tell", "line": "worse", "moons": "better"},
            "b against a: better on moons; worse on line; no difference shown on dino.",
        ),
        (
            dict.fromkeys("tuvwx", "cannot tell") | {"z": "diverged"},
            "b against a: no difference shown on 5 of 6 data sets; every run diverged on z.",
        ),
        ({"moons": "lower", "line": None}, "b against a: lower on moons; no test possible on line."),
    ],
)
def test_an_answer_is_a_sentence(verdicts, expected):
    assert Answer("b", "a", verdicts).sentence == expected


def test_page_and_markdown_begin_with_answers_a_picture_and_warnings_and_end_with_the_entry_to_cite(tmp_path):
    results, summary = made_up_study(("a", "b"), ("dino", "moons"), seeds=3)
    summary["study"]["arms"]["b"]["lr_scheduler"] = "cosine"
    page = page_of(tmp_path, results, summary)
    markdown = (tmp_path / "report" / "report.md").read_text()
    for text, image in ((page[: page.index("<nav")], "<img"), (markdown[: markdown.index("| data set")], "![")):
        first = (
            "Smaller is better. Differences are from a; above 0, the arm is worse.",
            "b against a: worse on both data sets.",
        )
        found = [text.index(part) for part in (*first, image)]
        assert found == sorted(found)
        for part in (
            "Coverage: b against a: worse on both data sets.",
            "There are few seeds: 3 seeds can only show large differences.",
            "Learning rates were not tuned",
        ):
            assert part in text
    assert citation() in page[page.index("Reproduction</h2>") :]
    assert markdown.endswith(f"## Citation\n\n```bibtex\n{citation()}\n```\n")


def test_of_many_arms_ten_have_a_sentence_and_all_are_among_the_findings(tmp_path):
    results, summary = made_up_study([f"arm{place}" for place in range(14)], ("dino",), seeds=3)
    page = page_of(tmp_path, results, summary)
    beginning = page[: page.index("<nav")]
    assert len(re.findall(r"<li>arm\d+ against arm0: ", beginning)) == 10
    assert "<li>And 3 more, which are among all findings below.</li>" in beginning
    assert sum(row[0] == tables.metric_label("kl") for row in tables_of(page)["All findings in numbers"]) == 13


def falling_by(share, points=200, noise=0.0, fall=1.0):
    """A curve with this fall in all, of which this share is in its last fifth."""
    updates = np.arange(1, points + 1) * 10.0
    values = fall * np.interp(updates, [10, 8 * points, 10 * points], [1, share, 0])
    return updates, values + noise * np.random.default_rng(0).normal(size=points)


@cases(
    ("curve", "expected"),
    [
        (falling_by(2 * STILL_FALLING), True),
        (falling_by(2 * STILL_FALLING, noise=0.01), True),
        (falling_by(0.5 * STILL_FALLING), False),
        (falling_by(0.5 * STILL_FALLING, noise=0.3), False),  # all that it does is scatter
        ((np.arange(200.0), np.linspace(0, 1, 200)), False),  # it rises
    ],
)
def test_a_curve_that_is_still_falling(curve, expected):
    assert has_end(curve[0])
    assert still_falling(*curve) is expected
    assert not has_end(curve[0][:3])


def test_warnings_are_of_what_the_study_has():
    def change(run):
        if run.arm in falling:
            for group, key in (("loss", "loss"), ("quality", "validation_loss_ema")):
                updates = np.array(run.curves[group]["update"])
                run.curves[group][key] = (2 - updates / 10_000).tolist()
        return run

    falling: tuple[str, ...] = ()
    results, summary = made_up_study(("a", "b"), ("dino",), change=change)
    summary["study"]["arms"]["b"]["learning_rate"] = 1e-3  # two rates are compared
    assert limitations(results, summary) == []
    falling = ("b",)
    results, _ = made_up_study(("a", "b"), ("dino",), change=change)
    (short,) = limitations(results, summary)
    assert short.startswith("Runs are short: the loss of 5 of 10 runs was still falling at the end (b on dino).")
    for run in results:
        run.curves["quality"] = {}  # then it is the training loss that counts
    assert limitations(results, summary) == [short]
    assert limitations(results[:-1], summary)[0] == "The study is not finished: 1 of 10 runs have no result yet."
    results, _ = made_up_study(("a", "b"), ("dino",))
    summary["study"]["arms"]["b"] = {"lr_scheduler": "cosine"}
    summary["study"]["arms"]["a"] = {"lr_scheduler": "constant"}
    (rates,) = limitations(results, summary)
    assert rates.startswith("Learning rates were not tuned")
    (edge,) = limitations(results, summary | {"tuning": TUNING})
    assert edge.startswith("1 of 1 chosen learning rate is the lowest or the highest of those tried (a on dino): a rate ")
    for place, run in enumerate(results):  # plug-ins whose code changed
        run.record["meta"] = {"plugins": [{"name": "/home/me/mine.py", "sha256": str(place % 2)}]}
        run.config["objective"] = "flow_matching" if run.arm == "b" else "ddpm"
    objectives, plugins, _ = limitations(results, summary)
    assert objectives.startswith("Losses of ddpm and flow_matching are different quantities")
    assert plugins.startswith("The code of mine.py changed between runs")
    summary["study"]["meta"]["plugins"] = [{"name": "/home/me/mine.py"}, {"name": "theirs"}]
    assert dict(ReportContents(results, summary).facts())["plugins"] == "mine.py, theirs"
    (one,) = [text for text in limitations(*made_up_study(("a", "b"), ("dino",), seeds=1)) if "seed" in text]
    assert one == "There are few seeds: one seed shows no differences. Give 5 or more."


# --- plots -----------------------------------------------------------------------------------------------------------


@pytest.mark.pictures
def test_a_difference_is_coloured_only_where_the_test_says_so():
    results, summary = made_up_study(("a", "b", "c", "d"), ("dino",))
    rows = {row["arm"]: row for row in tables.rows_of(summary, "kl")}
    rows["c"] |= {"diff": -0.1, "diff_low": -0.2, "diff_high": -0.05}
    rows["d"]["p_adjusted"] = 0.05  # its interval misses 0 all the same
    figure = plots.plot_differences(ReportContents(results, summary), "kl")
    (axes,) = figure.axes
    lines = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert {line.get_ydata()[0]: line.get_color() for line in lines} == {0: plots.ORANGE, 1: plots.BLUE, 2: plots.GREY}
    assert figure.get_supxlabel() == "← better    difference from a    worse →"


@pytest.mark.pictures
@cases(("values", "scale"), [([1, 2, 30], "log"), ([1, 2, 15], "linear"), ([0, 2, 30], "linear"), ([-1, 1, 50], "linear")])
def test_a_logarithmic_scale_is_for_what_a_linear_one_would_hide(values, scale):
    results, summary = made_up_study(("a",), ("x",), seeds=3)
    for run, value in zip(results, values, strict=True):
        run.results["kl"] = value
    figure = plots.plot_seeds(ReportContents(results, summary), "kl")
    assert figure.axes[0].get_yscale() == scale


@pytest.mark.pictures
def test_images_and_points_that_are_far_away(tmp_path):
    """A sample far away does not shrink the shape, nor does one on a line."""

    def change(run):
        buffer = io.BytesIO()
        Image.new("L", (20, 12), 100).save(buffer, format="PNG")
        points = np.array(run.samples["points"])
        points[0] = 1e9
        of_points = {"points": (points[:, :1] if run.dataset == "line" else points).tolist()}
        run.samples = {"png": base64.b64encode(buffer.getvalue()).decode()} if run.dataset == "digits" else of_points
        return run

    results, summary = made_up_study(("a", "b"), ("dino", "line", "digits"), change=change, seeds=1)
    plot = next(plot for plot in plots.plots_of(ReportContents(results, summary)) if plot.file == plots.SAMPLES)
    plots.save_plot(plot.make(), tmp_path / "samples.png")
    with Image.open(tmp_path / "samples.png") as grid:
        assert (100, 100, 100) in {color for _, color in grid.convert("RGB").getcolors(10**6)}
        assert (np.asarray(grid.convert("L").crop((0, 0, grid.width * 2 // 3, grid.height))) < 200).mean() > 0.01


def test_a_curve_is_the_mean_of_its_seeds_with_a_band_among_them():
    results, _ = made_up_study(("a",), ("dino",), seeds=7)
    curve = mean_curves(results, CURVE_KINDS[0])["a", "dino"]
    every = np.array([run.curves["loss"]["loss"] for run in results])
    chosen = np.searchsorted(UPDATES, curve.updates)
    np.testing.assert_allclose(curve.mean, every.mean(axis=0)[chosen], rtol=1e-12)
    assert len(curve.updates) == MOST_POINTS
    assert (curve.updates[[0, -1]] == UPDATES[[0, -1]]).all()
    assert len({(style.color, style.line) for style in styles([*map(str, range(20))], "3").values()}) == 20
    wide = curve.mean - every.std(axis=0, ddof=1)[chosen]
    np.testing.assert_allclose(curve.low, np.maximum(wide, every.min(axis=0)[chosen]), rtol=1e-12)
    short = results[1].curves["loss"]
    short.update({key: values[:100] for key, values in short.items()})  # as long as all of them last
    short["loss"][3] = None
    curve = mean_curves(results, CURVE_KINDS[0])["a", "dino"]
    assert curve.updates[-1] == UPDATES[99]
    assert np.isfinite(curve.mean).all()


# --- the whole report ------------------------------------------------------------------------------------------------


def test_a_name_is_never_markup(tmp_path):
    """Arms, data sets, descriptions, errors and commands are shown as they are, in every document and plot."""
    evil = "<script>alert(1)</script>&$x_1|`"
    arms, datasets = ("a", evil, "</script><img src=x onerror=alert(2)>"), ("dino", "<b>moons</b>$")

    def change(run):
        run.record["run"]["error"] = evil if run.seed == 4 else None
        run.status = "diverged" if run.seed == 4 else "finished"
        run.config["optimizer"] = evil
        return run

    results, summary = made_up_study(arms, datasets, title=evil, change=change, command=f"lrlab {evil}")
    summary["study"]["arms"][evil] |= {"description": evil, "controls": [arms[2]]}
    summary["study"]["meta"]["processor"] = evil
    page = page_of(tmp_path, results, summary)
    assert page.count("<script") == 1
    assert "<img src=x" not in page
    assert "<b>moons" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 20
    markdown = (tmp_path / "report/report.md").read_text(encoding="utf-8")
    assert "<script>" not in re.sub("## Command.*?\n## ", "", markdown, flags=re.DOTALL).replace(r"\<script\>", "")


def test_an_arm_that_diverged(tmp_path):
    """One arm has no figures at all, another has some; both are told, and no mean is of runs that diverged."""

    def change(run):
        if run.arm == "c" or (run.arm == "b" and run.seed == 1):
            run.status, run.results = "diverged", {}
            run.record["run"]["error"] = "The loss is not finite."
            run.record["train"]["updates_done"] = 123
            run.curves["loss"]["loss"] = [None] * len(UPDATES)
        return run

    results, summary = made_up_study(("a", "b", "c"), change=change)
    page = page_of(tmp_path, results, summary)
    shown = tables_of(page)
    rows = {(row[0], row[1]): row for row in shown[tables.metric_label("kl")][1:]}
    assert rows["dino", "c"][2:5] == ["diverged", "0 + 5 diverged", "–"]
    assert rows["dino", "b"][3] == "4 + 1 diverged"
    listed = shown["Runs that diverged"][1:]
    assert len(listed) == 4 * 6
    assert listed[0] == ["circle", "b", "comparison", "The loss is not finite.", "1", "0.0003", "123 of 10,000"]
    assert ("c", "dino") not in mean_curves(results, CURVE_KINDS[0])
    four = [run.curves["loss"]["loss"][-1] for run in results if (run.arm, run.dataset) == ("b", "dino") and run.seed != 1]
    assert mean_curves(results, CURVE_KINDS[0])["b", "dino"].mean[-1] == pytest.approx(np.mean(four))
    assert "24 of which diverged" in page


@cases("missing", [("dino", "c"), ("dino", "moons")])
def test_samples_curves_and_figures_may_be_absent(tmp_path, missing):
    def change(run):
        if run.dataset in missing or run.arm in missing:
            run.samples, run.curves, run.results = {}, {}, {}
        return run

    results, summary = made_up_study(("a", "b", "c"), ("dino", "moons"), change=change)
    page = page_of(tmp_path, results, summary)
    files = {path.name for path in (tmp_path / "report").glob("*.png")}
    expected = {"samples.png", "loss.png", "quality.png", "lr.png", "seeds_kl.png"}
    assert files >= expected if missing == ("dino", "c") else files == set()
    assert not {text for rows in tables_of(page).values() for row in rows for text in row} & {"nan", "NaN", "None"}


def test_one_seed_and_one_data_set_and_one_arm(tmp_path):
    page = page_of(tmp_path, *made_up_study(("a",), ("dino",), seeds=1))
    assert "1 arm on 1 data set with 1 seed each: 1 run, " in page
    assert "nan" not in page.partition("<script>")[0].lower()
    results, summary = made_up_study(("a", "b"), ("dino",), seeds=1)
    assert "No test was possible" in page_of(tmp_path, results, summary)
    summary["findings"]["kl"] = [verdict("cannot tell")]
    assert "No difference from a passed the adjusted test." in page_of(tmp_path, results, summary)


def test_what_a_study_has_besides(tmp_path, capsys):
    results, summary = made_up_study(("a", "b", "c"), ("dino",))
    tuning = made_up_run("a", "dino", 100)
    tuning.stage = "tune"
    summary["tuning"] = TUNING
    summary["study"]["arms"]["c"]["controls"] = ["b"]
    values = {arm: {"dino": {run.seed: run.results["kl"] for run in results if run.arm == arm}} for arm in ("b", "c")}
    summary["findings"]["kl"] += map(asdict, findings(compare(values, "b", "kl"), "b"))
    write_report(tmp_path, [*results, tuning], summary, StudyProgress())
    assert "report: 100%" in capsys.readouterr().err
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    shown = tables_of(page)
    assert shown["The learning rate of each arm"][1:] == [
        ["dino", "a", "", "0.0001", "0.5"],
        ["dino", "a", "chosen, at the edge of those tried", "0.001", "0.5"],
    ]
    assert [row[1] for row in shown["Cost"]] == ["runs", "6", "5", "5", "16"]
    seconds = sum(run.record["train"]["training_seconds"] for run in [*results, tuning])
    assert shown["Cost"][-1][2] == f"{seconds:,.1f}"
    means = [mean_curves(runs, CURVE_KINDS[0])["a", "dino"].mean for runs in (results, [*results, tuning])]
    np.testing.assert_array_equal(*means)
    for text in ("lrlab study run made-up --out there", "python 3.12.1, torch 2.13.0", "A processor", "stacked (16 runs)"):
        assert text in page
    told = [row[:5] for row in shown["All findings in numbers"]]
    assert [tables.metric_label("kl"), "c", "b", "dino", "worse"] in told
    assert "c against b: worse on dino." in page
    assert "Every arm is compared with a, seed by seed; some are also compared with controls of their own." in page
    assert "/somewhere" not in page
    assert "train_batch_size" in page


@pytest.mark.pictures
@pytest.mark.slow
def test_a_report_replaces_the_one_before(tmp_path):
    """With plots as files for a paper: the same bytes each time, and fonts that journals take."""
    results, summary = made_up_study(("a", "b"), ("dino", "moons"), seeds=2)
    once, again = ((page_of(tmp_path / name, results, summary), tmp_path / name / "report") for name in ("once", "again"))
    files = {file.relative_to(once[1]): file.read_bytes() for file in once[1].rglob("*") if file.is_file()}
    assert files == {file.relative_to(again[1]): file.read_bytes() for file in again[1].rglob("*") if file.is_file()}
    figures = {file.stem: file.read_bytes() for file in (once[1] / "figures").iterdir()}
    assert {*figures} == {file.stem for file in once[1].glob("*.png")}
    for content in figures.values():
        assert b"/FontFile2" in content
        assert b"/Subtype /Type3" not in content
    assert "seeds_coverage" in figures
    for run in results:
        del run.results["coverage"]
    page_of(tmp_path / "once", results, summary_of(results, ["a", "b"], "a"))
    assert not list(once[1].rglob("seeds_coverage.*"))


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    results, summary = made_up_study(("a", "<b onclick=x>b</b>", "%{x}c"), ("dino", "moons"), seeds=3)
    summary["tuning"] = TUNING
    return write_report(tmp_path_factory.mktemp("browser"), results, summary)


@pytest.mark.pictures
@pytest.mark.slow
def test_the_page_is_in_order_without_a_browser(index, tmp_path):
    assert mistakes(index) == []
    assert index.stat().st_size < 1.5e6
    text = index.read_text(encoding="utf-8")
    wrong = text.replace('lang="en"', "").replace("<h2", "<h4", 1).replace('alt="', 'alt="" data-alt="', 1)
    (tmp_path / "index.html").write_text(wrong, encoding="utf-8")
    assert len(mistakes(tmp_path / "index.html")) == 3


@pytest.mark.pictures
@pytest.mark.slow
@needs_chromium
def test_the_page_opens_from_disk_without_network_runs_no_other_script_and_sorts_its_tables(browser, index):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(index)
    assert browser.page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert browser.page.evaluate("document.images.length") > 6
    assert all(address.startswith(("file:", "data:")) for address in browser.requests)
    assert browser.errors == []
    assert browser.page.evaluate("document.querySelectorAll('[onclick]').length") == 0
    own = "Object.assign(document.createElement('script'), {textContent: 'window.isOther = true'})"
    browser.page.evaluate(f"document.body.append({own}); 0")
    assert browser.page.evaluate("window.isOther") is None
    assert "Content Security Policy" in " ".join(browser.errors)
    browser.errors.clear()
    # Tables are sorted by a click.
    table = "document.querySelector('#summary ~ .scroll table')"
    heading = f"[...{table}.tHead.rows[0].cells].at(-1)"
    column = f"[...{table}.tBodies[0].rows].map(row => parseFloat(row.cells[row.cells.length - 1].textContent))"
    for order, expected in (("ascending", sorted), ("descending", lambda found: sorted(found, reverse=True))):
        browser.page.evaluate(f"{heading}.querySelector('button').click()")
        assert browser.page.evaluate(f"{heading}.ariaSort") == order
        found = [value for value in browser.page.evaluate(column) if not math.isnan(value)]
        assert found == expected(found)


@pytest.mark.pictures
@pytest.mark.slow
@needs_chromium
def test_the_page_can_be_read_by_everybody_at_any_width(browser, index):
    """Contrast, texts of pictures, headings and language by the rules of axe-core, with everything unfolded."""
    found = {}
    for scheme, width in (("light", 390), ("dark", 1200)):
        browser.page.emulate_media(color_scheme=scheme)
        browser.open(index, width, 844, mobile=width < 1000)
        browser.page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        found[scheme] = browser.violations()
        assert browser.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    browser.page.emulate_media(color_scheme="no-preference")
    assert found == {"light": [], "dark": []}
