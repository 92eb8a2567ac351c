"""A hook of the launcher is one file and one row, here a made-up one; and what is known of a script by its text."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launched_here import launch_here, script_of
from tables import cases

from diffusers_lrlab.core.environment import EXTRAS
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.values import Range
from diffusers_lrlab.diffusers_plugin import hook_table
from diffusers_lrlab.diffusers_plugin.hook_table import HOOKS, HookEntry, HookOption, explain, recognisers
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.diffusers_plugin.host.source import HostScript, NotRecognised, find_faults
from diffusers_lrlab.diffusers_plugin.installed_hooks import Host
from diffusers_lrlab.launch import make_parser

SCRIPTS = Path(__file__).parents[1] / "scripts"
ASKED = "--count_updates cannot be used in this script: "


class CountingHook:
    """Counts updates, and numbers that are drawn by `torch.rand`."""

    def __init__(self, run, first):
        self.run, self.num_seen, self.num_drawn = run, first, 0

    def install(self):
        self.run.on_update.append(self.count)
        self.run.patches.wrap(torch, "rand", self.draw)

    def count(self):
        self.num_seen += 1

    def draw(self, rand, *args, **kwargs):
        self.num_drawn += 1
        return rand(*args, **kwargs)

    def report(self):
        return f"--count_updates: {self.num_seen} updates, and numbers drawn: {self.num_drawn > 0}."


def recognise(script):
    if not script.calls("backward"):
        raise NotRecognised("it calls no backward")
    return "its updates are counted"


def make(host):
    recognise(host.script)
    return CountingHook(host.run, host.options.count_from or 0)


def row(acts=False, **more):
    option = HookOption(name="count_updates", value_type=bool, help="Count the updates.", acts_in_range_test=acts)
    setting = HookOption(
        name="count_from", value_type=int, metavar="N", range=Range("[1, 9]", whole=True), help="Begin with this number."
    )
    return HookEntry(module=sys.modules[__name__], option=option, settings=(setting,), **more)


@pytest.fixture
def register(monkeypatch):
    return lambda **more: monkeypatch.setitem(HOOKS, "counting", row(**more))


def options_of(*words, script=SCRIPTS / "ddpm_script.py"):
    return make_parser().parse_args([*words, str(script)])


def made(options, range_test=None):
    with Patches() as patches:
        return Host(options, range_test, patches).hooks.keys()


def test_its_option_is_in_help_and_on_its_page_and_explained(register, tmp_path):
    before = {*hook_table.options_table().splitlines()}
    register()
    new = {*hook_table.options_table().splitlines()} - before
    assert new == {"| `--count_updates` | Count the updates. | – |", "| `--count_from N` | Begin with this number. | – |"}
    assert "--count_from N" in make_parser().format_help()
    assert "its updates are counted" in explain(HostScript(str(SCRIPTS / "ddpm_script.py")))
    assert "not here: it calls no backward" in explain(script_of(tmp_path, "print()"))


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (["--count_from=2"], {}, "--count_from 2 has no effect without --count_updates. Add it, or remove --count_from."),
        (["--count_updates", "--count_from=10"], {}, "--count_from 10: must be a whole number in .1, 9., got 10"),
        (["--count_updates"], {"extra": "none"}, "--count_updates needs no_such_package, not installed here"),
        (["--strict"], {}, "--strict has no effect without one of .*, --find_lr, --count_updates. Add one"),
    ],
    ids=["setting_alone", "out_of_range", "missing_package", "strict_alone"],
)
def test_what_has_no_effect_is_refused(register, words, more, message, monkeypatch):
    monkeypatch.setitem(EXTRAS, "none", {"no_such_package": "1"})
    register(**more)
    with pytest.raises(LabError, match=message):
        hook_table.check(options_of(*words))


def test_an_empty_value_counts_as_given_and_a_second_one_is_an_error():
    options = options_of("--ema=")
    assert [name for name, entry in HOOKS.items() if entry.is_asked(options)] == ["clock", "ema"]
    with pytest.raises(LabError, match="--ema warmup_power: must be given once, got constant before. Hint: leave one out"):
        options_of("--ema=constant", "--ema", "warmup_power")


def test_it_is_used_and_put_back(register, tmp_path, capsys):
    register()
    rand = torch.rand
    options = ("--count_updates", "--count_from=1", "--strict")
    assert launch_here(SCRIPTS / "ddpm_script.py", f"--output_dir={tmp_path}", options=options) == 0
    assert "diffusers_lrlab: --count_updates: 7 updates, and numbers drawn: True.\n" in capsys.readouterr().err
    assert torch.rand is rand


def test_it_is_not_made_where_it_is_not_recognised(register, tmp_path, capsys):
    register()
    script = script_of(tmp_path, "print()").path
    assert made(options_of("--count_updates", script=script)) == {"clock"}
    assert f"diffusers_lrlab: {ASKED}it calls no backward. It is not used.\n" == capsys.readouterr().err
    with pytest.raises(LabError, match=r"it calls no backward\. \(--strict\)"):
        made(options_of("--count_updates", "--strict", script=script))


def test_a_hook_has_those_that_it_needs(tmp_path, capsys):
    assert made(options_of("--log_timesteps")) == {"clock", "timesteps", "weighting", "log"}
    assert made(options_of("--timestep_sampler=logit_normal")) == {"clock", "timesteps"}
    unbiased = "--timestep_sampler=logit_normal:unbiased=true"
    assert made(options_of(unbiased)) == {"clock", "timesteps", "weighting"}
    # A sampler that is refused, for want of losses to follow, is not that of other hooks.
    both = options_of("--timestep_sampler=infonoise", "--loss_weighting=min_snr", script=SCRIPTS / "flow_script.py")
    assert made(both) == {"clock", "timesteps", "weighting"}
    assert "--timestep_sampler cannot be used in this script: it does not call F.mse_loss" in capsys.readouterr().err
    # Two losses of a timestep, as of a preference, cannot be weighted.
    draw = "torch.randint(0, scheduler.config.num_train_timesteps, (size,)).repeat(2)"
    script = script_of(tmp_path, f"timesteps = {draw}\nF.mse_loss(a, b)\n").path
    assert made(options_of(unbiased, "--log_timesteps", script=script)) == {"clock"}
    said = capsys.readouterr().err
    for option in ("--timestep_sampler", "--log_timesteps"):
        assert f"{option} cannot be used in this script: it uses each timestep for several images (line 1)" in said


@pytest.mark.parametrize("acts", [False, True])
def test_it_is_idle_in_a_range_test_unless_it_acts_there(register, capsys, acts):
    from diffusers_lrlab.finder.find import ScriptTest

    register(acts=acts)
    hooks = made(options_of("--find_lr", "--count_updates", "--count_from=2"), ScriptTest())
    assert ("counting" in hooks, "find_lr" in hooks) == (acts, True)
    named = "--count_from" if acts else "--count_updates, --count_from"
    assert f"--find_lr does not train: {named} has no effect on the test." in capsys.readouterr().err


def test_each_option_is_explained_in_scripts_of_both_forms(tmp_path):
    """They save no weights, and one does not show the losses of images."""
    for name, expected in (("ddpm", ["--ema"]), ("flow", ["--log_timesteps", "--ema"])):
        text = explain(HostScript(str(SCRIPTS / f"{name}_script.py")))
        assert [line.split()[0] for line in text.splitlines() if "not here" in line] == expected
        assert all(f"  {option} " in text for option in recognisers())
    text = explain(script_of(tmp_path, "print('hello')\n"))
    assert text.count("not here: it ") == len(recognisers()) - 1  # --lr_scheduler acts in modules, too
    assert "By itself" not in text


def test_explaining_runs_nothing(tmp_path, capfd):
    """With the script's own arguments behind its name."""
    script = script_of(tmp_path, "raise SystemExit('it ran')").path
    assert launch_here(script, "--its=own", options=["--explain"]) == 0
    said = capfd.readouterr()
    assert (said.err, said.out[: len(script)]) == ("", script)


