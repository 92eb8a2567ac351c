"""`lrlab preview` of schedules: numbers, text and plots."""

import inspect
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from lrlab_command import lrlab
from PIL import Image
from tables import cases

from diffusers_lrlab.preview.plots import _in_lines
from diffusers_lrlab.preview.schedules import Run, preview
from diffusers_lrlab.schedules.expected import lr_curve
from diffusers_lrlab.schedules.registries import SCHEDULERS

pytestmark = pytest.mark.pictures


def previewed(*arguments):
    """`lrlab preview ... --json`."""
    return json.loads(lrlab("preview", *arguments, "--json"))


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", ["0", "7", "0.1"])
def test_json_has_the_promised_curves(warmup):
    specs = ["cosine:num_cycles=1.5", "rex:d=0.9", "one_cycle", "wsd:num_decay_steps=0.3", "reduce_lr_on_plateau"]
    options = [part for spec in specs for part in ("--lr_scheduler", spec)]
    shown = previewed(*options, "--num_training_steps", 60, "--num_warmup_steps", warmup, "--learning_rate", "3e-4")
    assert shown["updates"] == 60
    assert [schedule["spec"] for schedule in shown["schedules"]] == specs
    for schedule in shown["schedules"]:
        promised = lr_curve(schedule["spec"], 3e-4, float(warmup), 60)
        np.testing.assert_allclose(schedule["lr"], promised, rtol=1e-12, atol=0)
        assert "diffusers" not in schedule
        assert (schedule["beta1"] is not None) == (schedule["spec"] == "one_cycle")
    assert "validation loss" in shown["schedules"][-1]["notes"][0]


def test_json_with_arguments_and_momentum():
    shown = previewed(
        *("--lr_scheduler", "constant_with_warmup:warmup_type=cosine", "--momentum_scheduler", "mdlrc:min_momentum=0.2"),
        *("--num_training_steps", 40, "--num_warmup_steps", 10, "--beta1", 0.9),
    )
    (schedule,) = shown["schedules"]
    assert schedule["spec"] == "constant_with_warmup:warmup_type=cosine"
    assert schedule["momentum"] == "mdlrc:min_momentum=0.2"
    share = np.clip((np.arange(40) - 10) / 30, 0, 1)
    beta1 = np.maximum(0.9 * (1 - share) / (0.1 + 0.9 * (1 - share)), 0.2)
    ramp = np.minimum(0.5 * (1 - np.cos(np.pi * np.arange(40) / 10)) * (np.arange(40) < 10) + (np.arange(40) >= 10), 1)
    np.testing.assert_allclose(schedule["beta1"], beta1, rtol=1e-12)
    np.testing.assert_allclose(schedule["lr"], 1e-4 * ramp * 0.1 / (1 - beta1), rtol=1e-12)


def test_a_rate_that_is_lowered_twice_is_said():
    shown = lrlab("preview", "--lr_scheduler", "cosine", "--momentum_scheduler", "mdlrc", "--num_training_steps", 40)
    assert "changes the learning rate by itself, on top of 'cosine'" in shown


def stepped_by_accelerate(build, num_updates, warmup, processes, accumulation, monkeypatch):
    """What train_unconditional.py of diffusers applies: its arguments, and accelerate's own scheduler wrapper."""
    import accelerate.scheduler
    import torch
    from accelerate.state import GradientState

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-4)
    # train_unconditional.py:523-528, with as many micro-batches as these updates need.
    lengths = {"num_warmup_steps": warmup * accumulation, "num_training_steps": num_updates * accumulation * processes}
    takes = inspect.signature(build).parameters
    scheduler = build(optimizer, **{name: length for name, length in lengths.items() if name in takes})
    state = SimpleNamespace(num_processes=processes)
    monkeypatch.setattr(accelerate.scheduler, "AcceleratorState", lambda: state)
    wrapped = accelerate.scheduler.AcceleratedScheduler(scheduler, SimpleNamespace(step_was_skipped=False))
    applied = []
    try:
        for micro_batch in range(num_updates * accumulation):
            syncs = (micro_batch + 1) % accumulation == 0
            GradientState()._set_sync_gradients(syncs)
            if syncs:
                applied.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            wrapped.step()
    finally:
        GradientState()._set_sync_gradients(True)
    return np.array(applied)


HOST_FUNCTIONS = {
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
}


