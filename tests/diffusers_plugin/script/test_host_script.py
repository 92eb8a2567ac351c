"""Patterns in the text of third-party scripts."""

import pytest

from diffusers_lrlab.diffusers_plugin.host.source import HostScript, NotRecognised


def test_forms_are_recognised_by_the_text(tmp_path):
    def form(text):
        (tmp_path / "script.py").write_text(text)
        return HostScript(tmp_path / "script.py")

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