def makes(warmup, length, more=""):
    return f"{more}\nget_scheduler(name, num_warmup_steps={warmup}, num_training_steps={length})"


BY_PROCESSES = ("args.lr_warmup_steps * accelerator.num_processes", "args.max_train_steps * accelerator.num_processes")
LENGTH = "num_training_steps_for_scheduler"


@cases(
    ("text", "names"),
    [
        (makes("args.lr_warmup_steps * args.gradient_accumulation_steps", "len(train_dataloader)"), ["LR: accumulation"]),
        (makes("num_warmup_steps_for_scheduler", LENGTH), []),
        (makes("num_warmup_steps_for_scheduler", LENGTH, "Accelerator(split_batches=True)"), ["LR: processes"]),
        (makes(*BY_PROCESSES), ["LR: epochs"]),
        (makes("args.lr_warmup_steps", "args.max_train_steps"), ["LR: processes"]),
        (makes("args.lr_warmup_steps", "args.max_train_steps", "Accelerator(split_batches=True)"), []),
        ("from transformers import get_scheduler\n" + makes(*BY_PROCESSES), []),
        # A schedule that the script steps itself is told of when it runs, and its steps are seen.
        (f"scheduler = {makes(*BY_PROCESSES).strip()}\naccelerator.prepare(model, scheduler)", ["LR: epochs"]),
        (f"scheduler = {makes(*BY_PROCESSES).strip()}\naccelerator.prepare(model)", []),
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
