"""The pipeline of points, and the ways to load it, in processes of their own."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, DPMSolverMultistepScheduler, EulerDiscreteScheduler
from helpers import seeded
from runs import environment
from tables import cases

from diffusers_lrlab import MLPDenoiser, PointDDPMPipeline

SMALL = {"hidden_size": 8, "num_layers": 1, "embedding_size": 4}


def pipeline_of(scheduler=None, **config):
    torch.manual_seed(0)
    scheduler = scheduler or DDPMScheduler(num_train_timesteps=20, clip_sample=False)
    return PointDDPMPipeline(MLPDenoiser(**SMALL, **config), scheduler)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of diffusers' schedulers
@cases("scheduler", [DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler])
def test_any_scheduler_of_diffusers_samples(scheduler):
    pipeline = pipeline_of(scheduler(num_train_timesteps=20), dimension=5)
    first, again, other = (pipeline(6, seeded(seed), num_inference_steps=10).points for seed in (1, 1, 2))
    assert (first.shape, np.isfinite(first).all()) == ((6, 5), True)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_ancestral_sampling_is_the_textbooks():
    """DDPM's algorithm 2 (arXiv 2006.11239) with the posterior's variance, written out."""
    pipeline = pipeline_of()
    betas = torch.linspace(1e-4, 0.02, 20, dtype=torch.float64)
    alphas = (1 - betas).cumprod(0)
    generator = seeded(3)
    points = torch.randn(50, 2, generator=generator).double()
    with torch.no_grad():
        for t in reversed(range(20)):
            noise = pipeline.denoiser(points.float(), t).sample.double()
            mean = (points - betas[t] / (1 - alphas[t]).sqrt() * noise) / (1 - betas[t]).sqrt()
            points = mean
            if t:
                variance = betas[t] * (1 - alphas[t - 1]) / (1 - alphas[t])
                points = mean + variance.sqrt() * torch.randn(50, 2, generator=generator).double()
    found = pipeline(num_points=50, generator=seeded(3), num_inference_steps=20).points
    np.testing.assert_allclose(found, points.numpy(), atol=2e-5)


def test_points_pass_the_model_in_chunks():
    """Its activations take bounded memory, however many points there are."""
    pipeline, sizes = pipeline_of(), []
    pipeline.denoiser.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    how = {"num_points": 50, "num_inference_steps": 20}
    in_chunks = pipeline(generator=seeded(3), chunk_size=7, **how).points
    assert max(sizes) == 7
    np.testing.assert_allclose(in_chunks, pipeline(generator=seeded(3), **how).points, atol=1e-5)


def test_frames_lead_from_noise_to_the_points():
    pipeline = pipeline_of()
    output = pipeline(num_points=8, generator=seeded(), num_inference_steps=20, num_frames=5)
    assert output.frame_timesteps == [20, 15, 10, 5, 0]
    assert np.array_equal(output.frames[-1], output.points)
    assert np.array_equal(output.frames[0], torch.randn(8, 2, generator=seeded()).numpy())
    assert np.array_equal(output.points, pipeline(num_points=8, generator=seeded(), num_inference_steps=20).points)
    points, frames, timesteps = pipeline(num_points=8, generator=seeded(), num_frames=2, return_dict=False)
    assert (points.shape, frames.shape, timesteps) == ((8, 2), (2, 8, 2), [20, 0])


@cases("wrong", [{"num_inference_steps": 21}, {"num_frames": 1}, {"chunk_size": 0}, {"output_type": "pil"}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        pipeline_of()(**wrong)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved pipeline, and points that it makes."""
    folder = tmp_path_factory.mktemp("saved")
    pipeline = pipeline_of()
    pipeline.save_pretrained(folder / "pipeline")
    np.save(folder / "points.npy", pipeline(num_points=5, generator=seeded(7)).points)
    return folder


LOAD = """
import sys
import numpy as np, torch
from diffusers import DiffusionPipeline
source, expected, elsewhere = sys.argv[1:4]
pipeline = DiffusionPipeline.from_pretrained(source, custom_pipeline=source, trust_remote_code=True)
assert "diffusers_lrlab" not in sys.modules
made = pipeline(num_points=5, generator=torch.Generator().manual_seed(7)).points
assert np.array_equal(made, np.load(expected)), made
pipeline.save_pretrained(elsewhere)
"""


def assert_saved_again(again, folder):
    index = json.loads((again / "model_index.json").read_text())
    assert (index["denoiser"], index["_class_name"]) == (["diffusers_lrlab", "MLPDenoiser"], "PointDDPMPipeline")
    for name in ("pipeline.py", "denoiser/diffusers_lrlab.py"):
        assert (again / name).read_bytes() == (folder / "pipeline" / name).read_bytes()


@pytest.mark.slow  # it imports everything anew
def test_it_loads_without_this_package(saved, tmp_path):
    command = [sys.executable, "-c", LOAD, *map(str, (saved / "pipeline", saved / "points.npy", tmp_path / "again"))]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_saved_again(tmp_path / "again", saved)


def test_it_loads_from_a_folder_whose_code_is_not_run(saved, tmp_path):
    before = {*sys.modules}
    for loader in (DiffusionPipeline, PointDDPMPipeline):
        pipeline = loader.from_pretrained(saved / "pipeline")
        assert type(pipeline) is PointDDPMPipeline
        assert np.array_equal(pipeline(num_points=5, generator=seeded(7)).points, np.load(saved / "points.npy"))
    assert not any("diffusers_modules" in name for name in {*sys.modules} - before)
    pipeline.save_pretrained(tmp_path / "again")
    assert_saved_again(tmp_path / "again", saved)


def test_another_denoiser_is_saved_without_our_code(tmp_path):
    class Other(MLPDenoiser):
        __module__ = "elsewhere"

    PointDDPMPipeline(Other(**SMALL), DDPMScheduler()).save_pretrained(tmp_path)
    assert not (tmp_path / "denoiser" / "diffusers_lrlab.py").exists()
