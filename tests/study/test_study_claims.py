"""Claims of a study: what is refused, how they are judged, and how far tests carry."""

import json

import numpy as np
import pytest
import yaml
from made_up_studies import made_up_study
from statsmodels.stats.power import TTestPower
from tables import rows
from values_of_studies import simulated

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.analysis import claims as judging
from diffusers_lrlab.study.analysis.claims import VERDICTS, judge_claims, verdict_of
from diffusers_lrlab.study.analysis.figures import percent, percent_range
from diffusers_lrlab.study.analysis.power import detectable, detectable_effect, power_rows, spread_of
from diffusers_lrlab.study.analysis.statistics import POWER, add_holm, compare
from diffusers_lrlab.study.analysis.verdicts import Verdict
from diffusers_lrlab.study.report.contents import ReportContents
from diffusers_lrlab.study.report.reach import claims_table, power_table, reach
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.claims import link_of
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import read_spec, spec_from_dict
from diffusers_lrlab.study.spec.spec import Claim

STUDY = {
    "base": {"max_train_steps": 30},
    "arms": {
        "constant": {"lr_scheduler": "constant"},
        "cosine": {"lr_scheduler": "cosine", "controls": ["linear"]},
        "linear": {"lr_scheduler": "linear"},
        "rex": {"lr_scheduler": "rex"},
    },
    "datasets": ["dino"],
    "metrics": ["kl", "validation_loss_ema", "sharpness"],
    "speedup_metric": "validation_loss_ema",
}
CLAIM = {"claim": "Cosine is better", "source": "arXiv 2405.18392", "arm": "cosine", "metric": "kl", "expects": "better"}


def study_with(*claims, **changes):
    return read_spec({**STUDY, **changes, "claims": [{**CLAIM, **claim} for claim in claims]}, "study")


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "unknown arm": (
        {"arm": "cosin"},
        ["arm 'cosin' of the claim 'Cosine is better' is not an arm.", "Did you mean 'cosine'?"],
    ),
    "unknown other arm": ({"against": "x"}, ["against 'x' of the claim", "They are constant, cosine, linear, rex"]),
    "no tested pair": ({"against": "rex"}, ["the baseline (constant) or a control of cosine", "controls: [rex]"]),
    "an arm against itself": ({"arm": "constant"}, ["must be another arm"]),
    "unknown metric": ({"metric": "kll"}, ["metric='kll'", "must be a metric of the study: kl, ", "Did you mean 'kl'?"]),
    "metric that is not measured": ({"metric": "coverage"}, ["metric='coverage'", "add it to metrics"]),
    "metric without a direction": ({"metric": "sharpness"}, ["a metric with a better direction"]),
    "unknown expectation": ({"expects": "best"}, ["expects='best'", "better or worse or no worse or no difference"]),
    "speed-up that is no worse": ({"metric": "speedup", "expects": "no worse", "within": 0.1}, ["must be better"]),
    "speed-up of the baseline": (
        {"metric": "speedup", "arm": "constant", "against": "rex"},
        ["a speed-up is measured for that arm"],
    ),
    "speed-up by less than one": ({"metric": "speedup", "by": 0.5}, ["by=0.5", "(1, inf)"]),
    "consistency that is better": ({"metric": "consistency"}, ["must be no difference"]),
    "source without a form": ({"source": "a blog"}, ["source='a blog'", "arXiv NUMBER, doi:10.NUMBER, an address"]),
    "source with a short number": ({"source": "arXiv 2405.1"}, ["such as 'arXiv 2405.18392'"]),
    "no source": ({"source": None}, ["source=None", "every claim has source"]),
    "no words": ({"claim": " "}, ["claim=' '", "a sentence of up to 200 characters"]),
    "margin that is not needed": ({"within": 0.1}, ["within of the claim", "has no effect on expects: better. Give by"]),
    "no margin": ({"expects": "no worse"}, ["within=None", "such as 0.05"]),
    "margin in percent": ({"expects": "no difference", "within": 5}, ["within=5", "(0, 1)"]),
    "size of no difference": ({"expects": "no difference", "within": 0.1, "by": 0.1}, ["by of the claim", "Give within"]),
    "size below nothing": ({"by": -0.1}, ["by=-0.1", "(0, inf)"]),
    "note that is no text": ({"note": 3}, ["note=3", "must be text"]),
    "misspelt key": ({"expect": "better"}, ["There is no 'expect' in claims", "Did you mean 'expects'?"]),
}


@rows("name", REFUSED)
def test_claims_that_are_refused(name):
    claim, parts = REFUSED[name]
    with pytest.raises(LabError) as error:
        study_with(claim)
    for part in parts:
        assert part in str(error.value)


