"""The schedules in `transformers.optimization` and by class path, with the calls that trainers make."""

import ast
import functools
import importlib

import pytest
import torch
import transformers
from hosts import at_least
from launched_here import launch_here
from schedule_rows import BASE, Row, close, run
from tables import cases
from transformers.trainer_utils import SchedulerType

from diffusers_lrlab import get_scheduler, list_schedulers, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.schedules import scheduler as functions
from diffusers_lrlab.schedules.registries import SCHEDULERS

N, WARMUP = 24, 4
each_name = cases("name", [name for name in list_schedulers() if "feedback" not in SCHEDULERS[name].traits])


def check(row, scheduler, optimizer):
    close(run(scheduler, optimizer, N)[:, 0, 0], row.curve(N, WARMUP))


class Line(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


def test_trainer_runs_the_curve_with_accumulation_and_resumes(tmp_path):
    options = {"max_steps": 6, "warmup_steps": WARMUP, "gradient_accumulation_steps": 2, "learning_rate": BASE}
    options |= {"lr_scheduler_type": "rex", "lr_scheduler_kwargs": {"d": 0.9}, "save_strategy": "steps", "save_steps": 4}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    for done, checkpoint in ((0, None), (4, str(tmp_path / "checkpoint-4"))):
        made, lrs = transformers.Trainer(Line(1, 1), arguments, train_dataset=[{"x": torch.ones(1)}] * 8), []
        made.create_optimizer()
        made.optimizer.register_step_pre_hook(lambda optimizer, *_, lrs=lrs: lrs.append(optimizer.param_groups[0]["lr"]))
        made.train(resume_from_checkpoint=checkpoint)
        close(lrs, lr_curve("rex:d=0.9", BASE, WARMUP, 6)[done:])


needs_parser = pytest.mark.skipif(not at_least("transformers", 5, 0), reason="4.56 cannot resolve its own annotations here")
SCRIPT = """
import torch, transformers

class Line(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}

(arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses()
transformers.Trainer(Line(1, 1), arguments, train_dataset=[{"x": torch.ones(1)}] * 64).train()
"""


@needs_parser
@cases("length", ["--max_steps=6", "--num_train_epochs=1.5"])
def test_a_script_with_trainer_under_the_launcher(length, tmp_path, capfd):
    """Its options of length and accumulation have transformers' names."""
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--use_cpu", "--save_strategy=no", "--report_to=none", "--disable_tqdm=true", "--warmup_steps=2"]
    options += [f"--output_dir={tmp_path}", "--gradient_accumulation_steps=2", "--lr_scheduler_type=wsd:decay_type=1-sqrt"]
    assert launch_here(tmp_path / "script.py", *options, length, options=["--strict_lr_audit"]) == 0
    assert "LR audit: 6 updates, every value that follows the clock was as expected.\n" in capfd.readouterr().err


def by_name_as_in_sd_scripts(name, optimizer, num_decay_steps=0, **kwargs):
    """The call of sd-scripts and musubi-tuner for a name that they do not treat themselves."""
    function = transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    clock = {"num_warmup_steps": WARMUP, "num_training_steps": N, "num_decay_steps": num_decay_steps}
    return function(optimizer, **clock, **kwargs)


def by_path(path, optimizer, *arguments):
    """Their call for `--lr_scheduler_type path --lr_scheduler_args arguments`."""
    kwargs = {}
    for argument in arguments:
        key, value = argument.split("=")
        kwargs[key] = ast.literal_eval(value)
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(optimizer, **kwargs)


@cases(("name", "kwargs"), [("rex", {"d": 0.9}), ("wsd:decay_type=1-sqrt", {}), ("mdlrc", {})])
def test_a_decay_of_0_steps_is_none_and_one_of_more_is_of_wsd_alone(name, kwargs):
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=BASE)
    applied = run(by_name_as_in_sd_scripts(name, optimizer, **kwargs), optimizer, N)
    close(applied[:, 0, 0], lr_curve(name, BASE, WARMUP, N, kwargs))
    if name == "rex":
        with pytest.raises(LabError, match="'rex' does not take 'num_decay_steps'"):
            by_name_as_in_sd_scripts("rex", optimizer, num_decay_steps=5)


@cases("library", ["diffusers", "transformers"])
def test_total_iters_is_the_length(library):
    table = importlib.import_module(f"{library}.optimization")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    function = table.TYPE_TO_SCHEDULER_FUNCTION[table.SchedulerType("rex:d=0.9")]
    applied = run(function(optimizer, total_iters=N, num_warmup_steps=WARMUP), optimizer, N)
    close(applied[:, 0, 0], lr_curve("rex:d=0.9", BASE, WARMUP, N))
    with pytest.raises(LabError, match="num_training_steps=9 and total_iters=24, two names of the same parameter"):
        function(optimizer, num_training_steps=9, total_iters=N)


@each_name
def test_every_schedule_has_a_path(name):
    """Also as OneTrainer's CUSTOM calls it, with a `last_epoch` of -1 in a new run."""
    row = Row(name, {})
    optimizer, warmup = row.optimizer(), row.warmup(WARMUP)
    clock = (f"num_training_steps={N}", f"num_warmup_steps={warmup}", "last_epoch=-1")
    check(row, by_path(f"diffusers_lrlab.get_{name}_schedule", optimizer, *clock), optimizer)


def test_arguments_of_a_command_line_are_read_or_refused():
    rex = functools.partial(by_path, "diffusers_lrlab.get_rex_schedule", torch.optim.SGD([torch.zeros(1)], lr=BASE))
    assert rex("num_training_steps=24.0", "d=0.9", "num_warmup_steps=0.5").plan["num_warmup_steps"] == 12
    with pytest.raises(LabError, match=r"d='0.9' of get_rex_schedule\(\): must be a number, got '0.9' \(str\)"):
        rex("num_training_steps=24", "d='0.9'")
    with pytest.raises(LabError, match="'rex' needs num_training_steps"):
        rex()
    with pytest.raises(AttributeError, match="Did you mean 'get_rex_schedule'"):
        by_path("diffusers_lrlab.get_rexx_schedule", None)
    assert {f"get_{name}_schedule" for name in list_schedulers()} <= {*dir(functions)}


@each_name
def test_a_scheduler_has_nothing_that_trainers_overwrite(name):
    row = Row(name, {})
    optimizer = row.optimizer()
    scheduler = get_scheduler(name, optimizer, row.warmup(WARMUP), N)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    for attribute in ("total_steps", "last_step", "num_update_steps_per_epoch"):
        assert not hasattr(scheduler, attribute)
    # ai-toolkit resumes by `step(number of updates)`, of which torch warns.
    with pytest.warns(UserWarning, match="lr_scheduler.step()|epoch parameter"):
        scheduler.step(10)
    close(run(scheduler, optimizer, 5)[:, 0, 0], row.curve(N, WARMUP)[10:15])
