"""Each diagnosis names the programs that it is about, and no others; parameter groups that come and go; curves in words."""

import json

import numpy as np
import printed
import pytest
from audit_programs import COMPILED, PAIRS, SCALED, audit_of, audits_of_all, names_of
from tables import cases

from diffusers_lrlab.audit import result, run
from diffusers_lrlab.audit.report import describe_curve, lines_of, plot_audit
from diffusers_lrlab.audit.result import DIAGNOSES, Expectation, make_audit
from diffusers_lrlab.audit.run import AuditOptions, as_json
from diffusers_lrlab.core.environment import MissingExtra

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


def test_every_diagnosis_has_a_pair():
    named = {name.removesuffix(" by a load") for name in [*PAIRS, "unseen_steps"]}
    assert named == {diagnosis.__name__ for diagnosis in DIAGNOSES}


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """By the name of a finding and whether the program has it."""
    programs = {f"{name}-{kind}": pair[kind] for name, pair in PAIRS.items() for kind in (0, 1)}
    programs |= RIGHT | {
        "grid": GRID,
        "by epoch": BY_EPOCH,
        "decay after a warm-up": DECAY,
        "resumed": PAIRS["jumped"][1].replace("0, 40)", "0, 160)"),
        "a late group": LATE,
        "replaced": REPLACED,
        "scaler": SCALED.format("s.step()"),
    }
    programs |= {name: program for name, (program, _) in GROUPS.items()} | MEANT | RESUMED | AHEAD
    programs |= {f"over {name}": program for name, (program, _) in OVER.items()}
    return audits_of_all(programs, tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("name", PAIRS)
def test_a_diagnosis_tells_the_wrong_program_from_the_right_one(audits, name):
    wrong, right = audits[f"{name}-0"], audits[f"{name}-1"]
    if name in ("rose_after_end", "still_warming_up", "discarded", "jumped by a load", "clipped_early"):
        assert not names_of(right)
    name = name.removesuffix(" by a load")
    assert any(name in names_of(wrong, index) for index in range(len(wrong.sections)))
    assert not any(name in names_of(right, index) for index in range(len(right.sections)))
    for audit in (wrong, right):
        assert len(lines_of(audit)) <= 9


# Correct programs whose learning rates or backward passes look unusual.
RIGHT = {
    "a single epoch": "o = adam(); s = StepLR(o, 1); train(o, 20); s.step()",
    "a warm-up and a square": """
        o = adam(); s = SequentialLR(o, [LinearLR(o, 0.1, total_iters=10), PolynomialLR(o, 100, 2)], [10])
        train(o, 110, step=s.step)
    """,
    "by hand": "o = adam()\nfor lr in (5, 3, 2, 1, .5, .2, .1): o.param_groups[0]['lr'] = lr * 1e-4; train(o, 6)",
    "a step after a resume": """
        o = adam(); s = StepLR(o, 10, 0.1); train(o, 9, step=s.step); states = o.state_dict(), s.state_dict()
        o = adam(); s = StepLR(o, 10, 0.1); o.load_state_dict(states[0]); s.load_state_dict(states[1])
        train(o, 20, step=s.step)
    """,
    "two models clipped": """
        def clip():
            for weight in model.parameters(): torch.nn.utils.clip_grad_norm_([weight], 1e4)
        train(adam(), accumulation=2, before_step=clip)
    """,
    "adversarial": """
        d, g = torch.nn.Linear(4, 1), adam()
        o = torch.optim.Adam(d.parameters(), 1e-3)
        for _ in range(10):
            d.zero_grad(); fake = model(x); (d(x).mean() - d(fake.detach()).mean()).backward(); o.step()
            model.zero_grad(); d(fake).mean().backward(); g.step()
    """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_unusual_program_has_no_findings(audits, name):
    for index, section in enumerate(audits[name].sections):
        assert not names_of(audits[name], index) - {"rarely_stepped"}
        if name == "adversarial":
            assert section.evidence.accumulated == 1


DECAY = """
o = adam(); s = SequentialLR(o, [LinearLR(o, 0.1, total_iters=10), LinearLR(o, 1, 0, total_iters=40)], [10])
train(o, step=s.step)
"""


BY_EPOCH = "o = adam(); s = CosineAnnealingLR(o, 40)\nfor _ in range(4): train(o, 10); s.step()"
GRID = """
o = adam(lr=1e-5); s = get_scheduler('cosine', o, 0, 40)
def rounded():
    s.step()
    o.param_groups[0]["lr"] = int(o.param_groups[0]["lr"] / 1e-9) * 1e-9
train(o, step=rounded)
"""


@pytest.mark.parametrize(
    ("program", "finding", "part"),
    [
        ("too_long-0", "too_long", "made for 160 steps, 16 of them warm-up, and the run took 40"),
        ("too_long-0", "too_long", "count micro-batches: there are 4 backward passes"),
        ("too_long-0", "too_long", f"{50 * (1 + np.cos(np.pi * 23 / 144)):.3g} % of the peak"),
        ("too_short-0", "too_short", "the scheduler was stepped 4 times per update"),
        # A linear decay is no warm-up.
        ("decay after a warm-up", "too_long", "made for 50 steps, 10 of them warm-up, and the run took 40"),
        ("rarely_stepped-0", "rarely_stepped", "once in 10 updates"),
        ("by epoch", "too_long", "Remedy: step the scheduler after every optimizer.step()"),
        ("grid", "rounded", "multiples of 1e-9"),
        # A run of 40 whose last 10 updates are audited.
        ("resumed", "too_long", "make it for 40 steps"),
    ],
)
def test_the_cause_and_the_remedy_are_named(audits, program, finding, part):
    (text,) = (each.text for each in audits[program].sections[-1].findings if each.name == finding)
    assert part in text


@pytest.mark.slow
def test_compiled_steps_are_found_by_the_weights(tmp_path):
    audit = audit_of(COMPILED, tmp_path)
    assert "unseen_steps" in names_of(audit)
    np.testing.assert_allclose(audit.sections[0].optimizer.lead, [1e-3 * (1 - n / 40) for n in range(8)], rtol=1e-9)


def test_one_cause_is_told_once(audits):
    for name in ("rose_after_end-0", "too_short-0"):
        assert "warmup_scaled" not in names_of(audits[name])
    (finding,) = audits["warmup_scaled-0"].sections[0].findings
    assert "lasts 5 updates" in finding.text
    assert "If you asked for 20 updates, step the scheduler once per update" in finding.text


def test_the_printed_report(tmp_path):
    page = "docs/tutorials/which-curve-ran.md"
    (block,) = (each for each in printed.blocks("") if each.page == page and "LR audit: AdamW" in each.code)
    program = printed.block_with("for micro_batch in range(400)", "python")
    assert program.page == page
    assert block.code.splitlines() == [*lines_of(audit_of(program.code, tmp_path)), "Wrote lr_audit.png and lr_audit.json."]


# --- parameter groups -------------------------------------------------------------------------------------------------

SPLIT = "o = torch.optim.AdamW([{'params': [model.weight], 'lr': 1e-4}, {'params': [model.bias], 'lr': 2e-4}])\n"
OTHER = "b, c = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)\n"
# Rates of each group in each stretch of two updates; `None` where the group does not exist.
GROUPS = {
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
        o.add_param_group({{'params': b.weight, 'lr': 5e-4, 'initial_lr': 1e-3}})
        s.base_lrs.append(1e-3); s.lr_lambdas.append(s.lr_lambdas[0])
    train(o, 1, step=s.step)
"""


@pytest.mark.pictures
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_has_rates_only_while_it_exists(audits, name, tmp_path):
    audit, expected = audits[name], GROUPS[name][1]
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
    audit = make_audit([], 0, audits["a late group"].processes, Expectation("linear"))
    assert audit.holds
    (first, late) = as_json(audit)["optimizers"][0]["groups"]
    assert [(group["indices"], group["num_parameters"]) for group in (first, late)] == [([0], 20), ([1], 16)]
    assert first["expected_lr"] == pytest.approx([1e-3 * (1 - n / 20) for n in range(20)])
    assert late["expected_lr"] == pytest.approx([None] * 10 + first["expected_lr"][10:])
    assert not make_audit([], 0, audits["a late group"].processes, Expectation("cosine")).holds


def test_a_diagnosis_that_fails_costs_one_line(audits, monkeypatch):
    def broken(seen):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(result, "DIAGNOSES", (broken, *result.DIAGNOSES))
    audit = make_audit([], 0, audits["a late group"].processes, None)
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
