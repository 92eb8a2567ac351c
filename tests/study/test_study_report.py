"""The report of a study: its tables, pictures and page, from made-up runs."""

import base64
import csv
import io
import itertools
import math
import re
import time
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from chromium import needs_axe, needs_chromium
from html_checks import mistakes
from made_up_studies import PAPER_ARMS, PAPER_DATASETS, UPDATES, made_up_run, made_up_study, summary_of
from PIL import Image
from tables import rows

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.project import CITATION
from diffusers_lrlab.study.analysis.falling import STILL_FALLING, has_end, still_falling
from diffusers_lrlab.study.analysis.figures import percent, probability
from diffusers_lrlab.study.analysis.findings import findings, speedup_findings
from diffusers_lrlab.study.analysis.statistics import compare
from diffusers_lrlab.study.analysis.verdicts import Verdict, word_of
from diffusers_lrlab.study.report import plots, report, sample_grid, tables
from diffusers_lrlab.study.report.answers import Answer
from diffusers_lrlab.study.report.contents import ReportContents
from diffusers_lrlab.study.report.curves import CURVE_KINDS, MOST_POINTS, mean_curves, spans_decades, styles
from diffusers_lrlab.study.report.formats import (
    Table,
    interval,
    number,
    plus_minus,
    to_latex,
    to_markdown,
)
from diffusers_lrlab.study.report.limitations import limitations
from diffusers_lrlab.study.report.report import write_report
from diffusers_lrlab.study.runs.progress import StudyProgress

pytestmark = pytest.mark.pictures

SPEEDUPS = [
    {"arm": "a", "dataset": "dino", "n": 5, "censored": 0, "ends_worse": 0, "updates_needed": 9000.0, "speedup": None,
     "ci_low": None, "ci_high": None, "p": None, "p_adjusted": None},
    {"arm": "b", "dataset": "dino", "n": 5, "censored": 2, "ends_worse": 3, "updates_needed": None, "speedup": 0.8123,
     "ci_low": 0.7, "ci_high": 0.9, "p": 0.01, "p_adjusted": 0.0213},
]  # fmt: skip
TUNING = [
    {"arm": "a", "dataset": "dino", "learning_rate": rate, "score": 0.5, "chosen": rate == 1e-3, "at_edge": rate == 1e-3}
    for rate in (1e-4, 1e-3)
]


