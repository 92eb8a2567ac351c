"""What is known of a third-party script while it runs: its option for a schedule, and its updates."""

from types import SimpleNamespace

from diffusers_lrlab.diffusers_plugin.host.run import HostRun, _widened


def test_epochs_of_sd_scripts_come_before_its_steps():
    run = HostRun()
    run.arguments, run.training_loader = {"max_train_steps": 1600, "max_train_epochs": None}, [None] * 9
    run.accelerator = SimpleNamespace(gradient_accumulation_steps=4)
    assert run.count_updates() == 1600
    run.arguments["max_train_epochs"] = 2
    assert run.count_updates() == 6


def test_a_default_that_is_a_list_is_left_alone():
    script = SimpleNamespace(texts=(), has_schedules_of_diffusers=True)
    for options in ({"choices": ["cosine"]}, {}):
        widened = _widened({"nargs": "+", "default": ["cosine"], **options}, script)
        assert widened["default"] == ["cosine"]
        assert widened["type"]("rex:d=0.9") == "rex:d=0.9"
