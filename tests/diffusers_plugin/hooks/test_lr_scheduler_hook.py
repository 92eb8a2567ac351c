"""`--lr_scheduler` of the launcher: the rates that the steps of an optimizer see, in programs that know nothing of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import started
from launched_here import launch_here, script_of
from runs import environment
from schedule_rows import close
from tables import cases
from test_launch import HOST_SCRIPT

from diffusers_lrlab import lr_curve
from diffusers_lrlab.diffusers_plugin.hook_table import explain
from diffusers_lrlab.schedules.expected import schedule_curves
from diffusers_lrlab.schedules.schedule import resolve_schedule

LR, N = 1e-3, 12
PROGRAM = """
import json, os, sys
import torch
from torch.optim import lr_scheduler as S

class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        seen.append([[group["lr"], group["betas"][0]] for group in self.param_groups])
        return super().step(closure)

def backward():
    model(torch.ones(2)).sum().backward()

seen, shown = [], []
model = torch.nn.Linear(2, 2)
torch.optim.AdamW([torch.zeros(1)])  # so that torch also hooks the step of the base class
optimizer = AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 5e-4}], lr=1e-3)
"""
LOOP = """
for update in range(12):
    backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    shown.append([*scheduler.get_last_lr()])
"""
COSINE = "scheduler = S.CosineAnnealingLR(optimizer, T_max=12)\n"
END = """
with open("seen.json", "w") as file:
    json.dump({"seen": seen, "shown": shown}, file)
"""
REX = "--lr_scheduler=rex"
FOR_12 = (REX, "--num_updates=12")


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Runs a program in this process, and returns its stderr."""
    monkeypatch.chdir(tmp_path)

    def run(program, options=FOR_12, arguments=(), status=0):
        (tmp_path / "program.py").write_text(program)
        found = launch_here(tmp_path / "program.py", *arguments, options=options)
        stderr = capfd.readouterr().err
        assert found == status, stderr
        return stderr

    return run


@pytest.fixture
def train(tmp_path, launch):
    """Runs a program; returns the learning rates and momenta that the steps saw, the shown rates, and stderr."""

    def run(*parts, **how):
        stderr = launch("".join((PROGRAM, *parts, END)), **how)
        written = json.loads((tmp_path / "seen.json").read_text())
        return np.array(written["seen"]), np.array(written["shown"]), stderr

    return run


def check(seen, curve, shown=None):
    """Both groups follow the curve, from 1e-3 and from half of it; the program shows the rate of the coming update."""
    close(seen[:, 0, 0], curve)
    close(seen[:, 1, 0], curve / 2)
    if shown is not None:
        close(shown[:-1, 0], curve[1:])
        close(shown[:-1, 1], curve[1:] / 2)


CHAINS = {
    "CosineAnnealingLR": COSINE,
    "OneCycleLR": "scheduler = S.OneCycleLR(optimizer, max_lr=[1e-3, 5e-4], total_steps=20)",
    "LinearLR, CosineAnnealingLR, SequentialLR": """
first = S.LinearLR(optimizer, total_iters=3)
scheduler = S.SequentialLR(optimizer, [first, S.CosineAnnealingLR(optimizer, T_max=9)], milestones=[3])
""",
    "ConstantLR, ExponentialLR, ChainedScheduler": """
scheduler = S.ChainedScheduler([S.ConstantLR(optimizer), S.ExponentialLR(optimizer, 0.5)])
""",
    "Own": """
class Own(S.LRScheduler):
    def __init__(self, name, optimizer):
        self.name = name
        super().__init__(optimizer)

    def get_lr(self):
        return [0.5 * group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch=None):
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = round(group["lr"], 4)

scheduler = Own("halves", optimizer)
""",
    "ReduceLROnPlateau": """
scheduler = S.ReduceLROnPlateau(optimizer, patience=0)
scheduler.step(0.0)
step = scheduler.step
scheduler.step = lambda: step(1.0)
""",
}
SPECS = ["rex:d=0.9", "wsd:decay_type=1-sqrt", "step:gamma=0.5,step_size=3", "cosine_with_min_lr:min_lr_ratio=0.1", "mdlrc"]


