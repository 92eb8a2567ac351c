"""What is known of a third-party script: faults and patterns in its text, its option for a schedule, and its updates."""

import functools
from types import SimpleNamespace

import pytest
from launched_here import script_of
from tables import cases

from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.diffusers_plugin.host.source import NotRecognised, find_faults


def made(warmup, length, more=""):
    return f"{more}\nget_scheduler(name, num_warmup_steps={warmup}, num_training_steps={length})"


BY_PROCESSES = ("args.lr_warmup_steps * accelerator.num_processes", "args.max_train_steps * accelerator.num_processes")
LENGTH = "num_training_steps_for_scheduler"


@cases(
    ("text", "names"),
    [
        (made("args.lr_warmup_steps * args.gradient_accumulation_steps", "len(train_dataloader)"), ["LR: accumulation"]),
        (made("num_warmup_steps_for_scheduler", LENGTH), []),
        (made("num_warmup_steps_for_scheduler", LENGTH, "Accelerator(split_batches=True)"), ["LR: processes"]),
        (made(*BY_PROCESSES), ["LR: epochs"]),
        (made(*BY_PROCESSES, f"{LENGTH} = 3"), ["LR: epochs"]),
        (made("args.lr_warmup_steps", "args.max_train_steps"), ["LR: processes"]),
        (made("args.lr_warmup_steps", "args.max_train_steps", "Accelerator(split_batches=True)"), []),
        ("from transformers import get_scheduler\n" + made(*BY_PROCESSES), []),
        # A schedule that the script steps itself is told of when it runs, and its steps are seen.
        (f"scheduler = {made(*BY_PROCESSES).strip()}\naccelerator.prepare(model, scheduler)", ["LR: epochs"]),
        (f"scheduler = {made(*BY_PROCESSES).strip()}\naccelerator.prepare(model)", []),
    ],
)
def test_faults(tmp_path, text, names):
    assert [name for name, _ in find_faults(script_of(tmp_path, text))] == names


def test_forms_are_recognised_by_the_text(tmp_path):
    form = functools.partial(script_of, tmp_path)
    index = "t = torch.randint(0, s.config.num_train_timesteps, (b,))\n"
    density = "u = compute_density_for_timestep_sampling(b)\ni = (u * s.config.num_train_timesteps).long()\n"
    assert form(index).sampling_pattern == "index"
    assert form(density).sampling_pattern == "density"
    assert not form(density + "x = (1.0 - sigmas) * data + sigmas * noise").sigma_scales_data
    assert form(density + "x = (1.0 - sigmas) * noise + sigmas * data").sigma_scales_data
    for text, reason in [
        (index + density, "in two ways .lines 1, 2."),
        ("u = compute_density_for_timestep_sampling(b)\n", "as noise levels, not as indices"),
        ("t = torch.randint(0, args.num_ddim_timesteps, (b,))\n", "it calls neither"),
        ("not python", "it calls neither"),
    ]:
        with pytest.raises(NotRecognised, match=reason):
            _ = form(text).sampling_pattern


def test_epochs_of_sd_scripts_come_before_its_steps():
    run = HostRun()
    run.arguments, run.training_loader = {"max_train_steps": 1600, "max_train_epochs": None}, [None] * 9
    run.accelerator = SimpleNamespace(gradient_accumulation_steps=4)
    assert run.count_updates() == 1600
    run.arguments["max_train_epochs"] = 2
    assert run.count_updates() == 6