def test_claims_that_are_no_list_or_the_same():
    with pytest.raises(LabError, match="claims='x': must be a list of mappings"):
        read_spec({**STUDY, "claims": "x"}, "study")
    with pytest.raises(LabError, match="is listed twice"):
        study_with({}, {})


def without(key, **claim):
    """The study with one claim and without a key."""
    options = {**STUDY, "claims": [{**CLAIM, **claim}]}
    return read_spec({name: value for name, value in options.items() if name != key}, "study")


def test_a_speed_up_needs_its_metric():
    with pytest.raises(LabError, match="give the study a speedup_metric"):
        without("speedup_metric", metric="speedup")


def test_a_metric_that_is_no_default_is_refused_with_the_runs():
    with pytest.raises(LabError, match="metric='coverage' of the claim 'Cosine is better': must be measured"):
        expand(without("metrics", metric="coverage"))
    assert expand(without("metrics", metric="kl"))


def test_a_saved_study_has_its_claims_and_an_older_one_none(tmp_path):
    study = study_with({"by": 0.1, "note": "At one rate."}, {"against": "linear", "expects": "no worse", "within": 0.05})
    StudyFolder(tmp_path).write_spec(study, "command")
    saved = yaml.safe_load((tmp_path / "spec.yaml").read_text())["spec"]
    again = spec_from_dict(saved, tmp_path)
    assert again.claims == study.claims
    del saved["claims"]
    assert spec_from_dict(saved, tmp_path).claims == ()


def test_claims_change_no_run():
    one, other = (expand(study) for study in (study_with(), study_with({})))
    assert [run.id for run in one] == [run.id for run in other]


@rows(
    ("source", "link"),
    [
        ("arXiv 2405.18392", "https://arxiv.org/abs/2405.18392"),
        ("doi:10.1000/182", "https://doi.org/10.1000/182"),
        ("https://example.org/a", "https://example.org/a"),
        ('"A title"', None),
    ],
)
def test_sources_have_addresses(source, link):
    assert link_of(source) == link
    assert study_with({"source": source}).claims[0].source == source


# --- verdicts ---------------------------------------------------------------------------------------------------------

YES, SMALL, LESS, NO, OPEN = judging.AS_CLAIMED, judging.SMALLER, judging.TOO_SMALL, judging.OPPOSITE, "cannot tell"


@rows(
    ("words", "verdict"),
    [
        ([YES, YES], "supported"),
        ([YES, OPEN], "supported in part"),
        ([YES, NO], "mixed by data"),
        ([YES, SMALL], "mixed by data"),
        ([YES, LESS], "mixed by data"),
        ([SMALL, OPEN], "smaller than claimed"),
        ([SMALL, LESS], "smaller than claimed"),
        ([SMALL, NO], "not supported"),
        ([NO, OPEN], "not supported"),
        ([LESS, LESS], "not supported"),
        ([LESS, OPEN], "cannot tell"),
        ([OPEN, OPEN], "cannot tell"),
        ([], "cannot tell"),
    ],
)
def test_the_verdict_over_data_sets(words, verdict):
    assert verdict_of(words) == verdict
    assert verdict in VERDICTS
    assert len(verdict.split()) <= 3
    expected = "supported, one set" if verdict == "supported" else verdict
    assert verdict_of(words, is_one=True) == expected


def summary_with(metric="kl", baseline="constant", controls=(), **differences):
    """
    A summary of arms that differ from 10 by so much, give or take a little, with five seeds on `dino`.

    `controls` are pairs of an arm and a control.
    """
    noise = np.random.default_rng(0).normal(size=5) * 0.05
    shifts = {"constant": 0.0, **differences}
    values = {
        arm: {
            "dino": {seed: 10 + shift + (0.0 if arm == baseline else own) for seed, own in enumerate(np.roll(noise, index))}
        }
        for index, (arm, shift) in enumerate(shifts.items())
    }
    of_controls = []
    for arm, control in controls:
        (row,) = (row for row in compare({control: values[control], arm: values[arm]}, control, metric) if row["arm"] == arm)
        of_controls.append({**row, "control": control})
    add_holm(of_controls)
    study = {"baseline": baseline, "datasets": ["dino"], "seeds": [0, 1, 2, 3, 4]}
    return {"study": study, "rows": compare(values, baseline, metric), "controls": {metric: of_controls}}


def judged(summary, **claim):
    fields = {**CLAIM, "against": "constant", **claim}
    (row,) = judge_claims((Claim(**fields),), summary)
    return row


