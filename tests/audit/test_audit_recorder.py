"""The recorder sees every real update, and nothing else."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from audit_programs import audit_of, audits_of_all, names_of, process_of

from diffusers_lrlab.audit import recorder
from diffusers_lrlab.audit.report import lines_of
from diffusers_lrlab.audit.result import Expectation, make_audit
from diffusers_lrlab.audit.run import as_json

PROGRAMS = {
    "base class": """
        class Own(torch.optim.AdamW):
            def step(self, closure=None):
                return super().step(closure)
        adam()
        train(Own(model.parameters(), lr=1e-3), 5)
    """,
    "no constructor": """
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer
            param_groups = property(lambda self: self.optimizer.param_groups)
            def step(self): self.optimizer.step()
            def zero_grad(self): self.optimizer.zero_grad()
        w = Wrapper(adam())
        s = get_scheduler('linear', w, 0, 5)
        train(w, 5, step=s.step)
    """,
    "closure": """
        o = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        def closure():
            o.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss
        for _ in range(4): o.step(closure)
    """,
    "sharpness-aware": """
        o = adam()
        for _ in range(5):
            model(x).square().mean().backward()
            with torch.no_grad():
                model.weight.add_(model.weight.grad, alpha=0.05)
            o.zero_grad()
            model(x).square().mean().backward(); o.step(); o.zero_grad()
    """,
    "failed step": """
        class Fails(torch.optim.SGD):
            def step(self, closure=None):
                if fails: raise MemoryError
                return super().step(closure)
        o = Fails(model.parameters(), lr=1e-3)
        fails = True
        for _ in range(2):
            try: train(o, 1)
            except MemoryError: pass
            fails = False
        train(o, 3)
    """,
    "two": """
        other = torch.nn.Linear(4, 4)
        d = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9)
        g = adam()
        for _ in range(6):
            d.zero_grad(); other(model(x).detach()).mean().backward(); d.step()
            g.zero_grad(); other(model(x)).mean().backward(); g.step()
    """,
    "checkpointed": """
        from torch.utils.checkpoint import checkpoint
        o = adam()
        for _ in range(3):
            checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).mean().backward()
            o.step(); o.zero_grad()
    """,
    "model's zero_grad": "o = adam(); train(o, 10, accumulation=4, micro_end=model.zero_grad)",
    "fused": """
        o, scaler = adam(fused=True), torch.amp.GradScaler("cpu", init_scale=8.0)
        for n in range(8):
            scaler.scale(model(x).mean() * (float("inf") if n < 2 else 1)).backward()
            scaler.step(o); scaler.update(); o.zero_grad()
    """,
    "expected": "o = adam(); s = get_scheduler('cosine', o, 4, 40); train(o, step=s.step)",
    "rate set by a hook": """
        o = torch.optim.SGD(model.parameters(), lr=1.0)
        def set_rate(optimizer, *_): optimizer.param_groups[0]["lr"] = 0.25
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        hook = register_optimizer_step_pre_hook(set_rate)
        train(o, 3)
        hook.remove()
    """,
    "never": "adam()\nmodel(x).mean().backward()",
    "no backward": "adam()",
    "no optimizer": "model(x).mean().backward()",
}


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    return audits_of_all(PROGRAMS, tmp_path_factory.mktemp("records"))


def only(audit):
    (section,) = audit.sections
    return section.optimizer


@pytest.mark.parametrize(
    ("program", "name", "num_updates"),
    [("base class", "Own", 5), ("no constructor", "AdamW", 5), ("closure", "LBFGS", 4), ("failed step", "Fails", 4)],
)
def test_a_step_inside_a_step_counts_once_and_a_failed_one_hides_none(audits, program, name, num_updates):
    optimizer = only(audits[program])
    assert (optimizer.name, optimizer.num_updates) == (name, num_updates)


def test_backward_passes_in_a_closure_belong_to_its_step(audits):
    assert set(only(audits["closure"]).column("b")) <= {1, 2, 3, 4}


def test_gradients_used_outside_of_a_step_are_not_called_deleted(audits):
    assert only(audits["sharpness-aware"]).num_updates == 5
    assert not audits["sharpness-aware"].processes[0].discarded


def test_an_error_of_the_recorder_ends_the_audit_and_not_the_program(tmp_path):
    program = """
    o = adam(); train(o, 5)
    o.param_groups[0]["betas"] = 1  # which the recorder cannot read, and the program never does
    class Bare(torch.optim.SGD):
        pass
    b = Bare(model.parameters(), lr=0.1); b.param_groups[0]["betas"] = 1
    train(b, 5)
    print("went on", file=__import__("sys").stderr)
    """
    status, stderr = process_of(program, tmp_path)
    assert status == 0, stderr
    assert stderr.count("lrlab audit: recording ends here: TypeError") == 1
    assert "went on" in stderr


def test_optimizers_that_take_turns_are_told_apart(audits):
    sgd, adam = audits["two"].sections
    assert (sgd.optimizer.name, adam.optimizer.name) == ("SGD", "AdamW")
    for section in (sgd, adam):
        assert section.optimizer.num_updates == 6
        assert section.optimizer.column("b").tolist() == [1] * 6
        assert not section.findings
    assert {*sgd.optimizer.of_groups("m")[:, 0]} == {0.9}


@pytest.mark.parametrize(
    ("program", "column", "expected"),
    [
        ("checkpointed", "b", [1, 1, 1]),
        ("fused", "i", [1, 1, 0, 0, 0, 0, 0, 0]),  # overflows, which the optimizer itself skips
    ],
)
def test_backward_passes_and_overflows_are_counted(audits, program, column, expected):
    assert only(audits[program]).column(column).tolist() == expected


def test_the_rate_is_that_of_the_step(audits):
    """Also if a hook sets it, as the launcher does, or a wrapper is scheduled around the optimizer."""
    assert only(audits["rate set by a hook"]).lr[:, 0].tolist() == [0.25] * 3
    np.testing.assert_allclose(only(audits["no constructor"]).lead, [1e-3, 8e-4, 6e-4, 4e-4, 2e-4])
    assert only(audits["no constructor"]).scheduler["length"] == 5


def test_gradients_deleted_by_the_model_are_seen(audits):
    assert "discarded" in names_of(audits["model's zero_grad"])


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("never", "no optimizer took a step. The program made AdamW and had 1 backward pass."),
        ("no backward", "The program made AdamW and had 0 backward passes."),
        ("no optimizer", "The program made no torch optimizer and had 1 backward pass. An optimizer that is not a torch"),
    ],
)
def test_without_updates_the_report_says_what_there_was(audits, program, text):
    assert text in lines_of(audits[program])[0]


def test_an_exception_leaves_the_audit_of_what_ran(tmp_path):
    program = "o = adam(); s = get_scheduler('linear', o, 0, 40); train(o, 10, step=s.step); raise ValueError('stop')"
    audit = audit_of(program, tmp_path, status=1)
    assert only(audit).num_updates == 10
    assert "too_long" not in names_of(audit)  # it did not end by itself
    assert "The program ended with status 1; this is the audit of what ran." in lines_of(audit)


@pytest.mark.parametrize(
    ("program", "expectation", "first"),
    [
        ("expected", Expectation("cosine", num_warmup_steps=4), None),
        ("expected", Expectation("cosine", 40, 4, 2e-3), 1),
        ("expected", Expectation("cosine", 50, 4), 5),
        ("sharpness-aware", Expectation("demon"), 1),
    ],
    ids=["right", "other_peak", "longer", "momentum_is_kept"],
)
def test_an_expectation_is_compared_update_by_update(audits, program, expectation, first):
    audit = make_audit([], 0, audits[program].processes, expectation)
    assert audit.sections[0].comparison.first_deviating_update == first
    assert audit.holds == (first is None)
    assert ("NOT as expected" in " ".join(lines_of(audit))) == (first is not None)


def test_a_run_too_short_for_the_expectation_is_still_reported(audits):
    audit = make_audit([], 0, audits["expected"].processes, Expectation("cosine", num_warmup_steps=50))
    assert not audit.holds
    assert "Expected cosine: cannot be compared. Warm-up of 50 updates does not fit" in "\n".join(lines_of(audit))
    assert as_json(audit)["as_expected"] is False
    assert as_json(audits["expected"])["optimizers"][0]["scheduler_steps"] == list(range(40))


ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
o = adam()
s = get_scheduler('cosine', o, 16, 160)
data = torch.utils.data.DataLoader(torch.randn(640, 4), batch_size=4 // accelerator.num_processes)
model, o, data, s = accelerator.prepare(model, o, data, s)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        o.step()
        s.step()
        o.zero_grad()
"""