class Tables(HTMLParser):
    """Texts of the cells of every table, by the label of the box around it."""

    def __init__(self, text):
        super().__init__()
        self.found, self._rows, self._in_cell = {}, None, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "div" and attributes.get("class") == "scroll":
            self._rows = self.found.setdefault(attributes["aria-label"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("th", "td")

    def handle_data(self, text):
        if self._in_cell:
            self._rows[-1][-1] += text


def verdict(word, sentence, arm="b", reference="a", p=0.5):
    """A made-up verdict, as a summary has it."""
    return asdict(Verdict(arm, reference, "dino", "kl", None, None, None, p, word, sentence))


def page_of(tmp_path, results, summary):
    index = write_report(tmp_path, results, summary)
    assert index == tmp_path / "report" / "index.html"
    return index.read_text(encoding="utf-8")


@pytest.fixture
def undrawn(monkeypatch):
    """Saves time where it is words that matter."""
    monkeypatch.setattr(plots, "save_plot", lambda figure, path: path.write_bytes(b"a picture"))
    monkeypatch.setattr(plots, "as_svg", lambda figure: b"a picture")


@pytest.fixture
def only_samples_drawn(monkeypatch):
    save = plots.save_plot

    def save_samples(figure, path):
        save(figure, path) if path.name == "samples.png" else path.write_bytes(b"a picture")

    monkeypatch.setattr(plots, "save_plot", save_samples)
    monkeypatch.setattr(plots, "as_svg", lambda figure: b"a picture")


def number_of(text):
    return float(text.replace("−", "-").replace(",", ""))


@pytest.mark.parametrize(("num_arms", "told"), [(24, ""), (30, "the first 24 of 30 arms")])
def test_samples_that_are_left_out_are_told(num_arms, told):
    arms = [f"arm {number}" for number in range(num_arms)]
    points = SimpleNamespace(samples={"points": [[0.0, 1.0], [1.0, 0.0]]})
    figure = sample_grid.plot_sample_grid({(arm, "dino"): points for arm in arms}, ["dino"], styles(arms, arms[0]))
    assert figure.get_supxlabel() == told
    assert len(figure.axes) == 24


# --- tables ----------------------------------------------------------------------------------------------------------


@rows(
    ("mean", "std", "expected"),
    [
        (0.36412, 0.00456, "0.3641 ± 0.0046"),
        (0.36412, None, "0.3641"),
        (0.36412, 0.0, "0.3641"),
        (127.74, 12.3, "128 ± 12"),
        (-1.5, 0.25, "−1.50 ± 0.25"),
        (1234567.0, 100.0, "1.235e+06 ± 1e+02"),
        (0.5, 1e-9, "0.5 ± 1e−09"),
        (None, None, "–"),
        (math.inf, 1.0, "–"),
    ],
)
def test_means_are_told_as_precisely_as_they_are_known(mean, std, expected):
    assert plus_minus(mean, std) == expected


def test_numbers_for_people():
    assert [number(value) for value in (None, math.nan, 0, -0.12345, 1e-7)] == ["–", "–", "0", "−0.1235", "1e−07"]
    assert [probability(value) for value in (None, 0.0004, 0.04999, 0.05, 1)] == ["–", "< 0.001", "< 0.05", "0.050", "1.000"]
    assert [percent(value) for value in (0.1234, -0.005, 1.5, 0.0)] == ["12 %", "−0.50 %", "150 %", "0 %"]
    assert interval(None, 1) == "–"
    assert interval(-0.1234, 0.5678) == "−0.12 to 0.57"
    assert interval(2, 2) == "2 to 2"


def test_markdown_and_latex_show_texts_as_they_are():
    frame = pd.DataFrame([["x & y", "1 ± 2"], ["<i>", "$3 %"]], columns=["a|b", "c_d"])
    table = Table("t", "T", frame, "100 %", 1, frozenset({(0, 1)}))
    assert to_markdown(table).splitlines() == [
        r"| a\|b | c\_d |",
        "|---|---:|",
        r"| x \& y | **1 ± 2** |",
        r"| \<i\> | \$3 % |",
        "",
        "100 %",
    ]
    lines = to_latex(table).splitlines()
    assert r"x \& y & \textbf{1 $\pm$ 2} \\" in lines
    assert r"$<$i$>$ & \$3 \% \\" in lines
    assert r"a|b & c\_d \\" in lines


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_summary_is_in_all_three_forms(tmp_path):
    """Numbers of the page are those of the summary, arm by arm and data set by data set."""
    results, summary = made_up_study()
    page = page_of(tmp_path, results, summary)
    shown = Tables(page).found
    for metric in ("kl", "training_set_loss", "coverage"):
        head, *rows = shown[tables.metric_label(metric)]
        place = {name: column for column, name in enumerate(head)}
        expected = tables.rows_of(summary, metric)
        assert [(row[0], row[1]) for row in rows] == [(row["dataset"], row["arm"]) for row in expected]
        assert [row[:2] for row in rows] == [[dataset, arm] for dataset in PAPER_DATASETS for arm in PAPER_ARMS]
        for cells, row in zip(rows, expected, strict=True):
            mean, std = map(number_of, cells[place["mean ± std"]].split(" ± "))
            assert mean == pytest.approx(row["mean"], abs=0.06 * row["std"])
            assert std == pytest.approx(row["std"], rel=0.06)
            if row["arm"] != "constant":
                assert number_of(cells[place["difference"]]) == pytest.approx(row["diff"], rel=1e-3)
                assert cells[place["adjusted p"]] == probability(row["p_adjusted"])
                needed = "/".join(cells[place["seeds to see 1 / 5 / 10 %"]].replace(",", "").split(" / "))
                assert needed == "/".join("–" if n is None else str(n) for n in row["seeds_needed"].values())
        table = tables.summary_table(summary, metric)
        assert to_latex(table) == (tmp_path / "report/tables" / f"summary_{metric}.tex").read_text(encoding="utf-8")
        assert to_markdown(table) in (tmp_path / "report/report.md").read_text(encoding="utf-8")
    for file in (tmp_path / "report/tables").glob(
        "*.tex"
    ):  # LaTeX has no glyph for what is not ASCII; in comments it may be
        assert all(line.isascii() for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("%"))


@rows(
    ("metric", "diff", "p", "expected"),
    [
        ("kl", 0.1, 0.049, "worse"),
        ("kl", -0.1, 0.049, "better"),
        ("kl", -0.1, 0.05, "cannot tell"),
        ("coverage", 0.1, 0.01, "better"),
        ("coverage", -0.1, 0.01, "worse"),
        ("kl", 0.0, None, None),
    ],
)
def test_verdicts_are_those_of_the_adjusted_test(metric, diff, p, expected):
    row = {"arm": "b", "metric": metric, "mean": 1.0, "diff": diff, "p": 1e-9, "p_adjusted": p, "diverged": 0}
    assert word_of(row) == expected


@pytest.mark.usefixtures("undrawn")
def test_verdicts_and_findings_agree(tmp_path):
    results, summary = made_up_study(arms=("a", "b", "c"), seeds=3)
    shown = Tables(page_of(tmp_path, results, summary)).found
    for metric, verdicts in summary["findings"].items():
        words = {(found["dataset"], found["arm"]): found["word"] for found in verdicts}
        for dataset, arm, said, *_ in shown[tables.metric_label(metric)][1:]:
            assert said == words.get((dataset, arm), "baseline")


@pytest.mark.usefixtures("undrawn")
def test_findings_that_a_test_carries_come_first_in_a_table_that_is_folded(tmp_path):
    results, summary = made_up_study(arms=("a", "b"), datasets=("dino",))
    alike = verdict("cannot tell", "b is better than a does not differ significantly from a on dino.")
    summary["findings"] = {"kl": [alike, verdict("better", "b is better than a on dino: so.")]}
    page = page_of(tmp_path, results, summary)
    assert [row[1:] for row in Tables(page).found["All findings in numbers"][1:]] == [
        ["a difference", "b is better than a on dino: so."],
        ["no difference", "b is better than a does not differ significantly from a on dino."],
    ]
    assert page.index("<details>", page.index('id="findings"')) < page.index("b is better than a on dino: so.")
    summary["findings"]["kl"] = [alike]
    assert "No difference from a passed the adjusted test." in page_of(tmp_path, results, summary)


# --- what it begins with ---------------------------------------------------------------------------------------------


@rows(
    ("verdicts", "expected"),
    [
        ({"dino": "better"}, "b is better than a on dino."),
        ({"dino": "worse", "moons": "worse"}, "b is worse than a on both data sets."),
        (dict.fromkeys("wxyz", "better"), "b is better than a on all 4 data sets."),
        (
            {"dino": "cannot tell", "line": "worse", "moons": "better"},
            "b is better than a on moons, and worse on line; the test shows no difference between b and a on dino.",
        ),
        (
            dict.fromkeys("tuvwx", "cannot tell") | {"z": "diverged"},
            "The test shows no difference between b and a on 5 of 6 data sets; every run of b diverged on z.",
        ),
        (
            {"dino": "faster", "moons": "never as good"},
            "b is faster than a on dino; b never reached the final quality of a on moons.",
        ),
        ({"dino": None, "moons": "lower"}, "b is lower than a on moons; no test of b against a was possible on dino."),
    ],
)
def test_an_answer_is_a_sentence(verdicts, expected):
    assert Answer("b", "a", verdicts).sentence == expected


def test_an_answer_begins_with_a_capital_whatever_the_arm_is_called():
    assert Answer("the", "a", {"dino": "cannot tell"}).sentence == (
        "The test shows no difference between the and a on dino."
    )


@pytest.mark.usefixtures("undrawn")
def test_page_and_markdown_begin_with_answers_a_picture_and_warnings(tmp_path):
    results, summary = made_up_study(("a", "b"), ("dino", "moons"), seeds=3)
    summary["study"]["arms"]["b"]["lr_scheduler"] = "cosine"
    summary["speedups"] = SPEEDUPS
    summary["findings"]["speedup"] = list(map(asdict, speedup_findings(SPEEDUPS, "a")))
    page = page_of(tmp_path, results, summary)
    markdown = (tmp_path / "report" / "report.md").read_text()
    for text, image in ((page[: page.index("<nav")], "<img"), (markdown[: markdown.index("| data set")], "![")):
        found = [
            text.index(part)
            for part in (
                "Smaller is better. Differences are from a; above 0, the arm is worse.",
                "b is worse than a on both data sets.",
                image,
            )
        ]
        assert found == sorted(found)
        for part in (
            "b is slower than a on dino.",
            "Coverage: b is worse than a on both data sets.",
            "There are few seeds: 3 seeds can only show large differences.",
            "Learning rates were not tuned",
        ):
            assert part in text
    assert "differences.png" in markdown


@pytest.mark.usefixtures("undrawn")
def test_page_and_markdown_end_with_the_entry_to_cite(tmp_path):
    results, summary = made_up_study(("a", "b"), ("dino",), seeds=2)
    page = page_of(tmp_path, results, summary)
    assert CITATION in page[page.index("Reproduction</h2>") :]
    assert (tmp_path / "report" / "report.md").read_text().endswith(f"## Citation\n\n```bibtex\n{CITATION}\n```\n")


def test_a_limitation_of_one_seed_is_that_it_shows_nothing():
    (found,) = [text for text in limitations(*made_up_study(("a", "b"), ("dino",), seeds=1)) if "seed" in text]
    assert found == "There are few seeds: one seed shows no differences. Give 5 or more."


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_of_many_arms_ten_have_a_sentence_and_all_are_in_a_table(tmp_path):
    results, summary = made_up_study([f"arm{place}" for place in range(14)], ("dino",))
    page = page_of(tmp_path, results, summary)
    beginning = page[: page.index("<nav")]
    assert len(re.findall(r"<li>arm\d+ is worse than arm0 on dino.</li>", beginning)) == 10
    rows = Tables(page).found["Verdicts on all arms"]
    assert rows == [["arm", "compared with", "dino"], *([f"arm{place}", "arm0", "worse"] for place in range(1, 14))]
    assert r"| arm13 | arm0 | worse |" in (tmp_path / "report" / "report.md").read_text()


def test_a_difference_is_coloured_only_where_the_test_says_so():
    _, summary = made_up_study(("a", "b", "c", "d"), ("dino",))
    rows = {row["arm"]: row for row in tables.rows_of(summary, "kl")}
    rows["c"] |= {"diff": -0.1, "diff_low": -0.2, "diff_high": -0.05}
    rows["d"]["p_adjusted"] = 0.05  # its interval misses 0 all the same
    figure = plots.plot_differences([rows[arm] for arm in "bcd"], ["dino"], ["b", "c", "d"], "a")
    (axes,) = figure.axes
    points = {
        line.get_ydata()[0]: line.get_color() for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())
    }
    assert points == {0: plots.ORANGE, 1: plots.BLUE, 2: plots.GREY}
    assert figure.get_supxlabel() == "← better    difference from a    worse →"


@pytest.mark.parametrize(("width", "columns"), [(5.5, 3), (3.25, 2), (2.0, 1)])
def test_a_legend_takes_as_few_rows_as_its_words_allow(width, columns):
    """Its longest entry does not decide alone; none may lie outside."""
    _, summary = made_up_study(("a", "b"), ("dino",))
    figure = plots.plot_differences(tables.rows_of(summary, "kl")[1:], ["dino"], ["b"], "a", width)
    (legend,) = figure.legends
    assert legend._ncols == columns
    figure.canvas.draw()
    if width > 2:
        assert legend.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    "names",
    [
        ["adamw", "sgd", "rmsprop", "adafactor", "muon"],
        ["a name of about thirty letters", "b", "c", "d"],
        ["cosine: 3,750 updates for all"] * 3,
    ],
    ids=["short", "long", "of equal length"],
)
@pytest.mark.parametrize("width", [None, 3.25])
def test_no_legend_lies_outside(names, width):
    figure, (axes,) = plots.panels_for(["dino"], 2.4, width)
    plots.add_legend(figure, [axes.plot([], [], label=name)[0] for name in names])
    figure.canvas.draw()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(("arms", "rotation"), [(("cosine", "linear", "wsd"), 0), (("a-long-name", *"abcdefgh"), 40)])
