"""What the report says of curves that turn, of decays that are over early, and of schedulers that are not at the update."""

import numpy as np
import pytest
from audit_programs import PAIRS, SCALED, audits_of_all, names_of
from tables import cases

from diffusers_lrlab.audit.report import describe_curve
from diffusers_lrlab.audit.result import Expectation, make_audit

N = np.arange(100)
CURVES = {
    "a warm-up": (
        1e-3 * np.minimum(N / 10, (100 - N) / 90),
        "0 at update 0, highest at update 10 (0.001), 1.111e-05 at the last (1.11 % of the highest)",
    ),
    "down and up": (
        1e-3 * abs(1 - N / 50),
        "0.001 at update 0 (the highest), falls to 0 at update 50, then rises to 0.00098 at the last (98 % of the highest)",
    ),
    "restarts": (
        1e-3 * (1 - N % 5 / 5),
        "0.001 at update 0 (the highest), restarts 19 times from 0.0002, first at update 5",
    ),
    "triangles after a warm-up": (
        1e-3 * np.where(N < 10, N / 10, 1 - abs((N - 10) % 10 - 5) / 10)[:95],
        "0 at update 0, highest at update 15 (0.001), falls and rises again 9 times between 0.0005 and 0.001, "
        "0.0009 at the last (90 % of the highest)",
    ),
}


@cases("name", CURVES)
def test_a_curve_is_described_where_it_turns(name):
    lr, text = CURVES[name]
    assert describe_curve(lr)[: len(text)] == text


STEPWISE = "o = adam(); s = {}; train(o, 300, step=s.step)"
OVER = {
    "cyclic": (
        STEPWISE.format("CyclicLR(o, 0, 1e-3, 5, mode='triangular2', cycle_momentum=False)"),
        "Below 0.1 % of the peak from update 98 of 300 on",
    ),
    "to a floor": (
        STEPWISE.format("LambdaLR(o, lambda n: max(0.8 ** n, 0.01))"),
        "At 1 % of the peak from update 21 of 300 on",
    ),
}
MEANT = {
    "a floor late": STEPWISE.format("LambdaLR(o, lambda n: max(0.98 ** n, 0.01))"),
    "one of two groups frozen": """
        o = torch.optim.AdamW([{'params': [model.weight]}, {'params': [model.bias]}], lr=1e-3)
        s = LambdaLR(o, [lambda n: float(n < 50), lambda n: 1.0]); train(o, 300, step=s.step)
    """,
    "stairs up": "o = adam()\nfor n in range(5): o.param_groups[0]['lr'] = 1e-4 * (1 + n); train(o, 20)",
}
NESTED = "s = get_scheduler('cosine', o, 10, 100)"
RESUMED = {
    "forgot": PAIRS["schedule_not_resumed"][0],
    "right": PAIRS["schedule_not_resumed"][1],
    "twice": PAIRS["schedule_not_resumed"][1].replace("39", "79"),
    "nothing loaded": f"o = adam(); {NESTED}; train(o, 40, step=s.step); o = adam(); {NESTED}; train(o, 60, step=s.step)",
    "steps of Prodigy": """
        o = torch.optim.SGD(model.parameters(), 1e-3); o.param_groups[0].update(d=1.0, k=40)
        s = CosineAnnealingLR(o, 100); train(o, 60, step=s.step)
    """,
    "a parameter that is no count": """
        o = torch.optim.SGD(model.parameters(), 1e-3); o.param_groups[0].update(k=40)
        s = CosineAnnealingLR(o, 60); train(o, 60, step=s.step)
    """,
    "by epoch, resumed": """
        o = adam(); train(o, 40); state = o.state_dict(); state['param_groups'][0]['initial_lr'] = 1e-3
        o = adam(); o.load_state_dict(state); s = CosineAnnealingLR(o, 10, last_epoch=3)
        for _ in range(6): train(o, 10); s.step()
    """,
}
AHEAD = {
    "before the first": "o = adam(); s = CosineAnnealingLR(o, 40)\nfor _ in range(40): train(o, 1, before_step=s.step)",
    "skipped by hand": """
        o = adam(); s = CosineAnnealingLR(o, 100)
        for n in range(100):
            if n % 5 != 4: train(o, 1)
            s.step()
    """,
    "by accelerate": """
        from accelerate import Accelerator
        a = Accelerator(cpu=True); o = adam(); s = get_scheduler('cosine', o, 10, 100); m, o, s = a.prepare(model, o, s)
        s.scheduler.step()
        for n in range(99): a.backward(m(x).square().mean()); o.step(); s.step(); o.zero_grad()
    """,
    "late": "o = adam(); s = CosineAnnealingLR(o, 50)\nfor n in range(100): train(o, 1); n >= 50 and s.step()",
    "forwarded after a load": PAIRS["schedule_not_resumed"][1].replace(
        "s = LambdaLR(o, s.lr_lambdas[0], 39)", f"{NESTED}; [s.step() for _ in range(40)]"
    ),
    "one after the other": """
        o = adam(); first = CosineAnnealingLR(o, 50); train(o, 50, step=first.step)
        o.param_groups[0].update(lr=1e-4, initial_lr=1e-4)
        second = CosineAnnealingLR(o, 50); train(o, 50, step=second.step)
    """,
    "chained": "o = adam(); s = ChainedScheduler([LinearLR(o, 0.1), StepLR(o, 20)], o); train(o, step=s.step)",
}
REPLACED = """
from diffusers_lrlab.diffusers_plugin.hooks.clock import HostClock
from diffusers_lrlab.diffusers_plugin.hooks.lr_scheduler import LrSchedulerHook
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.schedules.schedule import resolve_schedule
run = HostRun(); run.install()
LrSchedulerHook(HostClock(run, False, False, 40), resolve_schedule('rex'), 0).install()
o = adam(); s = get_scheduler('linear', o, 20, 160); train(o, 40, accumulation=4, micro_step=s.step)
run.patches.close()
"""


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    programs = {f"over {name}": program for name, (program, _) in OVER.items()}
    programs |= MEANT | RESUMED | AHEAD
    programs |= {"replaced": REPLACED, "scaler": SCALED.format("s.step()")}
    return audits_of_all(programs, tmp_path_factory.mktemp("records"))


