"""Each diagnosis names the programs that it is about, and no others."""

import numpy as np
import pytest
from audit_programs import COMPILED, PAIRS, audit_of, audits_of_all, names_of

from diffusers_lrlab.audit.diagnoses import DIAGNOSES
from diffusers_lrlab.audit.report import lines_of


def test_every_diagnosis_has_a_pair():
    named = {name.removesuffix(" by a load") for name in [*PAIRS, "unseen_steps"]}
    assert named == {diagnosis.__name__ for diagnosis in DIAGNOSES}


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """By the name of a finding and whether the program has it."""
    programs = {f"{name}-{kind}": pair[kind] for name, pair in PAIRS.items() for kind in (0, 1)}
    programs |= {"grid": GRID, "resumed": PAIRS["jumped"][1].replace("0, 40)", "0, 160)")}
    return audits_of_all(programs, tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("name", PAIRS)
def test_a_diagnosis_tells_the_wrong_program_from_the_right_one(audits, name):
    wrong, right = audits[f"{name}-0"], audits[f"{name}-1"]
    name = name.removesuffix(" by a load")
    assert any(name in names_of(wrong, index) for index in range(len(wrong.sections)))
    assert not any(name in names_of(right, index) for index in range(len(right.sections)))
    for audit in (wrong, right):
        assert len(lines_of(audit, "Wrote.")) <= 10


@pytest.mark.parametrize("right", ["rose_after_end", "still_warming_up", "discarded", "jumped by a load", "clipped_early"])
def test_a_right_program_has_no_findings(audits, right):
    assert not names_of(audits[f"{right}-1"])


GRID = """
o = adam(lr=1e-5); s = get_scheduler('cosine', o, 0, 40)
def rounded():
    s.step()
    o.param_groups[0]["lr"] = int(o.param_groups[0]["lr"] / 1e-9) * 1e-9
train(o, step=rounded)
"""


def test_learning_rates_of_multiples_of_1e_9_are_rounded(audits):
    assert "rounded" in names_of(audits["grid"])
    assert "multiples of 1e-9" in "".join(lines_of(audits["grid"], ""))


def test_the_cause_of_a_high_end_is_named(audits):
    finding = audits["too_long-0"].sections[0].findings[0]
    assert "made for 160 steps, 16 of them warm-up, and the run took 40" in finding.text
    assert "count micro-batches: there are 4 backward passes" in finding.text
    expected = 0.5 * (1 + np.cos(np.pi * 23 / 144))
    assert f"{100 * expected:.3g} % of the peak" in finding.text


def test_micro_steps_are_named(audits):
    text = audits["too_short-0"].sections[0].findings[0].text
    assert "the scheduler was stepped 4 times per update" in text
    assert "step the scheduler once per update" in text


@pytest.mark.slow
def test_compiled_steps_are_found_by_the_weights(tmp_path):
    audit = audit_of(COMPILED, tmp_path)
    assert "unseen_steps" in names_of(audit)
    np.testing.assert_allclose(audit.sections[0].optimizer.lead, [1e-3 * (1 - n / 40) for n in range(8)], rtol=1e-9)


def test_a_scheduler_by_epoch_is_told_with_its_epochs(audits):
    assert "once in 10 updates" in audits["rarely_stepped-0"].sections[0].findings[0].text


def test_one_cause_is_told_once(audits):
    for name in ("rose_after_end-0", "too_short-0"):
        assert "warmup_scaled" not in names_of(audits[name])
    (finding,) = audits["warmup_scaled-0"].sections[0].findings
    assert "lasts 5 updates" in finding.text
    assert "If you asked for 20 updates, step the scheduler once per update" in finding.text


def test_the_remedy_of_a_resumed_run_counts_the_updates_before(audits):
    """A schedule for 160 steps, in a run of 40 whose last 10 updates are audited."""
    (_, later) = audits["resumed"].sections
    assert later.evidence.taken == 40
    assert "make it for 40 steps" in later.findings[0].text