@cases(("name", "spec"), [(name, SPECS[index % len(SPECS)]) for index, name in enumerate(CHAINS)])
def test_whatever_the_program_makes_is_replaced(name, spec, train):
    options = [f"--lr_scheduler={spec}", f"--num_updates={N}", "--num_warmup_steps=2", "--strict_lr_audit"]
    seen, shown, stderr = train(CHAINS[name], LOOP, options=options)
    curve, momenta = schedule_curves(resolve_schedule(spec), LR, 0.9, 2, N)
    check(seen, curve, shown)
    close(seen[:, :, 1], np.stack([momenta, momenta], 1))
    assert (
        f"replaces {name} of AdamW: 12 updates (--num_updates), 2 of them warm-up, from a learning rate of 0.001" in stderr
    )
    assert "LR audit: 12 updates, every value that follows the clock was as expected" in stderr


NO_SCHEDULER = LOOP.replace("    scheduler.step()\n", "").replace("scheduler.get_last_lr()", "[1.0]")


def test_a_program_without_a_scheduler_gets_one(train):
    seen, _, stderr = train(NO_SCHEDULER)
    check(seen, lr_curve("rex", LR, 0, N))
    assert "--lr_scheduler rex drives AdamW, for which the program makes no scheduler: 12 updates" in stderr


MICRO_BATCHES = LOOP.replace(
    "    backward()\n", "    for micro in range(4):\n        backward()\n        scheduler.step()\n"
)
BEFORE_OPTIMIZER = LOOP.replace("optimizer.step()\n    scheduler.step()", "scheduler.step(update); optimizer.step()")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter")
@pytest.mark.parametrize("loop", [MICRO_BATCHES, BEFORE_OPTIMIZER], ids=["in_micro_batches", "before_the_optimizer"])
def test_updates_are_counted_and_not_micro_batches_nor_calls_of_the_scheduler(loop, train):
    seen, _, stderr = train(COSINE, loop, options=[*FOR_12, "--strict_lr_audit"])
    check(seen, lr_curve("rex", LR, 0, N))
    assert "LR audit: 12 updates, every value" in stderr


@cases("fused", [False, True])
def test_updates_that_a_gradient_scaler_skips_are_not_counted(fused, train):
    """The fused optimizer takes the step and leaves it out itself."""
    loop = """
groups = [{key: group[key] for key in ("params", "lr")} for group in optimizer.param_groups]
optimizer = AdamW(groups, fused=%s)
scheduler = S.CosineAnnealingLR(optimizer, T_max=12)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for update in range(14):
    loss = model(torch.ones(2)).sum()
    scaler.scale(loss * (float("inf") if update in (0, 5) else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    shown.append([group["lr"] for group in optimizer.param_groups])
"""
    seen, shown, _ = train(loop % fused)
    curve, rows = lr_curve("rex", LR, 0, N), [0, *range(5), *range(4, 12)]
    check(seen, curve[rows] if fused else curve)
    close(shown[:-1, 0], curve[rows][1:])


def test_rates_in_tensors_are_filled(train):
    tensors = "for group in optimizer.param_groups:\n    group['lr'] = torch.tensor(group['lr'], dtype=torch.float64)\n"
    kept = "held = optimizer.param_groups[0]['lr']\n"
    end = "assert optimizer.param_groups[0]['lr'] is held\nseen = [[[float(x) for x in g] for g in row] for row in seen]\n"
    record = LOOP.replace("scheduler.get_last_lr()", "map(float, scheduler.get_last_lr())")
    program = PROGRAM.replace('group["lr"], group', 'float(group["lr"]), group')
    seen, shown, _ = train(program, tensors, kept, COSINE, record, end)
    check(seen, lr_curve("rex", LR, 0, N), shown)