@cases(("processes", "accumulation"), [(1, 2), (1, 4), (4, 1), (2, 4), (3, 2)])
@cases("name", HOST_FUNCTIONS)
def test_diffusers_own_script_is_foretold(name, processes, accumulation, monkeypatch):
    from diffusers import optimization

    build = getattr(optimization, HOST_FUNCTIONS[name])
    applied = stepped_by_accelerate(build, 30, 5, processes, accumulation, monkeypatch)
    shown = preview(name, Run(30, 5, num_processes=processes, accumulation=accumulation))
    np.testing.assert_allclose(shown.host.lr, applied, rtol=1e-12, atol=1e-20)
    assert f"ends at {100 * applied[-1] / 1e-4:.1f}".removesuffix(".0") in shown.notes[0]
    reached = int(np.argmax(applied >= applied.max() * (1 - 1e-9)))
    if reached != 5:
        assert f"reaches it at update {reached} instead of 5" in shown.notes[0]


def test_the_line_about_diffusers_own_script():
    options = ["--lr_scheduler", "cosine", "--num_training_steps", 100, "--num_warmup_steps", 5]
    shown = lrlab("preview", *options, "--gradient_accumulation_steps", 4)
    assert shown.endswith(
        "diffusers' own script, 1 process x accumulation 4: ends at 89.7 % of the peak instead of 0 %; reaches it at "
        "update 20 instead of 5\n"
    )
    shown = lrlab("preview", *options, "--num_processes", 5)
    assert (
        "5 processes x accumulation 1: ends at 0 % of the peak, as requested; reaches it at update 1 instead of 5" in shown
    )
    assert "diffusers" not in lrlab("preview", *options)


def test_a_peak_that_diffusers_own_script_never_reaches():
    shown = preview("cosine", Run(18, 5, accumulation=4))
    assert "ends at 85 % of the peak instead of 1.5 %; never reaches it, instead of at update 5" in shown.notes[0]


@pytest.mark.parametrize(
    ("spec", "momentum", "why"),
    [
        ("reduce_lr_on_plateau", None, "no validation loss"),
        ("cosine", "demon", "no --momentum_scheduler"),
        ("join:schedules=[constant|rex],boundaries=[15]", None, "the first must come after the 20 updates of warm-up"),
    ],
)
def test_what_diffusers_own_script_cannot_run(spec, momentum, why):
    shown = preview(spec, Run(40, 5, accumulation=4), momentum=momentum)
    assert shown.as_json(asked_for_host=True)["diffusers"] is None
    assert f"cannot run {spec}" in shown.notes[-1]
    assert why in shown.notes[-1]


def test_json_with_diffusers_own_script():
    shown = previewed("--lr_scheduler", "mdlrc", "--num_training_steps", 40, "--gradient_accumulation_steps", 2)
    host = shown["schedules"][0]["diffusers"]
    beta1 = 0.95 * (1 - np.arange(40) / 80) / (0.05 + 0.95 * (1 - np.arange(40) / 80))
    np.testing.assert_allclose(host["beta1"], beta1, rtol=1e-12)
    np.testing.assert_allclose(host["lr"], 1e-4 * 0.05 / (1 - beta1), rtol=1e-12)


# --- plots --------------------------------------------------------------------------------------------------------


def test_the_terminal_gets_a_table():
    options = ["--lr_scheduler", "one_cycle", "--lr_scheduler", "rex", "--num_training_steps", 200]
    shown = lrlab("preview", *options, encoding="ascii")
    assert shown.isascii()
    assert max(map(len, shown.splitlines())) <= 80
    assert "beta1" in shown
    assert re.search(r"^rex +0\.0001 .* 9\.\d+e-07$", shown, re.MULTILINE)


def colors(path):
    picture = Image.open(path).convert("RGB")
    return {color for _, color in picture.getcolors(picture.width * picture.height)}


@pytest.mark.slow
def test_a_picture_has_every_curve(tmp_path):
    out = tmp_path / "preview.png"
    options = ["--lr_scheduler", "one_cycle", "--lr_scheduler", "rex:d=0.9", "--num_training_steps", 200]
    assert lrlab("preview", *options, "--gradient_accumulation_steps", 2, "--out", out).endswith(f"Wrote {out}.\n")
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colors(out)
    assert list(tmp_path.iterdir()) == [out]


def test_a_picture_and_json_at_once(tmp_path):
    out = tmp_path / "preview.svg"
    assert previewed("--lr_scheduler", "cosine", "--num_training_steps", 20, "--out", out)["updates"] == 20
    assert "<!-- learning rate -->" in out.read_text()


@pytest.mark.slow
def test_the_gallery_shows_every_schedule(tmp_path):
    out = tmp_path / "all.svg"
    assert lrlab("preview", "--all", "--out", out) == f"Wrote {out}.\n"
    drawn = re.findall(r"<!-- (.*) -->", out.read_text())
    assert {line for name in SCHEDULERS for line in _in_lines(name).split("\n")} <= set(drawn)
    assert any("as if it never changed them" in text for text in drawn)
    assert "0.5" not in drawn  # as on the axes of an empty panel
