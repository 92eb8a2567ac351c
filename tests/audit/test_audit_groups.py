"""Parameter groups that come and go during the training, and reports of which a part fails."""

import json

import numpy as np
import pytest
from audit_programs import audits_of_all, names_of

from diffusers_lrlab.audit import result, run
from diffusers_lrlab.audit.report import lines_of, plot_audit
from diffusers_lrlab.audit.result import Expectation, make_audit
from diffusers_lrlab.audit.run import AuditOptions, as_json
from diffusers_lrlab.core.environment import MissingExtra

SPLIT = "o = torch.optim.AdamW([{'params': [model.weight], 'lr': 1e-4}, {'params': [model.bias], 'lr': 2e-4}])\n"
OTHER = "b, c = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)\n"
# Rates of each group in each stretch of two updates; `None` where the group does not exist.
PROGRAMS = {
    "added": (
        f"{SPLIT}{OTHER}train(o, 2); o.add_param_group({{'params': b.parameters(), 'lr': 1e-5}}); train(o, 2)",
        [[1e-4, 1e-4], [2e-4, 2e-4], [None, 1e-5]],
    ),
    "the last removed": (f"{SPLIT}train(o, 2); o.param_groups.pop(); train(o, 2)", [[1e-4, 1e-4], [2e-4, None]]),
    "parameters swapped by an engine": (
        f"{SPLIT}{OTHER}train(o, 2); o.param_groups[0]['params'] = [b.weight]; o.param_groups[0]['lr'] = 3e-4; train(o, 2)",
        [[1e-4, 3e-4], [2e-4, 2e-4]],
    ),
    "a state with more groups loaded": (
        f"""{SPLIT}{OTHER}
train(o, 2); o.add_param_group({{'params': b.parameters(), 'lr': 1e-5}}); state = o.state_dict()
state['param_groups'][2]['lr'] = 5e-5; o.load_state_dict(state); train(o, 2)
""",
        [[1e-4, 1e-4], [2e-4, 2e-4], [None, 5e-5]],
    ),
}
LATE = f"""
o = adam(); s = LambdaLR(o, lambda n: 1 - n / 20)
{OTHER}
for n in range(20):
    if n == 10:
        o.add_param_group({{'params': b.parameters(), 'lr': 5e-4, 'initial_lr': 1e-3}})
        s.base_lrs.append(1e-3); s.lr_lambdas.append(s.lr_lambdas[0])
    train(o, 1, step=s.step)
"""


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    programs = {name: program for name, (program, _) in PROGRAMS.items()} | {"late": LATE}
    return audits_of_all(programs, tmp_path_factory.mktemp("records"))


@pytest.mark.pictures
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_group_has_rates_only_while_it_exists(audits, name, tmp_path):
    audit, expected = audits[name], PROGRAMS[name][1]
    groups = as_json(audit)["optimizers"][0]["groups"]
    by_index = {index: group["lr"] for group in groups for index in group["indices"]}
    assert [by_index[index] for index in range(len(expected))] == [
        [value for value in rates for _ in range(2)] for rates in expected
    ]
    assert len(groups) == len(expected)
    assert [group["momentum"][-1] for group in groups] == [None if rates[-1] is None else 0.9 for rates in expected]
    assert np.isfinite(audit.sections[0].evidence.lr).all()
    assert not names_of(audit)
    plot_audit(audit, tmp_path / "audit.png")


def test_a_group_that_comes_late_is_compared_while_it_exists(audits):
    audit = make_audit([], 0, audits["late"].processes, Expectation("linear"))
    assert audit.holds
    (first, late) = as_json(audit)["optimizers"][0]["groups"]
    assert first["expected_lr"] == pytest.approx([1e-3 * (1 - n / 20) for n in range(20)])
    assert late["expected_lr"] == pytest.approx([None] * 10 + first["expected_lr"][10:])
    assert not make_audit([], 0, audits["late"].processes, Expectation("cosine")).holds


def test_a_diagnosis_that_fails_costs_one_line(audits, monkeypatch):
    def broken(seen):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(result, "DIAGNOSES", (broken, *result.DIAGNOSES))
    audit = make_audit([], 0, audits["late"].processes, None)
    assert lines_of(audit)[2:] == ["Note: The diagnosis `broken` failed: ZeroDivisionError: float division by zero."]
    assert as_json(audit)["optimizers"][0]["findings"][0]["name"] == "broken"


@pytest.mark.pictures
def test_a_plot_that_fails_costs_neither_the_report_nor_the_file(audits, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise MissingExtra("matplotlib is not installed here")

    monkeypatch.setattr(run, "plot_audit", fails)
    monkeypatch.setattr(run, "_run", lambda *_: 0)
    monkeypatch.setattr(run, "read_processes", lambda _: audits["added"].processes)
    assert run.run_audited(["python"], AuditOptions(tmp_path)) == 0
    text = capsys.readouterr().err
    assert "LR audit: AdamW" in text
    assert text.endswith(f"Wrote {tmp_path / 'lr_audit.json'}. matplotlib is not installed here\n")
    assert len(json.loads((tmp_path / "lr_audit.json").read_text())["optimizers"][0]["groups"]) == 3