# --- resuming --------------------------------------------------------------------------------------------------------

STOPPED = """
first, last = (int(word) for word in sys.argv[1:3])
if first:
    state = torch.load("checkpoint")
    {load}
for update in range(first, last):
    backward()
    optimizer.step()
    {step}
    optimizer.zero_grad()
torch.save({{"optimizer": optimizer.state_dict(), "scheduler": {scheduler}, "update": last}}, "checkpoint")
"""
OPTIMIZER, SCHEDULER = (f"{name}.load_state_dict(state['{name}'])" for name in ("optimizer", "scheduler"))
LOADS = {
    "optimizer_then_scheduler": f"{OPTIMIZER}; {SCHEDULER}",
    "scheduler_then_optimizer": f"{SCHEDULER}; {OPTIMIZER}",
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    # ai-toolkit: sets the rates anew, makes its scheduler afterwards, and moves it.
    "ai-toolkit": f"{OPTIMIZER}; optimizer.param_groups[0]['lr'] = 1e-3; optimizer.param_groups[1]['lr'] = 5e-4; "
    "scheduler = S.CosineAnnealingLR(optimizer, T_max=12); scheduler.step(state['update'])",
    # OneTrainer: made anew at the last update.
    "last_epoch": "scheduler = S.CosineAnnealingLR(optimizer, T_max=12, last_epoch=state['update'] - 1)",
}


@pytest.mark.filterwarnings("ignore:The epoch parameter", "ignore:Detected call of `lr_scheduler.step")
@cases("load", LOADS)
def test_a_resumed_program_goes_on_where_it_was(load, train):
    make = "scheduler = S.SequentialLR(optimizer, [S.LinearLR(optimizer), S.CosineAnnealingLR(optimizer, T_max=12)], [3])\n"
    make = COSINE if load in ("last_epoch", "ai-toolkit") else make
    parts = make, STOPPED.format(load=LOADS[load], step="scheduler.step()", scheduler="scheduler.state_dict()")
    how = {"options": [*FOR_12, "--num_warmup_steps=2", "--strict_lr_audit"]}
    curve = lr_curve("rex", LR, 2, N)
    seen, _, _ = train(*parts, arguments=[0, 5], **how)
    check(seen, curve[:5])
    seen, _, stderr = train(*parts, arguments=[5, 12], **how)
    check(seen, curve[5:])
    assert "It goes on at update 5." in stderr


@cases(("optimizer", "load", "stepped"), [("AdamW", "optimizer_then_scheduler", 2), ("SGD", "scheduler", 1)])
def test_a_checkpoint_from_before_the_option(optimizer, load, stepped, launch):
    """Adam counts its steps, while a scheduler may have been stepped for each process. SGD counts none."""
    program = f"{PROGRAM}optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)\n{COSINE}"
    step = "; ".join(["scheduler.step()"] * stepped)
    program += STOPPED.format(load=LOADS[load], step=step, scheduler="scheduler.state_dict()")
    launch(program, arguments=[0, 5], options=[])
    assert "It goes on at update 5." in launch(program, options=[*FOR_12, "--strict_lr_audit"], arguments=[5, 12])


def test_a_state_that_is_loaded_again_sets_the_run_back(train):
    loop = "import copy\n" + LOOP + "    if update == 2: state = copy.deepcopy(optimizer.state_dict())\n"
    loop += "    if update == 5: optimizer.load_state_dict(state)\n"
    seen, _, _ = train(COSINE, loop)
    check(seen, lr_curve("rex", LR, 0, N)[[*range(6), *range(3, 9)]])


# --- the length of the run -------------------------------------------------------------------------------------------


def test_the_length_is_that_of_the_programs_arguments(train):
    parse = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--max_train_steps', type=int)\n"
    seen, _, stderr = train(parse + "parser.parse_args()\n", COSINE, LOOP, options=[REX], arguments=["--max_train_steps=14"])
    close(seen[:, 0, 0], lr_curve("rex", LR, 0, 14)[:N])
    assert "14 updates (by the program's arguments)" in stderr
    assert "The script did 12 updates instead of the expected 14" in stderr