def test_names_below_a_plot_are_turned_only_where_they_would_touch(arms, rotation):
    results, summary = made_up_study(arms, ("dino",), seeds=2)
    contents = ReportContents(results, summary)
    figure = plots.plot_seeds(contents.values["kl"], tables.rows_of(summary, "kl"), ["dino"], contents.styles, "KL", 3.25)
    figure.canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    assert {label.get_rotation() for label in labels} == {rotation}
    if not rotation:
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def falling_by(share, points=200, noise=0.0, fall=1.0):
    """A curve with this fall in all, of which this share is in its last fifth."""
    updates = np.arange(1, points + 1) * 10.0
    values = fall * np.interp(updates, [10, 8 * points, 10 * points], [1, share, 0])
    return updates, values + noise * np.random.default_rng(0).normal(size=points)


@rows(
    ("curve", "expected"),
    [
        (falling_by(2 * STILL_FALLING), True),
        (falling_by(4 * STILL_FALLING, 20), True),
        (falling_by(2 * STILL_FALLING, noise=0.01), True),
        (falling_by(2 * STILL_FALLING, fall=0.01), True),
        (falling_by(0.5 * STILL_FALLING), False),
        (falling_by(0.5 * STILL_FALLING, fall=100.0), False),
        (falling_by(0.0, noise=0.05), False),
        (falling_by(0.5 * STILL_FALLING, noise=0.3), False),  # all that it does is scatter
        ((np.arange(200.0), np.ones(200)), False),
        ((np.arange(200.0), np.linspace(0, 1, 200)), False),  # it rises
    ],
)
def test_a_curve_that_is_still_falling(curve, expected):
    assert has_end(curve[0])
    assert still_falling(*curve) is expected