def test_accelerate_steps_a_prepared_scheduler_once_per_update(tmp_path):
    """The case that everybody meets: a cosine for all micro-batches, in a script with accumulation 4."""
    audit = audit_of(ACCELERATE, tmp_path)
    optimizer = only(audit)
    assert optimizer.num_updates == 40
    assert {*optimizer.column("b")} == {4}
    assert {*np.diff(optimizer.column("s"))} == {1}
    assert {*optimizer.column("d")[:16]} == {4}  # accelerate divides the loss
    assert names_of(audit) & {"too_long", "summed", "discarded"} == {"too_long"}


RECORDER = Path(recorder.__file__).parent


@pytest.mark.parametrize("path", [*RECORDER.glob("*.py"), *RECORDER.parent.glob("startup/*.py")], ids=lambda path: path.name)
def test_what_runs_in_the_program_is_python_3_10_and_needs_torch_alone(path):
    nodes = [*ast.walk(ast.parse(path.read_text(), feature_version=(3, 10)))]
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    assert {name.partition(".")[0] for name in imported} - {"torch"} <= sys.stdlib_module_names
    assert {node.level for node in nodes if isinstance(node, ast.ImportFrom)} <= {0, 1}


def test_two_programs_of_a_command_are_told_apart(tmp_path):
    for program in ("train(adam(), 5)", "train(adam(), 7)"):
        audit = audit_of(program, tmp_path)
    assert only(audit).num_updates == 5
    assert "the first program of the command that trained; 1 other process also trained" in " ".join(lines_of(audit))