@cases(("end", "status"), [("1 / 0", 1), ("sys.exit(3)", 3)])
def test_a_program_that_fails_is_not_told_of_another_number_of_updates(end, status, launch):
    program = PROGRAM + COSINE + LOOP.replace("range(12)", "range(5)")
    stderr = launch(f"{program}\n{end}\n", status=status)
    assert "LR audit: 5 updates, every value that follows the clock was as expected." in stderr
    assert "instead of the expected" not in stderr
    assert "The script did 5 updates instead of the expected" in launch(program)


def test_a_schedule_without_an_end_needs_no_length(train):
    options, said = ["--lr_scheduler=constant_with_warmup", "--num_warmup_steps=3"], "no end, with a warm-up of 3 updates"
    for more, text in (([], said), (["--num_updates=8"], "8 updates (--num_updates)")):  # after which it goes on
        seen, _, stderr = train(NO_SCHEDULER, options=options + more)
        check(seen, lr_curve("constant_with_warmup", LR, 3, N))
        assert text in stderr
        assert ("did 12 updates instead of the expected 8" in stderr) == bool(more)


def test_a_length_that_nothing_tells_is_an_error(launch):
    """The length of a scheduler may be in epochs or micro-batches. A program may catch the error, and ends all the same."""
    caught = LOOP.replace("    optimizer.step()", "    try: optimizer.step()\n    except ValueError: pass")
    for loop in (LOOP, caught):
        stderr = launch(PROGRAM + COSINE + loop, options=[REX], status=2)
        assert "error: --lr_scheduler rex: needs the number of updates of the run, which the program's" in stderr
        assert "Hint: give --num_updates N before the program's name." in stderr


def test_past_the_end_the_last_rate_stays_and_the_status_is_1(train):
    seen, shown, stderr = train(COSINE, LOOP, options=["--lr_scheduler=mdlrc", "--num_updates=8"], status=1)
    curve, momenta = schedule_curves(resolve_schedule("mdlrc"), LR, 0.9, 0, 8)
    rows = [*range(8), 7, 7, 7, 7]
    check(seen, curve[rows], shown)
    close(seen[:, 0, 1], momenta[rows])
    assert seen[-1, 0, 0] > 0
    assert stderr.count("--lr_scheduler mdlrc has ended after 8 updates, and the program goes on.") == 1
    assert f"4 updates ran past the end of the schedule, at a learning rate of {curve[-1]:.4g}, that of" in stderr
    assert "12 updates, every value that follows the clock was as expected" in stderr


# --- steps that torch's hooks do not see ------------------------------------------------------------------------------

REPLACED = """
import functools, types

def sgd(optimizer, closure=None):
    seen.append([[group["lr"], group["betas"][0]] for group in optimizer.param_groups])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.add_(parameter.grad, alpha=-group['lr'])

step = type(optimizer).step
"""
STEPS = {
    "method": "types.MethodType(sgd, optimizer)",  # as OneTrainer's
    "that_calls_the_class": "lambda *args: step(optimizer)",
    "that_was_replaced": "functools.partial(types.MethodType(sgd, optimizer))",
}