@rows(
    ("difference", "claim", "outcome"),
    [
        (-1.0, {"expects": "better"}, YES),
        (1.0, {"expects": "better"}, NO),
        (0.0, {"expects": "better"}, OPEN),
        (1.0, {"expects": "worse"}, YES),
        (-1.0, {"expects": "worse"}, NO),
        (-1.0, {"expects": "better", "by": 0.1}, YES),
        (-1.0, {"expects": "better", "by": 0.3}, SMALL),
        (0.0, {"expects": "better", "by": 0.3}, LESS),
        (1.0, {"expects": "better", "by": 0.3}, NO),
        (1.0, {"expects": "worse", "by": 0.3}, SMALL),
        (0.0, {"expects": "no worse", "within": 0.05}, YES),
        (-1.0, {"expects": "no worse", "within": 0.05}, YES),
        (0.2, {"expects": "no worse", "within": 0.05}, YES),  # shown to be worse, by less than the margin
        (0.48, {"expects": "no worse", "within": 0.05}, NO),  # shown to be worse, perhaps by more
        (1.0, {"expects": "no worse", "within": 0.05}, NO),
        (0.0, {"expects": "no worse", "within": 0.001}, OPEN),
        (0.0, {"expects": "no difference", "within": 0.05}, YES),
        (-1.0, {"expects": "no difference", "within": 0.05}, NO),
        (1.0, {"expects": "no difference", "within": 0.05}, NO),
        (0.0, {"expects": "no difference", "within": 0.001}, OPEN),
    ],
)
def test_the_outcome_on_a_data_set(difference, claim, outcome):
    row = judged(summary_with(cosine=difference), **claim)
    (found,) = row["datasets"]
    assert found["word"] == outcome
    assert found["effect"] == pytest.approx(difference / 10, abs=0.01)
    assert found["low"] < found["effect"] < found["high"]
    assert row["held_on"] == (["dino"] if outcome == YES else [])
    assert row["limits"] == ["one data set", "learning rates not tuned"]


def test_what_is_outside_the_margin_is_not_the_opposite_without_the_adjusted_test():
    summary = summary_with(cosine=1.0)
    for row in summary["rows"]:
        row |= {"p_adjusted": None if row["p_adjusted"] is None else 0.17}
    assert judged(summary, expects="no worse", within=0.05)["datasets"][0]["word"] == OPEN


def test_larger_is_better_where_the_metric_says_so():
    assert judged(summary_with("coverage", cosine=1.0), metric="coverage")["datasets"][0]["word"] == YES
    within = {"metric": "coverage", "expects": "no worse", "within": 0.05}
    assert judged(summary_with("coverage", cosine=1.0), **within)["datasets"][0]["word"] == YES
    assert judged(summary_with("coverage", cosine=-1.0), **within)["datasets"][0]["word"] == NO


def test_a_pair_in_the_other_order_is_the_same_with_its_signs_turned():
    summary = summary_with(cosine=1.0)
    (one,) = judged(summary, expects="worse")["datasets"]
    (other,) = judged(summary, arm="constant", against="cosine", expects="better")["datasets"]
    assert one["word"] == other["word"] == YES
    assert other["effect"] == pytest.approx(-one["effect"] * 10 / 11, rel=1e-2)
    assert other["low"] < other["effect"] < other["high"] < 0


def test_a_control_is_compared_in_its_own_family():
    summary = summary_with(controls=[("cosine", "linear")], cosine=0.0, linear=1.0)
    assert judged(summary, against="linear")["datasets"][0]["word"] == YES
    assert judged(summary, arm="linear", against="cosine")["datasets"][0]["word"] == NO
    missing = judged(summary, against="rex")
    assert (missing["verdict"], missing["seeds"]) == ("cannot tell", 0)


def test_equal_values_are_no_difference_and_diverged_runs_worse():
    summary = summary_with(cosine=0.0)
    for row in summary["rows"]:
        if row["arm"] == "cosine":
            row |= {"diff": 0.0, "diff_low": None, "diff_high": None, "p": 1.0, "p_adjusted": 1.0}
    assert judged(summary, expects="no difference", within=0.01)["datasets"][0]["word"] == YES
    for row in summary["rows"]:
        if row["arm"] == "cosine":
            row |= dict.fromkeys(("mean", "diff", "diff_low", "diff_high", "p", "p_adjusted")) | {"pairs": 0, "diverged": 5}
    assert judged(summary)["datasets"][0]["word"] == NO
    assert judged(summary, expects="worse")["datasets"][0]["word"] == YES
    assert judged(summary, expects="no worse", within=0.5)["datasets"][0]["word"] == NO
    assert judged(summary)["datasets"][0]["text"] == "–"


