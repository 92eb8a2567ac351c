"""The pipelines of images by class: guidance by its formula, labels and names, and loading without this package."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UNet2DModel,
)
from runs import TINY_UNET, environment
from tables import cases

from diffusers_lrlab import LabelledImagePipeline, LatentImagePipeline

NAMES = {0: "cat", 1: "dog", 2: "fox"}
UNET = {key: value for key, value in TINY_UNET.items() if key != "_class_name"}
PIPELINES = [LabelledImagePipeline, LatentImagePipeline]
SCHEDULERS = {
    "ddpm": lambda: DDPMScheduler(num_train_timesteps=20),
    "flow": lambda: FlowMatchEulerDiscreteScheduler(num_train_timesteps=20, shift=2.0),
    "ddim": lambda: DDIMScheduler(num_train_timesteps=20),
    "solver": lambda: DPMSolverMultistepScheduler(num_train_timesteps=20),
}


def pipeline_of(scheduler="ddpm", num_embeddings=4, id2label=NAMES, pipeline_class=LabelledImagePipeline, **more):
    torch.manual_seed(0)
    unet = UNet2DModel(**UNET, num_class_embeds=num_embeddings).eval()
    if num_embeddings is not None:
        torch.nn.init.normal_(unet.class_embedding.weight, std=3.0)  # so that labels matter
    pipeline = pipeline_class(unet, SCHEDULERS[scheduler](), id2label=id2label, **more)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def sample(pipeline, labels, seed=0, steps=5, **how):
    """Images, or latents in the place of images, as values in [0, 1]."""
    how = {"class_labels": labels, "generator": seeded(seed), "num_inference_steps": steps, **how}
    if isinstance(pipeline, LatentImagePipeline):
        return ((pipeline(output_type="latent", **how).images + 1) / 2).clamp(0, 1)
    return pipeline(output_type="pt", **how).images


def guided_loop(pipeline, labels, scale, seed=0, steps=5):
    """Classifier-free guidance written out (arXiv 2207.12598, eq. 6, with s = 1 + w), two passes a step."""
    generator, scheduler, unet = seeded(seed), type(pipeline.scheduler).from_config(pipeline.scheduler.config), pipeline.unet
    images = torch.randn(len(labels), 1, 8, 8, generator=generator)
    scheduler.set_timesteps(steps)
    null_labels = torch.full((len(labels),), 3)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            with_label = unet(images, timestep, class_labels=torch.tensor(labels)).sample
            without = unet(images, timestep, class_labels=null_labels).sample
            prediction = without + scale * (with_label - without)
            noise = {} if isinstance(scheduler, DDIMScheduler | DPMSolverMultistepScheduler) else {"generator": generator}
            images = scheduler.step(prediction, timestep, images, **noise).prev_sample
    return ((images + 1) / 2).clamp(0, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of diffusers' schedulers
@cases("scheduler", list(SCHEDULERS))
@cases("scale", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("pipeline_class", PIPELINES)
def test_guidance_is_the_formula(scheduler, scale, pipeline_class):
    pipeline, labels = pipeline_of(scheduler, pipeline_class=pipeline_class), [0, 2, 1, 1]
    torch.testing.assert_close(
        sample(pipeline, labels, guidance_scale=scale), guided_loop(pipeline, labels, scale), rtol=1e-4, atol=1e-5
    )


def test_the_labels_and_the_guidance_change_the_images():
    pipeline = pipeline_of()
    images = sample(pipeline, [0, 1, 2, 0])
    assert not torch.allclose(images, sample(pipeline, [1, 1, 2, 0]))
    assert torch.equal(images[1:], sample(pipeline, [1, 1, 2, 0])[1:])
    assert not torch.allclose(images, sample(pipeline, [0, 1, 2, 0], guidance_scale=2.0))


@pytest.mark.parametrize("pipeline_class", PIPELINES)
def test_without_guidance_the_model_is_called_once_a_step_and_never_without_a_label(pipeline_class):
    pipeline, told = pipeline_of(pipeline_class=pipeline_class), []
    pipeline.unet.register_forward_pre_hook(lambda _, given, named: told.append(named["class_labels"]), with_kwargs=True)
    sample(pipeline, [0, 2])
    assert [labels.tolist() for labels in told] == [[0, 2]] * 5


def test_a_model_that_ignores_labels_samples_as_in_diffusers_own_pipeline():
    pipeline = pipeline_of()
    torch.nn.init.zeros_(pipeline.unet.class_embedding.weight)
    plain = UNet2DModel(**UNET).eval()
    plain.load_state_dict({name: value for name, value in pipeline.unet.state_dict().items() if "class_emb" not in name})
    other = DDPMPipeline(plain, SCHEDULERS["ddpm"]())
    other.set_progress_bar_config(disable=True)
    expected = other(batch_size=3, generator=seeded(), num_inference_steps=5, output_type="np").images
    found = pipeline([0, 1, 2], generator=seeded(), num_inference_steps=5, output_type="np").images
    assert np.array_equal(found, expected)


@pytest.mark.slow
@cases("labels", [[2, 0], ["fox", "cat"], [2, "cat"], (2, 0), torch.tensor([2, 0]), np.array([2, 0])])
@pytest.mark.parametrize("pipeline_class", PIPELINES)
def test_labels_are_numbers_or_names(labels, pipeline_class):
    pipeline = pipeline_of(pipeline_class=pipeline_class)
    assert torch.equal(sample(pipeline, labels), sample(pipeline, [2, 0]))


def test_one_label_is_one_image():
    pipeline = pipeline_of()
    (image,) = pipeline("dog", generator=seeded(), num_inference_steps=2).images
    assert image.size == (8, 8)
    assert pipeline(1, generator=seeded(), num_inference_steps=2, output_type="np", return_dict=False)[0].shape == (
        1,
        8,
        8,
        1,
    )


@cases(
    ("given", "told"),
    [
        ({"class_labels": [3]}, r"class_labels must be labels from 0 to 2, or names \(cat, dog, fox\), got 3"),
        ({"class_labels": [-1]}, "class_labels must be labels from 0 to 2"),
        ({"class_labels": ["cow"]}, "class_labels must be .* got 'cow'"),
        ({"class_labels": []}, "class_labels must be a label"),
        ({"class_labels": 0, "guidance_scale": -1.0}, "guidance_scale must be a number, 0 or above, got -1.0"),
        ({"class_labels": 0, "num_inference_steps": 21}, "num_inference_steps must be .*1 to 20, got 21"),
    ],
)
@pytest.mark.parametrize("pipeline_class", PIPELINES)
def test_wrong_arguments_are_named(given, told, pipeline_class):
    with pytest.raises(ValueError, match=told):
        pipeline_of(pipeline_class=pipeline_class)(**given)


@cases(
    ("num_embeddings", "given", "told"),
    [
        (4, {}, "class_labels must be a label, .* got None"),
        (4, {"class_labels": [0, 1], "batch_size": 3}, "batch_size must be the number of class_labels, or left out, got 3"),
        (None, {"class_labels": [0]}, "class_labels must be left out for a model without class labels"),
        (None, {"guidance_scale": 2.0}, "guidance_scale must be left out for a model without class labels, got 2.0"),
    ],
)
def test_latents_have_labels_or_none(num_embeddings, given, told):
    names = NAMES if num_embeddings else None
    pipeline = pipeline_of(num_embeddings=num_embeddings, id2label=names, pipeline_class=LatentImagePipeline)
    with pytest.raises(ValueError, match=told):
        pipeline(**given)


@pytest.mark.parametrize("pipeline_class", PIPELINES)
def test_guidance_needs_a_model_that_knows_no_label(pipeline_class):
    pipeline = pipeline_of(num_embeddings=3, pipeline_class=pipeline_class)
    assert sample(pipeline, [0]).shape == (1, 1, 8, 8)
    with pytest.raises(ValueError, match="guidance_scale must be 1 for a model that was trained without dropped labels"):
        sample(pipeline, [0], guidance_scale=2.0)


def test_classes_without_names_are_numbers():
    assert pipeline_of(id2label=None, num_embeddings=3).class_names == ["0", "1", "2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved pipeline of twelve classes, more than sort alike as numbers and as texts, with guidance by default."""
    folder = tmp_path_factory.mktemp("saved")
    pipeline = pipeline_of("flow", 13, {label: f"class {label}" for label in range(12)}, guidance_scale=2.5)
    pipeline.save_pretrained(folder / "pipeline")
    np.save(folder / "images.npy", sample(pipeline, [10, 2, 11]).numpy())
    return folder