# torch warns of steps that are replaced after a scheduler is made.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:Seems like `optimizer.step")
@cases(
    ("step", "when"),
    [("method", "before"), ("that_calls_the_class", "after"), ("that_was_replaced", "without"), ("of_the_class", "before")],
)
def test_a_step_that_the_program_sets_is_counted_once(step, when, train):
    replaced = "AdamW.step = sgd\n" if step == "of_the_class" else f"optimizer.step = {STEPS[step]}\n"
    make = {"before": replaced + COSINE, "after": COSINE + replaced, "without": replaced}[when]
    loop = NO_SCHEDULER if when == "without" else LOOP
    seen, shown, stderr = train(REPLACED, make, loop, options=[*FOR_12, "--strict_lr_audit"])
    check(seen, lr_curve("rex", LR, 0, N), None if when == "without" else shown)
    assert "LR audit: 12 updates, every value" in stderr


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:Seems like `optimizer.step")
@cases("first", [0, 1])
def test_a_step_that_calls_the_class_only_sometimes_is_refused(first, launch):
    """As one that counts micro-batches."""
    step = f"calls = [{first}]\ndef sometimes(closure=None):\n    calls.append(0)\n"
    step += "    return step(optimizer) if len(calls) % 2 else None\noptimizer.step = sometimes\n"
    if first:
        step = step.replace("len(calls) % 2", "len(calls) % 2 == 0")
    program = PROGRAM + REPLACED + step + NO_SCHEDULER
    stderr = launch(program, options=[REX, "--num_updates=12"], status=2)
    assert "replaces the step of AdamW by one that only sometimes calls that of the class" in stderr


# --- wrong input -----------------------------------------------------------------------------------------------------

REFUSED = {
    "no_optimizer": ("print('hello')", "the program ended before a step of a torch optimizer was seen"),
    "two": (
        PROGRAM + "other = AdamW(model.parameters(), lr=1e-3)\nS.StepLR(other, 3)\n" + COSINE + LOOP + "    other.step()\n",
        "must have one optimizer to drive, got two (AdamW and AdamW), each with a scheduler",
    ),
    "two_without": (
        PROGRAM + "other = torch.optim.SGD(model.parameters(), lr=1e-3)\n" + NO_SCHEDULER + "    other.step()\n",
        "got two (AdamW and SGD), and no scheduler that would tell which one to drive",
    ),
    "own_rates": (
        PROGRAM + NO_SCHEDULER + "    optimizer.param_groups[1]['lr'] = 1e-4\n",
        "the program itself set a learning rate of 0.0001 where the schedule has 0.00047",
    ),
    "fused_backward": (
        PROGRAM + COSINE + LOOP.replace("optimizer.step()", "model.weight.detach().sub_(1e-3 * model.weight.grad)"),
        "the weights change, but no step of AdamW is seen",
    ),
    "no_rate": (
        PROGRAM + "for group in optimizer.param_groups:\n    group['lr'] = None\n" + NO_SCHEDULER,
        "AdamW has no learning rate (lr=None), but computes its own",
    ),
    "a_new_group": (
        PROGRAM
        + NO_SCHEDULER
        + "    if update == 2: optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})\n",
        "the parameter groups of the optimizer are not those of its first step",
    ),
    "groups_in_turn": (
        PROGRAM
        + """
groups = optimizer.param_groups
for update in range(3):
    backward()
    for group in groups:  # as ZeRO does
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = groups
""",
        "updates them one at a time, as ZeRO of DeepSpeed does",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@cases("case", REFUSED)
def test_programs_that_cannot_be_driven_are_refused(case, launch):
    program, message = REFUSED[case]
    stderr = launch(program, status=2)
    assert "error: --lr_scheduler" in stderr
    assert message in stderr
    assert stderr.count("the program ended") == message.count("the program ended")  # no second reason
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method", "ignore:Detected call of `lr_scheduler.step")
def test_a_compiled_step_has_the_rates_of_the_curve(launch):
    """By the weights, whose gradients are 1."""
    make = "step = torch.compile(optimizer.step, backend='eager')\nstart = model.weight.detach().clone()\n"
    program = PROGRAM.replace("optimizer = AdamW", "optimizer = torch.optim.SGD")
    program += make + COSINE + LOOP.replace("optimizer.step()", "step()")
    moved = float(lr_curve("rex", LR, 0, N).sum())
    end = f"torch.testing.assert_close(start - model.weight, torch.full((2, 2), {moved}), rtol=1e-4, atol=1e-6)\n"
    assert "LR audit: 12 updates, every value" in launch(program + end)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (["--lr_scheduler=adaptive"], [], "must be a function of the update, got a schedule that follows a loss"),
        ([REX], ["--lr_scheduler_type=cosine"], "(--lr_scheduler_type=cosine after its name). Hint: leave one of them out."),
        ([REX, "--fix_lr_clock"], [], "--fix_lr_clock has no effect with --lr_scheduler"),
        ([REX, "--num_updates=5", "--num_warmup_steps=5"], [], "--num_warmup_steps 5: Warm-up of 5 updates does not fit"),
        (["--lr_scheduler=constant", "--num_warmup_steps=0.5"], [], "'constant' has no warm-up"),
    ],
)
def test_wrong_options_are_refused_before_the_program_runs(options, arguments, message, launch):
    stderr = launch("raise SystemExit('it ran')", options=options, arguments=arguments, status=2)
    assert message in stderr