def test_a_curve_of_few_points_has_no_end():
    assert not has_end(np.array([]))
    assert not has_end(np.array([10.0, 20.0, 30.0]))


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
    assert edge == (
        "1 of 1 chosen learning rate is the lowest or the highest of those tried (a on dino): a rate beyond those may be "
        "better."
    )


@pytest.mark.usefixtures("undrawn")
def test_the_writing_of_a_report_is_shown_on_stderr(tmp_path, capsys):
    results, summary = made_up_study(("a", "b"), ("dino",))
    write_report(tmp_path, results, summary, StudyProgress())
    shown = capsys.readouterr()
    assert "report: 100%" in shown.err
    assert shown.out == ""
    write_report(tmp_path, results, summary)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("undrawn")
def test_what_pictures_show_is_beside_them_as_data(tmp_path):
    results, summary = made_up_study(("a", "b"), ("dino",))
    page_of(tmp_path, results, summary)
    with (tmp_path / "report" / "seeds.csv").open(newline="") as file:
        values = {(row["arm"], row["seed"]): float(row["value"]) for row in csv.DictReader(file) if row["metric"] == "kl"}
    assert values == pytest.approx({(run.arm, str(run.seed)): run.results["kl"] for run in results}, rel=1e-8)
    with (tmp_path / "report" / "curves.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["curve"], row["arm"]) == ("loss", "b")]
    course = mean_curves(results, CURVE_KINDS[0])["b", "dino"]
    assert [float(row["update"]) for row in rows] == course.updates.tolist()
    assert [float(row["mean"]) for row in rows] == pytest.approx(course.mean, rel=1e-5)


# --- studies that lack something -------------------------------------------------------------------------------------


@pytest.mark.slow
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
    summary["study"]["arms"][evil]["description"] = evil
    summary |= {"speedups": [row | {"arm": evil} for row in SPEEDUPS]}
    summary["study"]["arms"][evil]["controls"] = [arms[2]]
    summary["controls"] = {"kl": [{**row, "control": arms[2]} for row in summary["rows"] if row["metric"] == "kl"]}
    summary["controls"]["speedup"] = [row | {"arm": evil, "control": arms[2]} for row in SPEEDUPS]
    summary["study"]["meta"]["processor"] = evil
    page = page_of(tmp_path, results, summary)
    own = Path(report.__file__).with_name("sort.js").read_text(encoding="utf-8")
    assert "<script" not in page.replace(f"<script>{own}</script>", "")
    assert "<img src=x" not in page
    assert "<b>moons" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 20
    markdown = (tmp_path / "report/report.md").read_text(encoding="utf-8")
    assert "<script>" not in markdown.split("## Command")[0].replace(r"\<script\>", "")
    for path in (tmp_path / "report/tables").iterdir():
        assert not re.search(r"(?<!\\)\$x_1", path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_losses_of_different_objectives_are_not_compared(tmp_path):
    def change(run):
        run.config["objective"] = "flow_matching" if run.arm == "b" else "ddpm"
        return run

    results, summary = made_up_study(("a", "b"), ("dino",), change=change)
    sentence = "Losses of ddpm and flow_matching are different quantities: compare their curves within an objective only."
    assert sentence in limitations(results, summary)
    page = write_report(tmp_path, results, summary).read_text(encoding="utf-8")
    assert page.count(sentence) == 3  # the limitation, and the plots of training and held-out loss


def test_plug_ins_that_changed_between_runs_are_a_warning():
    """The names of results are those of before, so they would be taken for results of the code of now."""
    results, summary = made_up_study(("a", "b"), ("dino",))
    before = limitations(results, summary)
    for place, run in enumerate(results):
        run.record["meta"] = {"plugins": [{"name": "/home/me/mine.py", "sha256": str(place % 2)}]}
    (warning,) = [text for text in limitations(results, summary) if text not in before]
    assert warning.startswith("The code of mine.py changed between runs")
    for run in results:
        run.record["meta"]["plugins"][0]["sha256"] = "0"
    assert limitations(results, summary) == before


def test_plug_ins_are_named_where_there_are_some():
    results, summary = made_up_study()
    summary["study"]["meta"]["plugins"] = []
    assert "plugins" not in dict(ReportContents(results, summary).facts())
    summary["study"]["meta"]["plugins"] = [{"name": "/home/me/mine.py", "sha256": "0"}, {"name": "theirs", "sha256": "1"}]
    assert dict(ReportContents(results, summary).facts())["plugins"] == "mine.py, theirs"


@pytest.mark.usefixtures("undrawn")
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
    shown = Tables(page).found
    rows = {(row[0], row[1]): row for row in shown[tables.metric_label("kl")][1:]}
    assert rows["dino", "c"][2:5] == ["diverged", "0 + 5 diverged", "–"]
    assert rows["dino", "b"][3] == "4 + 1 diverged"
    listed = shown["Runs that diverged"][1:]
    assert len(listed) == 4 * 6
    assert listed[0] == ["circle", "b", "comparison", "The loss is not finite.", "1", "0.0003", "123 of 10,000"]
    assert ("c", "dino") not in mean_curves(results, CURVE_KINDS[0])
    assert mean_curves(results, CURVE_KINDS[0])["b", "dino"].num_runs == 4
    assert "24 of which diverged" in page


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("missing", [("dino", "c"), ("dino", "moons")])
def test_samples_curves_and_figures_may_be_absent(tmp_path, missing):
    def change(run):
        if run.dataset in missing or run.arm in missing:
            run.samples, run.curves, run.results = {}, {}, {}
        return run

    results, summary = made_up_study(("a", "b", "c"), ("dino", "moons"), change=change)
    page = page_of(tmp_path, results, summary)
    files = {path.name for path in (tmp_path / "report").glob("*.png")}
    if missing == ("dino", "c"):
        assert {"samples.png", "loss.png", "quality.png", "lr.png", "seeds_kl.png"} <= files
    else:
        assert files == set()
    assert not {text for rows in Tables(page).found.values() for row in rows for text in row} & {"nan", "NaN", "None"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("seeds", "said"), [(1, "No test was possible"), (3, "No difference from a passed the adjusted test.")]
)
def test_what_stands_where_nothing_was_told(tmp_path, seeds, said):
    results, summary = made_up_study(("a", "b"), ("dino",), seeds=seeds)
    for found in itertools.chain(*summary["findings"].values()):
        found |= {"p": None, "word": None} if found["p"] is None else {"p": 1.0, "word": "cannot tell"}
    assert said in page_of(tmp_path, results, summary)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_friedmans_p_stands_under_the_ranks(tmp_path):
    results, summary = made_up_study()
    assert "Friedman&#39;s test that all arms are alike: p " in page_of(tmp_path, results, summary)


@pytest.mark.usefixtures("undrawn")
def test_one_seed_and_one_data_set_and_one_arm(tmp_path):
    results, summary = made_up_study(("a",), ("dino",), seeds=1)
    page = page_of(tmp_path, results, summary)
    assert "1 arm on 1 data set with 1 seed each: 1 run, " in page
    text, _, _ = page.partition("<script>")  # what is read
    assert "nan" not in text.lower().replace("nanosecond", "")
    assert "ranks_kl.png" not in page
    results, summary = made_up_study(("a", "b"), ("dino",), seeds=1)
    rows = Tables(page_of(tmp_path, results, summary)).found[tables.metric_label("kl")][1:]
    assert [row[2] for row in rows] == ["baseline", "–"]


@pytest.mark.usefixtures("only_samples_drawn")
def test_images_instead_of_points(tmp_path):
    def change(run):
        buffer = io.BytesIO()
        Image.new("L", (20, 12), 100).save(buffer, format="PNG")
        run.samples = {"png": base64.b64encode(buffer.getvalue()).decode()}
        return run

    results, summary = made_up_study(("a", "b"), ("digits",), change=change)
    page_of(tmp_path, results, summary)
    with Image.open(tmp_path / "report" / "samples.png") as grid:
        assert (100, 100, 100) in {color for _, color in grid.convert("RGB").getcolors(10**6)}


@pytest.mark.slow
@pytest.mark.usefixtures("only_samples_drawn")
def test_points_on_a_line_and_points_far_away(tmp_path):
    def change(run):
        points = np.array(run.samples["points"])
        points[0] = 1e9
        run.samples = {"points": (points[:, :1] if run.dataset == "line" else points).tolist()}
        return run

    results, summary = made_up_study(("a", "b"), ("dino", "line"), change=change)
    page_of(tmp_path, results, summary)
    with Image.open(tmp_path / "report" / "samples.png") as grid:
        dark = np.asarray(grid.convert("L")) < 200
        assert dark.mean() > 0.01  # the shape fills its panel in spite of the one far away


@pytest.mark.usefixtures("undrawn")
def test_what_a_study_has_besides(tmp_path):
    results, summary = made_up_study(("a", "b"), ("dino",))
    tuning = made_up_run("a", "dino", 100)
    tuning.stage = "tune"
    summary |= {"speedups": SPEEDUPS, "tuning": TUNING}
    never = "b never reached the final quality of a on dino, in 5 runs."
    summary["findings"]["speedup"] = [verdict("never as good", never, p=None)]
    page = page_of(tmp_path, [*results, tuning], summary)
    shown = Tables(page).found
    assert shown["Speed-ups"][1:] == [
        ["dino", "a", "5", "0", "0", "9000", "–", "–", "–"],
        ["dino", "b", "5", "2", "3", "–", "≤ 0.8123", "–", "0.021"],
    ]
    assert shown["The learning rate of each arm"][1:] == [
        ["dino", "a", "", "0.0001", "0.5"],
        ["dino", "a", "chosen, at the edge of those tried", "0.001", "0.5"],
    ]
    runs = [row[1] for row in shown["Cost"]]
    assert runs == ["runs", "6", "5", "11"]
    seconds = sum(run.record["train"]["training_seconds"] for run in [*results, tuning])
    assert shown["Cost"][-1][2] == f"{seconds:,.1f}"
    assert mean_curves([*results, tuning], CURVE_KINDS[0])["a", "dino"].num_runs == 5
    for text in ("lrlab study run made-up --out there", "python 3.12.1, torch 2.13.0", "A processor", "stacked (11 runs)"):
        assert text in page
    assert ["Speed-ups", "a difference", never] in shown["All findings in numbers"]
    assert "/somewhere" not in page
    assert "train_batch_size" in page


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("p", "said"), [(1.0, "No difference from a passed the adjusted test."), (None, "No test was possible")]
)
def test_speedups_that_are_not_told(tmp_path, p, said):
    """Their tests are in rows of their own."""
    results, summary = made_up_study(("a", "b"), ("dino",))
    rows = [{**row, "p_adjusted": p if row["arm"] == "b" else None} for row in SPEEDUPS]
    summary |= {"speedups": rows}
    summary["findings"]["speedup"] = list(map(asdict, speedup_findings(rows, "a")))
    write_report(tmp_path, results, summary)
    _, found, section = (tmp_path / "report" / "report.md").read_text().partition("## What the tests show: Speed-ups")
    assert found
    assert f"\n- {said}" in section.partition("##")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_arms_beside_their_controls(tmp_path):
    results, summary = made_up_study(("a", "b", "c"), ("dino",))
    summary["study"]["arms"]["c"]["controls"] = ["b"]
    values = {arm: {"dino": {run.seed: run.results["kl"] for run in results if run.arm == arm}} for arm in ("b", "c")}
    rows = compare(values, "b", "kl", num_resamples=0)
    own = {**rows[1], "control": "b"}
    assert own["p_adjusted"] < 0.05
    summary["controls"] = {"kl": [own], "speedup": [{**SPEEDUPS[1], "arm": "c", "control": "b"}]}
    summary["findings"]["kl"] += map(asdict, findings(rows, "kl", "b"))
    shown = Tables(page_of(tmp_path, results, summary)).found
    label = "KL(data ‖ samples) by 5th neighbours, bits"
    p = probability(own["p_adjusted"])
    assert shown["Comparisons with controls"][1:] == [
        ["dino", "c", "b", label, "worse", "5", number(own["diff"]), interval(own["diff_low"], own["diff_high"]), p]
    ]
    assert shown["Speed-ups over controls"][1:] == [["dino", "c", "b", "5", "2", "3", "–", "≤ 0.8123", "–", "0.021"]]
    text = (tmp_path / "report" / "report.md").read_text()
    told, _, _ = text.partition("<details>")
    assert "c is worse than b on dino." in told
    assert "c is worse than b on dino in kl" in text
    assert "Every arm is compared with a, seed by seed; some are also compared with controls of their own." in text
    alike = "c does not differ significantly from b on dino."
    summary["findings"] = {"kl": [verdict("cannot tell", alike, arm="c", reference="b")]}
    page_of(tmp_path, results, summary)
    assert "No difference from a or from a control passed the adjusted test." in (tmp_path / "report/report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_report_replaces_the_one_before(tmp_path):
    results, summary = made_up_study(("a", "b", "c"), ("dino", "moons"))
    page = page_of(tmp_path, results, summary)
    assert page_of(tmp_path, results, summary) == page  # nothing in it depends on when it was made
    assert (tmp_path / "report/ranks_coverage.png").exists()
    for run in results:
        del run.results["coverage"]
    page_of(tmp_path, results, summary_of(results, ["a", "b", "c"], "a"))
    assert not (tmp_path / "report/ranks_coverage.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report"]


# --- curves ----------------------------------------------------------------------------------------------------------


def inches_of(path):
    """The width of a figure that was saved with 100 dots per inch, in inches."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            assert image.info["dpi"] == pytest.approx((100, 100), abs=0.01)
            return image.width / 100
    text = path.read_bytes().decode("latin-1")
    pattern = r"/MediaBox \[ 0 0 ([\d.]+)" if path.suffix == ".pdf" else r'<svg [^>]*width="([\d.]+)pt"'
    return float(re.search(pattern, text)[1]) / 72


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pdf", "png", "svg"])
def test_figures_for_a_paper_are_beside_the_report(tmp_path, form):
    results, summary = made_up_study(("a", "b"), ("dino", "moons"), seeds=2)
    for result in results:
        result.results = {"kl": result.results["kl"]}
    summary = summary_of(results, ["a", "b"], "a")
    write_report(tmp_path / "plain", results, summary)
    for name in ("once", "again"):
        write_report(tmp_path / name, results, summary, None, plots.Figures(form, 5.5, 100))
    first, again = (tmp_path / name / "report" / "figures" for name in ("once", "again"))
    plain = {file.name: file.read_bytes() for file in (tmp_path / "plain" / "report").iterdir() if file.is_file()}
    beside = {file.name: file.read_bytes() for file in (tmp_path / "once" / "report").iterdir() if file.is_file()}
    assert beside == plain  # nothing else has changed
    pictures = {Path(name).stem for name in plain if name.endswith(".png")}
    assert {file.name for file in first.iterdir()} == {f"{name}.{form}" for name in pictures}
    for file in first.iterdir():
        assert inches_of(file) == pytest.approx(5.5, abs=0.02), file.name
        assert file.read_bytes() == (again / file.name).read_bytes()
        if form == "pdf":
            assert b"/FontFile2" in file.read_bytes(), file.name
            assert b"/Subtype /Type3" not in file.read_bytes()
    write_report(tmp_path / "once", results, summary)
    assert not first.exists()


@rows("figures, expected", [
    (("pfd",), "--figures 'pfd': must be one of pdf, png, svg, got 'pfd'. Hint: Did you mean 'pdf'"),
    (("pdf", 0.5), "--figure_width 0.5: must be a number in [2, 40], got 0.5. Hint: it is in inches"),
    (("png", None, 10), "--dpi 10: must be a number in [50, 1200]"),
    (("pdf", float("nan")), "--figure_width nan: must be"),
])  # fmt: skip
def test_figures_that_are_not_allowed(figures, expected):
    with pytest.raises(LabError, match=re.escape(expected)):
        plots.check_figures(plots.Figures(*figures))


def test_a_course_is_the_mean_of_its_seeds_with_a_band_among_them():
    results, _ = made_up_study(("a",), ("dino",), seeds=7)
    course = mean_curves(results, CURVE_KINDS[0])["a", "dino"]
    every = np.array([run.curves["loss"]["loss"] for run in results])
    chosen = np.searchsorted(UPDATES, course.updates)
    np.testing.assert_allclose(course.mean, every.mean(axis=0)[chosen], rtol=1e-12)
    assert len(course.updates) == MOST_POINTS
    assert (course.updates[[0, -1]] == UPDATES[[0, -1]]).all()
    wide = course.mean - every.std(axis=0, ddof=1)[chosen]
    np.testing.assert_allclose(course.low, np.maximum(wide, every.min(axis=0)[chosen]), rtol=1e-12)
    assert (course.low > 0).all()
    assert len(course.seeds) == 7


def test_courses_of_unequal_length_share_what_they_have():
    results, _ = made_up_study(("a",), ("dino",), seeds=2)
    short = results[1].curves["loss"]
    short.update({key: values[:100] for key, values in short.items()})
    short["loss"][3] = None
    course = mean_curves(results, CURVE_KINDS[0])["a", "dino"]
    assert course.updates[-1] == UPDATES[99]
    assert np.isfinite(course.mean).all()


@rows(
    ("values", "expected"),
    [
        ({("a", "x"): [1, 2], ("b", "x"): [30, 40]}, True),
        ({("a", "x"): [1, 2], ("b", "y"): [30, 40]}, False),  # in plots of their own
        ({("a", "x"): [0, 2], ("b", "x"): [30, 40]}, False),
        ({("a", "x"): [1, 50], ("a", "y"): [-1, 1]}, False),
        ({}, False),
    ],
)
def test_a_logarithmic_scale_is_for_what_a_linear_one_would_hide(values, expected):
    assert spans_decades({place: np.array(found, float) for place, found in values.items()}) is expected


def test_arms_keep_their_look_and_no_two_share_one():
    arms = [f"arm {place}" for place in range(20)]
    chosen = styles(arms, "arm 3")
    assert chosen["arm 3"].color == "#000000"
    assert len({(style.color, style.line) for style in chosen.values()}) == 20
    assert styles(arms[:7], "arm 3") == {arm: chosen[arm] for arm in arms[:7]}


def test_what_nothing_drives_is_not_plotted():
    def with_momentum(arm):
        def change(run):
            updates = len(run.curves["loss"]["update"])
            run.curves["loss"]["beta1"] = [0.9] * (updates - 1) + [0.5 if run.arm == arm else 0.9]
            return run

        return change

    for arm, shown in (("none", False), ("b", True)):
        contents = ReportContents(*made_up_study(("a", "b"), ("dino",), seeds=2, change=with_momentum(arm)))
        assert ("beta1" in {kind.name for kind in contents.curve_kinds}) is shown


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_one_data_set_has_no_ranks(tmp_path):
    for datasets, there in ((("dino",), False), (("dino", "moons"), True)):
        write_report(tmp_path, *made_up_study(("a", "b", "c"), datasets, seeds=2))
        assert (tmp_path / "report" / "ranks_kl.png").exists() is there


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """The page of a thousand runs, and how long it took: as much as making them up, and a few seconds."""
    arms, started = [f"arm {place}" for place in range(10)], time.perf_counter()
    results, summary = made_up_study(arms, PAPER_DATASETS, seeds=25)
    assert len(results) == 1000
    made = time.perf_counter()
    path = write_report(tmp_path_factory.mktemp("thousand"), results, summary)
    return path, time.perf_counter() - made, made - started


@pytest.mark.usefixtures("undrawn")
def test_of_many_seeds_some_are_drawn_as_lines(tmp_path):
    results, summary = made_up_study(("a", "b"), ("dino",), seeds=25)
    page = page_of(tmp_path, results, summary)
    assert "Of up to 25 seeds per arm, the first 20 are plotted as lines; means and bands are of all." in page
    assert len(mean_curves(results, CURVE_KINDS[0])["a", "dino"].seeds) == 20


@pytest.mark.slow
def test_a_thousand_runs(thousand):
    path, _, _ = thousand
    page = path.read_text(encoding="utf-8")
    assert len(page) < 3e6
    assert "Of up to 25 seeds per arm, the first 20 are plotted as lines; means and bands are of all." in page


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    results, summary = made_up_study(("a", "<b onclick=x>b</b>", "%{x}c"), ("dino", "moons"), seeds=3)
    summary |= {"speedups": SPEEDUPS, "tuning": TUNING}
    return write_report(tmp_path_factory.mktemp("browser"), results, summary)


@pytest.mark.slow
def test_the_page_is_in_order_without_a_browser(index, tmp_path):
    assert mistakes(index) == []
    text = index.read_text(encoding="utf-8")
    wrong = text.replace('lang="en"', "").replace("<h2", "<h4", 1).replace('alt="', 'alt="" data-alt="', 1)
    (tmp_path / "index.html").write_text(wrong, encoding="utf-8")
    assert len(mistakes(tmp_path / "index.html")) == 3


def test_the_page_is_small(index):
    assert index.stat().st_size < 1.5e6


@pytest.mark.slow
@needs_chromium
def test_the_page_opens_from_disk_without_network(browser, index):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(index)
    assert browser.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert browser.evaluate("document.images.length") > 8
    assert all(address.startswith(("file:", "data:")) for address in browser.requests)
    assert browser.errors == []
    assert browser.evaluate("document.querySelectorAll('[onclick]').length") == 0


@pytest.mark.slow
def test_plots_of_the_page_are_drawings_as_wide_as_the_pictures_beside_it(index):
    found = re.findall(r'<img[^>]* width="(\d+)" src="data:image/svg\+xml;base64,([^"]*)"', index.read_text())
    for _, content in found:
        assert ElementTree.fromstring(base64.b64decode(content)).tag == "{http://www.w3.org/2000/svg}svg"
    widths = []
    for path in index.parent.glob("*.png"):
        with Image.open(path) as image:
            widths.append(image.width)
    assert sorted(int(width) for width, _ in found) == sorted(widths)


@pytest.mark.slow
@needs_chromium
def test_tables_are_sorted_by_a_click(browser, index):
    browser.open(index)
    table = "document.querySelector('#summary ~ .scroll table')"
    heading = f"[...{table}.tHead.rows].at(-1).cells[[...[...{table}.tHead.rows].at(-1).cells].length - 1]"
    column = f"[...{table}.tBodies[0].rows].map(row => parseFloat(row.cells[row.cells.length - 1].textContent))"
    whole = browser.evaluate(f"{table}.tBodies[0].rows.length")
    for order, expected in (("ascending", sorted), ("descending", lambda found: sorted(found, reverse=True))):
        browser.evaluate(f"{heading}.querySelector('button').click()")
        assert browser.evaluate(f"{heading}.ariaSort") == order
        found = [value for value in browser.evaluate(column) if value is not None]
        assert found == expected(found)
    assert browser.evaluate(f"[...{table}.tBodies[0].rows].filter(row => row.cells[0].textContent).length") == whole


@pytest.mark.slow
@needs_chromium
def test_no_other_script_runs(browser, index):
    browser.open(index)
    own = "Object.assign(document.createElement('script'), {textContent: 'window.isOther = true'})"
    browser.evaluate(f"document.body.append({own}); 0")
    assert browser.evaluate("window.isOther") is None
    assert "Content Security Policy" in " ".join(browser.errors)
    browser.errors.clear()


@needs_chromium
def test_a_page_that_is_heard(browser, index):
    """Every picture has a text, headings go down one level at a time, what a link names is there."""
    browser.open(index)
    assert browser.evaluate("[...document.images].every(image => image.alt.length > 20)")
    levels = browser.evaluate("[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(head => Number(head.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert browser.evaluate("[...document.querySelectorAll('a[href^=\"#\"]')].every(a => document.querySelector(a.hash))")
    assert browser.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == browser.evaluate(
        "document.querySelectorAll('[id]').length"
    )
    names = "[...document.querySelectorAll('tbody th')].map(cell => cell.textContent)"
    assert {"a", "<b onclick=x>b</b>", "%{x}c"} <= set(browser.evaluate(names))


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_light_and_dark(browser, index, scheme):
    """As WCAG asks: 4.5 to 1 at least."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(index)
    seen = browser.evaluate(
        "(() => { const of = (element) => { for (; element; element = element.parentElement) {"
        " const color = getComputedStyle(element).backgroundColor; if (color !== 'rgba(0, 0, 0, 0)') return color; } };"
        "return [...document.querySelectorAll('p, li, th, td, dt, dd, h1, h2, a, summary, pre')]"
        ".map(e => [getComputedStyle(e).color, of(e)].join(';')); })()"
    )
    browser.call("Emulation.setEmulatedMedia", features=[])
    pairs = {tuple(tuple(map(int, re.findall(r"\d+", color)[:3])) for color in pair.split(";")) for pair in seen}
    assert len(pairs) > 4
    for ink, ground in pairs:
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
        assert (luminance(ground) < 0.2) is (scheme == "dark")


def luminance(color):
    """Of sRGB, by WCAG 2.2."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_by_everybody(browser, index, scheme):
    """Contrast, texts of pictures, headings, language, by the rules of axe-core; with everything unfolded."""
    browser.set_scheme(scheme)
    found = {}
    for width in (390, 800, 1400):
        browser.open(index, width, 844, mobile=width < 1000)
        browser.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        found[width] = browser.violations()
    browser.set_scheme("")
    assert found == {390: [], 800: [], 1400: []}


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [320, 390, 800, 1200])
def test_no_page_scrolls_sideways(browser, index, width):
    browser.open(index, width, 844, mobile=width < 1000)
    browser.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    # A long name in each row: none of it is hidden.
    browser.evaluate("document.querySelectorAll('tbody th').forEach(cell => { cell.textContent += ' and more'.repeat(9); })")
    hidden = "[...document.querySelectorAll('tbody th')].filter(cell => cell.scrollWidth > cell.clientWidth).length"
    assert browser.evaluate(hidden) == 0


@needs_chromium
def test_on_paper_nothing_is_folded(browser, index):
    browser.open(index)
    visible = "document.querySelector('#findings + details table').checkVisibility()"
    assert not browser.evaluate(visible)
    assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    shown = browser.evaluate(visible)
    browser.call("Emulation.setEmulatedMedia", media="")
    assert shown