LOAD = """
import sys
import numpy as np, torch
{load}
assert pipeline.class_names == [f"class {{label}}" for label in range(12)]
images = pipeline(
    ["class 10", 2, 11], generator=torch.Generator().manual_seed(0), num_inference_steps=5, output_type="pt"
).images
assert np.array_equal(images.numpy(), np.load(sys.argv[2]))
pipeline.save_pretrained(sys.argv[3])
"""
WAYS = {
    "without this package": """
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], custom_pipeline=sys.argv[1], trust_remote_code=True)
assert "diffusers_lrlab" not in sys.modules
""",
    "with it": """
from diffusers import DiffusionPipeline
import diffusers_lrlab
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1])
assert type(pipeline) is diffusers_lrlab.LabelledImagePipeline
assert not any("diffusers_modules" in name for name in sys.modules)  # code in the folder was not run
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_loads(saved, tmp_path, way):
    arguments = (saved / "pipeline", saved / "images.npy", tmp_path / "again")
    command = [sys.executable, "-c", LOAD.format(load=WAYS[way]), *map(str, arguments)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Expected types" not in result.stderr  # diffusers' warning of other arguments
    index = json.loads((tmp_path / "again" / "model_index.json").read_text())
    assert index.pop("_name_or_path") == str(saved / "pipeline")
    assert index == json.loads((saved / "pipeline" / "model_index.json").read_text())
    assert (tmp_path / "again" / "pipeline.py").read_bytes() == (saved / "pipeline" / "pipeline.py").read_bytes()


@pytest.mark.parametrize(("num_embeddings", "id2label"), [(None, None), (None, NAMES), (2, NAMES)])
def test_a_model_that_does_not_know_the_classes(num_embeddings, id2label):
    unet = UNet2DModel(**UNET, num_class_embeds=num_embeddings)
    pipeline = LabelledImagePipeline(unet, SCHEDULERS["ddpm"](), id2label)
    with pytest.raises(
        ValueError, match=f"num_class_embeds of the unet must be the number of classes.*got {num_embeddings}"
    ):
        pipeline([1])