def text_of(audit, name):
    (text,) = (finding.text for finding in audit.sections[-1].findings if finding.name == name)
    return text


@cases("name", OVER)
def test_a_decay_without_a_length_that_is_over_early_is_a_problem(audits, name):
    audit = audits[f"over {name}"]
    assert text_of(audit, "over_early").startswith(OVER[name][1])
    assert "once per epoch" in text_of(audit, "over_early")
    assert audit.sections[0].findings[0].is_problem


@cases("name", MEANT)
def test_a_rate_that_ends_near_zero_is_none(audits, name):
    assert not names_of(audits[name])


def test_a_resume_without_the_state_of_the_scheduler_is_told_to_load_it(audits):
    findings = audits["forgot"].sections[1].findings
    assert [finding.name for finding in findings] == ["schedule_not_resumed"]
    assert "40 updates, by its own count, and the scheduler from its step 0" in findings[0].text
    assert "load the scheduler's state" in findings[0].text
    assert not audits["right"].sections[1].findings
    (finding,) = audits["twice"].sections[1].findings
    assert finding.name == "schedule_not_resumed"
    assert "the scheduler from its step 80" in finding.text


@pytest.mark.parametrize(
    ("name", "fires"),
    [
        ("nothing loaded", False),
        ("steps of Prodigy", True),
        ("a parameter that is no count", False),
        ("by epoch, resumed", False),
        ("scaler", False),
        ("forwarded after a load", False),
    ],
)
def test_the_count_of_an_optimizer_is_read_where_it_has_one(audits, name, fires):
    last = len(audits[name].sections) - 1
    assert ("schedule_not_resumed" in names_of(audits[name], last)) == fires


@cases(
    ("name", "finding", "part"),
    [
        ("scaler", "ahead_of_updates", "8 times before the first update, while the loss scaler skipped 8 updates"),
        ("scaler", "ahead_of_updates", "no update had its rates from 4e-05 to 0.0008"),
        ("scaler", "ahead_of_updates", "scaler.get_scale()"),
        ("before the first", "ahead_of_updates", "once before the first update, so no update had its rate of 0.001"),
        ("skipped by hand", "ahead_of_updates", "20 steps of the scheduler without an update"),
        ("late", "rarely_stepped", "first stepped after update 50"),
    ],
)
def test_steps_of_the_scheduler_without_an_update_are_named_with_their_rates(audits, name, finding, part):
    assert part in text_of(audits[name], finding)


def test_a_new_state_that_accelerate_loads_is_no_resume(audits):
    assert names_of(audits["by accelerate"]) == {"ahead_of_updates"}


@cases("name", ["forwarded after a load", "one after the other", "chained"])
def test_a_scheduler_at_its_update_is_not_ahead(audits, name):
    assert not names_of(audits[name], len(audits[name].sections) - 1) - {"warmup_scaled"}


def test_the_scheduler_is_the_one_in_charge(audits):
    assert audits["one after the other"].sections[0].optimizer.column("s").tolist() == [*range(50), *range(50)]
    assert audits["chained"].sections[0].optimizer.column("s").tolist() == [*range(40)]
    replaced = audits["replaced"].sections[0].optimizer
    assert replaced.scheduler["name"] == "CurveLR"
    assert replaced.column("s").tolist() == [*range(40)]
    assert not names_of(audits["replaced"])


@pytest.mark.parametrize(("name", "holds"), [("forgot", False), ("right", True), ("twice", False)])
def test_an_expectation_counts_the_updates_of_the_optimizer(audits, name, holds):
    audit = make_audit([], 0, audits[name].processes, Expectation("cosine", 100, 10, 1e-3))
    assert audit.sections[1].comparison.first_update == 40
    assert audit.sections[1].comparison.holds == holds
    skipped = make_audit([], 0, audits["scaler"].processes, Expectation("cosine"))
    assert skipped.sections[0].comparison.first_update == 0