SPEED = {"arm": "cosine", "dataset": "dino", "n": 5, "censored": 0, "speedup": 1.3, "ci_low": 1.1, "ci_high": 1.5}
SPEED |= {"p": 0.01, "p_adjusted": 0.02}


@rows(
    ("changes", "by", "outcome", "text"),
    [
        ({}, None, YES, "1.30 times (1.10 to 1.50)"),
        ({}, 1.2, YES, "1.30 times (1.10 to 1.50)"),
        ({}, 2.0, SMALL, "1.30 times (1.10 to 1.50)"),
        ({"p_adjusted": 0.2}, 2.0, LESS, "1.30 times (1.10 to 1.50)"),
        ({"p_adjusted": 0.2}, 1.4, OPEN, "1.30 times (1.10 to 1.50)"),
        ({"p_adjusted": 0.2}, None, OPEN, "1.30 times (1.10 to 1.50)"),
        ({"speedup": 0.8, "ci_low": 0.7, "ci_high": 0.9}, 2.0, NO, "0.80 times (0.70 to 0.90)"),
        ({"censored": 2, "ci_low": None, "ci_high": None, "p_adjusted": 1.0}, 2.0, LESS, "≤ 1.30 times"),
        ({"censored": 2, "ci_low": None, "ci_high": None, "p_adjusted": 1.0}, None, OPEN, "≤ 1.30 times"),
        ({"censored": 5, "speedup": None, "ci_low": None, "ci_high": None}, 2.0, NO, "–"),
    ],
)
def test_the_outcome_of_a_speed_up(changes, by, outcome, text):
    summary = {**summary_with(), "speedups": [{**SPEED, **changes}]}
    row = judged(summary, metric="speedup", by=by)
    (found,) = row["datasets"]
    assert (found["word"], found["text"]) == (outcome, text)
    assert ("bounds without an interval" in row["limits"]) is bool(changes.get("censored"))
    assert row["expected"] == ("faster" if by is None else f"at least {by:g} times as fast")


@rows(("ratio", "outcome"), [(0.04, YES), (0.06, NO)])
def test_consistency_is_a_ratio_without_a_test(ratio, outcome):
    rows_of = [{"dataset": "dino", "between": between, "pairs": 3, "ratio": ratio} for between in ("seeds of cosine", "x")]
    summary = {**summary_with(cosine=0.0), "consistency": rows_of}
    row = judged(summary, against="cosine", metric="consistency", expects="no difference", within=0.05)
    assert row["datasets"][0]["word"] == outcome
    assert "no test" in row["limits"]
    assert judged(summary, metric="consistency", expects="no difference", within=0.05)["verdict"] == "cannot tell"


def test_limits_name_edges_few_seeds_and_lengths_of_one_set():
    summary = summary_with(cosine=-1.0)
    summary["tuning"] = [
        {"arm": "cosine", "dataset": "dino", "at_edge": True},
        {"arm": "rex", "dataset": "dino", "at_edge": True},
    ]
    summary["study"]["seeds"] = [0, 1, 2]
    edge = "learning rate at the edge of those tried: cosine on dino"
    assert judged(summary)["limits"] == ["one data set", "3 seeds", edge]
    lengths = {"datasets": ["dino@10", "dino@20"], "horizons": [10, 20]}
    assert judging.sources_of(lengths) == ["dino"]
    assert judging.sources_of({**lengths, "horizons": []}) == ["dino@10", "dino@20"]


# --- power ------------------------------------------------------------------------------------------------------------


@rows(("pairs", "level"), [(3, 0.05), (5, 0.05), (5, 0.05 / 4), (10, 0.05 / 14), (30, 0.05 / 48)])
def test_the_detectable_effect_has_the_power(pairs, level):
    assert TTestPower().power(detectable_effect(pairs, level), pairs, level) == pytest.approx(POWER, abs=1e-4)


def test_few_pairs_and_strict_levels_have_a_detectable_effect_too():
    """Where statsmodels returns NaN: by simulation."""
    assert detectable_effect(1, 0.05) is None
    pairs, level = 5, 0.05 / 48
    effect = detectable_effect(pairs, level)
    shifts = effect + np.random.default_rng(0).normal(size=(20_000, pairs))
    from scipy import stats

    shown = stats.ttest_1samp(shifts, 0, axis=1).pvalue < level
    assert shown.mean() == pytest.approx(POWER, abs=0.012)


