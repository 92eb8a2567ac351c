"""Summaries whose runs were not kept, written again from their own rows."""

import json
from pathlib import Path

import pytest

from diffusers_lrlab.study.analysis.renewed import renewed
from diffusers_lrlab.study.analysis.runs_table import read_runs
from diffusers_lrlab.study.analysis.summary import summarise
from diffusers_lrlab.study.runs.progress import StudyProgress
from diffusers_lrlab.study.spec.reading import load_spec

CARDS = Path(__file__).parents[2] / "model_cards"


def by_comparison(found):
    return {
        metric: {(verdict["arm"], verdict["reference"], verdict["dataset"]): verdict for verdict in verdicts}
        for metric, verdicts in found.items()
    }


@pytest.mark.parametrize("name", ["small-batches-shapes", "optimizers-shapes"])
def test_a_renewed_summary_says_what_the_runs_say(name):
    """Its sentences come from the rows alone: those about the baseline, about controls and about speed-ups."""
    summary = json.loads((CARDS / name / "summary.json").read_text())
    assert any(summary["controls"].values())
    found = renewed(load_spec(name), {**summary, "findings": {}})["findings"]
    assert by_comparison(found) == by_comparison(summary["findings"])
    assert {metric: len(verdicts) for metric, verdicts in found.items()} == {
        metric: len(verdicts) for metric, verdicts in summary["findings"].items()
    }


@pytest.mark.parametrize("name", ["small-batches-shapes", "flow-or-ddpm-shapes"])
def test_a_summary_compares_with_controls_where_arms_have_some(name):
    saved, read = json.loads((CARDS / name / "summary.json").read_text()), read_runs(CARDS / name)
    compared, tuning = ([run for run in read.results if run.stage == stage] for stage in ("compare", "tune"))
    summary = summarise(load_spec(name), compared, tuning, read.notes, StudyProgress(quiet=True), "")
    assert summary.get("controls") == saved.get("controls")