@pytest.mark.slow
def test_a_full_disk_ends_the_records_and_not_the_program(tmp_path):
    program = """
    import os
    def full(*_): raise OSError(28, "No space left on device")
    train(o := adam(), 5)
    os.write = full
    train(o, 2000)
    """
    audit = audit_of(program, tmp_path)
    assert 5 <= only(audit).num_updates < 2000


@pytest.mark.slow
def test_compiled_training_keeps_its_bits(tmp_path):
    program = """
    o = adam(lr=torch.tensor(1e-3)); s = get_scheduler('linear', o, 0, 40)
    model = torch.compile(model, backend="aot_eager", fullgraph=True)
    step = torch.compile(o.step, backend="aot_eager")
    for _ in range(8):
        model(x).square().mean().backward(); step(); s.step(); o.zero_grad()
    torch.save(model.state_dict(), "PATH")
    """
    weights = []
    for records in (False, True):
        path = tmp_path / f"{records}.pt"
        status, stderr = process_of(program.replace("PATH", str(path)), tmp_path / "records", records=records)
        assert status == 0, stderr
        weights.append(torch.load(path))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_sharded_weights_are_audited_without_their_norm(tmp_path):
    program = """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    o = adam(); s = get_scheduler('cosine', o, 0, 8)
    train(o, 8, step=s.step, before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    dist.destroy_process_group()
    """
    audit = audit_of(program, tmp_path)
    assert only(audit).num_updates == 8
    assert "engine_hides" in names_of(audit)


@pytest.mark.slow
def test_two_processes_are_compared_and_the_main_one_reports(tmp_path):
    audit = audit_of(ACCELERATE, tmp_path / "same", processes=2)
    assert len(audit.processes) == 2
    assert audit.processes[0].rank == 0
    assert audit.differing_process is None
    assert {*np.diff(only(audit).column("s"))} == {2}  # accelerate steps it for each process
    other = ACCELERATE.replace("o = adam()", "import os; o = adam(1e-3 * (1 + int(os.environ['RANK'])))")
    audit = audit_of(other, tmp_path / "other", processes=2)
    assert audit.differing_process == (1, 1)
    assert "process 1 had a different learning rate" in " ".join(lines_of(audit))
