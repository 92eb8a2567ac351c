"""What a script's `add_argument` gets in place of its own options for a schedule."""

from types import SimpleNamespace

from diffusers_lrlab.diffusers_plugin.host.run import _widened


def test_a_default_that_is_a_list_is_left_alone():
    script = SimpleNamespace(texts=(), has_schedules_of_diffusers=True)
    for options in ({"choices": ["cosine"]}, {}):
        widened = _widened({"nargs": "+", "default": ["cosine"], **options}, script)
        assert widened["default"] == ["cosine"]
        assert widened["type"]("rex:d=0.9") == "rex:d=0.9"