def test_an_optimizer_without_a_scheduler_may_train_beside_it(train):
    other = "other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)\n"
    loop = LOOP.replace("optimizer.step()", "other.step(); optimizer.step(); assert other.param_groups[0]['lr'] == 1e-3")
    seen, shown, _ = train(other, COSINE, loop)
    check(seen, lr_curve("rex", LR, 0, N), shown)


def test_a_step_that_fails_and_is_tried_again_counts_once(train):
    failing = """
    try: optimizer.step(lambda: 1 / 0)
    except ZeroDivisionError: seen.pop()
    optimizer.step()
"""
    seen, shown, _ = train(COSINE, LOOP.replace("    optimizer.step()\n", failing))
    check(seen, lr_curve("rex", LR, 0, N), shown)


def test_the_local_rank_before_the_name_is_passed_on(launch):
    """As `deepspeed --module` puts it, and older `torch.distributed.launch`."""
    program = "import json, pathlib, sys\npathlib.Path('seen.json').write_text(json.dumps(sys.argv[1:]))"
    launch(program, options=["--local-rank=3", "--num_updates=3"], arguments=["--deepspeed", "--config", "x.toml"])
    assert json.loads(Path("seen.json").read_text()) == ["--local-rank=3", "--deepspeed", "--config", "x.toml"]


def test_explain_tells_what_is_replaced(tmp_path):
    def told(text):
        return next(line for line in explain(script_of(tmp_path, text)).splitlines() if " --lr_sch" in line)

    assert "the schedule made at line 18 is replaced" in told(PROGRAM + COSINE)
    assert "the optimizer (made at line 17) gets a schedule, as this file makes none" in told(PROGRAM)
    assert "--lr_scheduler      this file makes no scheduler and no optimizer; those of its modules" in told(
        "import trainer\ntrainer.main()\n"
    )


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_with_accumulation_resume_on_the_curve(tmp_path):
    """By `accelerate launch` itself, and the second part by `torchrun`; accelerate steps the scheduler once per process."""
    ours = ["-m", "diffusers_lrlab.launch", "--lr_scheduler=rex:d=0.9", "--num_warmup_steps=2", "--strict_lr_audit"]
    ours += [HOST_SCRIPT, f"--output_dir={tmp_path}", "--gradient_accumulation_steps=4", "--max_train_steps=12"]
    by_accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    by_accelerate += ["--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={started.free_port()}"]
    by_torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**environment(), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    for launcher, argument, updates in ((by_accelerate, "--stop_after=5", 5), (by_torchrun, "--resume", 7)):
        command = [sys.executable, "-m", *launcher, *ours, argument]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        replaced = "replaces LambdaLR of AdamW: 12 updates (by the program's arguments), 2 of them warm-up"
        assert done.stderr.count(replaced) == 1
        assert f"LR audit: {updates} updates, every value" in done.stderr
    assert "It goes on at update 5." in done.stderr
    rows, curve = json.loads((tmp_path / "rows.json").read_text()), lr_curve("rex:d=0.9", LR, 2, N)
    close([row["lr"] for row in rows], curve[5:])
    close([row["logged"] for row in rows[:-1]], curve[6:])