def test_the_spread_of_differences_follows_from_their_interval():
    values = simulated(0)
    for row in compare(values, "arm0", "kl", num_resamples=0)[2:]:
        own, other = values[row["arm"]][row["dataset"]], values["arm0"][row["dataset"]]
        differences = [own[seed] - other[seed] for seed in own]
        spread = spread_of(row["diff_low"], row["diff_high"], row["pairs"])
        assert spread == pytest.approx(np.std(differences, ddof=1))
        found = detectable(row["diff_low"], row["diff_high"], row["pairs"], tests=1)
        assert found == pytest.approx(spread * detectable_effect(5, 0.05))
        assert detectable(row["diff_low"], row["diff_high"], row["pairs"], tests=6) > found
    assert detectable(None, None, 5, 1) is None


def test_noise_and_power_of_a_study():
    _, summary = made_up_study(arms=("constant", "cosine"), datasets=("circle", "dino"))
    found = power_rows(summary)
    assert [(row["metric"], row["dataset"]) for row in found][:2] == [("kl", "circle"), ("kl", "dino")]
    (row, of_arm), of_kl = found[:2], [row for row in summary["rows"] if row["metric"] == "kl"]
    noise = [row["std"] / row["mean"] for row in of_kl if row["dataset"] == "circle"]
    assert (row["noise_low"], row["noise_high"]) == pytest.approx((min(noise), max(noise)))
    assert row["tests"] == 2
    assert 0 < row["detectable_low"] == row["detectable_high"]
    assert of_arm["seeds"] == 5
    json.dumps(found, allow_nan=False)
    assert list(power_table(found).frame.columns)[3:] == ["noise between seeds", "detectable difference"]


def a_verdict(dataset, word, arm="cosine"):
    return Verdict(arm, "constant", dataset, "kl", None, None, None, 0.5, word, "")


def test_the_report_says_how_far_it_carries():
    _, summary = made_up_study(arms=("constant", "cosine"), datasets=("circle", "dino"))
    summary["power"] = power_rows(summary)
    same = [a_verdict("circle", "better"), a_verdict("dino", "better")]
    noise, power, data = reach(summary, "kl", same)
    assert noise.startswith("Noise: between seeds, the standard deviation is ")
    assert power.startswith("Power: 5 seeds show differences of ")
    assert data == "Data sets: the verdict is the same on all for 1 of 1 comparison."
    differing = [a_verdict("circle", "better"), a_verdict("dino", "cannot tell")]
    text = reach(summary, "kl", differing)[-1]
    assert text.endswith("the same on all for 0 of 1 comparison; it differs for cosine against constant.")
    unclear = [a_verdict("circle", "cannot tell"), a_verdict("dino", "cannot tell")]
    assert reach(summary, "kl", unclear)[-1].endswith("for 1 of 1 comparison (“cannot tell” for 1 of these).")
    lengths = {"study": {"datasets": ["dino@10", "dino@20"], "horizons": [10, 20]}}
    one, agreement = reach(lengths, "kl", [a_verdict("dino@10", "better"), a_verdict("dino@20", "worse")])
    assert one == "Data sets: one, dino. Whether the answers hold on others was not tested."
    assert agreement.startswith("Lengths: the verdict is the same on all for 0 of 1 comparison; it differs for cosine")
    summary["study"]["datasets"] = ["dino"]
    assert reach(summary, "kl", same)[-1] == "Data sets: one, dino. Whether the answers hold on others was not tested."
    assert reach({"study": summary["study"]}, "kl", []) == []


def test_the_report_has_the_claims():
    results, summary = made_up_study(arms=("constant", "cosine"), datasets=("circle", "dino"))
    claim = Claim("Cosine is better", "arXiv 2405.18392", "cosine", "constant", "kl", "better")
    summary["claims"] = judge_claims((claim,), summary)
    contents = ReportContents(results, summary)
    table = claims_table(summary["claims"])
    assert table.frame["data set"].tolist() == ["circle", "dino"]
    assert table.frame["claim"].tolist() == ["Cosine is better", ""]
    assert [each.name for each in contents.all_tables()].count("claims") == 1


# --- figures ----------------------------------------------------------------------------------------------------------


@rows(
    ("shown", "text"),
    [
        (percent(0.01234), "1.2 %"),
        (percent(-0.0264, 0.0052, signed=True), "−2.64 %"),
        (percent(0.4, 0.21, signed=True), "+40 %"),
        (percent(0.0, 0.007, signed=True), "0.00 %"),
        (percent(1.56, 0.49), "156 %"),
        (percent_range(-0.065, 0.004), "−6.5 to +0.4 %"),
    ],
)
def test_shares_have_two_digits_of_the_width(shown, text):
    assert shown == text
