"""The pipeline of images: guidance by its formula, labels and names, without labels, and loading without this package."""

import json
import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from helpers import seeded
from latents import save_vae
from runs import TINY_UNET, environment
from tables import cases

from diffusers_lrlab import ImagePipeline

NAMES = {0: "cat", 1: "dog", 2: "fox"}
SCHEDULERS = {
    "ddpm": lambda: DDPMScheduler(num_train_timesteps=20),
    "flow": lambda: diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=20, shift=2.0),
    "ddim": lambda: diffusers.DDIMScheduler(num_train_timesteps=20),
    "solver": lambda: diffusers.DPMSolverMultistepScheduler(num_train_timesteps=20),
}


def unet_of(num_embeddings=4):
    """Knows three classes, and a label for none."""
    torch.manual_seed(0)
    unet = UNet2DModel.from_config({**TINY_UNET, "num_class_embeds": num_embeddings}).eval()
    if num_embeddings is not None:
        torch.nn.init.normal_(unet.class_embedding.weight, std=3.0)  # so that labels matter
    return {"unet": unet}


def dit_of():
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 1, "attention_head_dim": 8, "num_layers": 1, "norm_num_groups": 1}
    model = DiTTransformer2DModel(**sizes, in_channels=1, out_channels=1, sample_size=8).eval()
    torch.nn.init.normal_(model.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight, std=9.0)
    return {"transformer": model}


MODELS = {"unet": (unet_of, 3), "transformer": (dit_of, 1000)}  # with the label for none


def pipeline_of(scheduler="ddpm", model=unet_of, id2label=NAMES, **more):
    return ImagePipeline(SCHEDULERS[scheduler](), **model(), id2label=id2label, **more)


def sample(pipeline, labels=None, seed=0, steps=5, **how):
    how = {"class_labels": labels, "generator": seeded(seed), "num_inference_steps": steps, "output_type": "latent", **how}
    return pipeline(**how).images


def guided_loop(pipeline, null_label, labels, scale, seed=0, steps=5):
    """Classifier-free guidance written out (arXiv 2207.12598, eq. 6, with s = 1 + w), two passes a step."""
    generator, scheduler = seeded(seed), type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    model = pipeline.unet or pipeline.transformer
    images = torch.randn(len(labels), 1, 8, 8, generator=generator)
    scheduler.set_timesteps(steps)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            with_label, without = (
                model(images, timestep.expand(len(labels)), class_labels=torch.tensor(told)).sample
                for told in (labels, [null_label] * len(labels))
            )
            prediction = without + scale * (with_label - without)
            deterministic = isinstance(scheduler, diffusers.DDIMScheduler | diffusers.DPMSolverMultistepScheduler)
            noise = {} if deterministic else {"generator": generator}
            images = scheduler.step(prediction, timestep, images, **noise).prev_sample
    return images


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of diffusers' schedulers
@cases(("scheduler", "scale"), [("ddpm", 0.0), ("ddpm", 1.0), ("ddpm", 2.5), ("flow", 2.5), ("ddim", 2.5), ("solver", 2.5)])
@cases("name", list(MODELS))
def test_guidance_is_the_formula(scheduler, scale, name):
    model, null_label = MODELS[name]
    pipeline, labels = pipeline_of(scheduler, model), [0, 2, 1, 1]
    found = sample(pipeline, labels, guidance_scale=scale)
    torch.testing.assert_close(found, guided_loop(pipeline, null_label, labels, scale), rtol=1e-4, atol=1e-4)
    assert torch.equal(sample(pipeline_of(scheduler, model, guidance_scale=scale), labels), found)


@cases("name", list(MODELS))
def test_labels_and_guidance_change_the_images(name):
    pipeline = pipeline_of(model=MODELS[name][0])
    images = sample(pipeline, [0, 1, 2, 0])
    assert not torch.allclose(images, sample(pipeline, [1, 1, 2, 0]))
    torch.testing.assert_close(images[1:], sample(pipeline, [1, 1, 2, 0])[1:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(images, sample(pipeline, [0, 1, 2, 0], guidance_scale=2.0))
    for labels in (["fox", "cat"], [2, "cat"], (2, 0), torch.tensor([2, 0]), np.array([2, 0])):
        assert torch.equal(sample(pipeline, labels), sample(pipeline, [2, 0]))
    assert torch.equal(sample(pipeline, "dog", batch_size=1), sample(pipeline, [1]))


@cases("name", list(MODELS))
def test_without_labels_a_model_is_told_none(name):
    model, null_label = MODELS[name]
    pipeline, told = pipeline_of(model=model), []
    hook = (pipeline.unet or pipeline.transformer).register_forward_pre_hook
    hook(lambda _, given, named: told.append(named["class_labels"].tolist()), with_kwargs=True)
    unlabelled = sample(pipeline, batch_size=2)
    sample(pipeline, [0, 2])
    assert told == [[null_label] * 2] * 5 + [[0, 2]] * 5  # once a step
    torch.testing.assert_close(unlabelled, sample(pipeline, [0, 1], guidance_scale=0), rtol=1e-4, atol=1e-4)


def test_a_model_without_labels_samples_as_in_diffusers_own_pipeline():
    model = unet_of(None)
    pipelines = [ImagePipeline(SCHEDULERS["ddpm"](), **model), DDPMPipeline(model["unet"], SCHEDULERS["ddpm"]())]
    for how in ({"output_type": "np"}, {"output_type": "pil"}):
        how |= {"batch_size": 3, "num_inference_steps": 5}
        found, expected = (pipeline(generator=seeded(), **how).images for pipeline in pipelines)
        assert np.array_equal(np.stack(found), np.stack(expected))
    assert pipelines[0](num_inference_steps=2, output_type="pt", return_dict=False)[0].shape == (1, 1, 8, 8)


WITHOUT = {"model": lambda: unet_of(None), "id2label": None}
ALL_LABELS = [{"model": lambda: unet_of(3)}, {"model": dit_of, "has_null_label": False}]


@cases(("made", "given", "told"), [
    ({}, {"class_labels": [3]}, r"class_labels must be labels from 0 to 2, or names \(cat, dog, fox\), got 3"),
    ({}, {"class_labels": 0, "guidance_scale": -1.0}, "guidance_scale must be a number from 0 to 1000000000, got -1.0"),
    ({}, {"class_labels": [0, 1], "batch_size": 3}, "batch_size must be the number of class_labels, or left out, got 3"),
    ({}, {"guidance_scale": 2.0}, "guidance_scale must be left out without class_labels, got 2.0"),
    ({}, {"class_labels": 0, "output_type": "jpg"}, "output_type must be one of pil, np, pt, latent, got 'jpg'"),
    (WITHOUT, {"class_labels": [0]}, "class_labels must be left out for a model without labels"),
    *((model, {}, "class_labels must be given for a model that was trained with all labels") for model in ALL_LABELS),
    *((model, {"class_labels": 0, "guidance_scale": 2.0}, "guidance_scale must be 1 for a model") for model in ALL_LABELS),
    ({"model": lambda: unet_of(2)}, {"class_labels": 0}, "num_class_embeds of the unet must be the number of.*got 2"),
])  # fmt: skip
def test_wrong_arguments_are_named(made, given, told):
    with pytest.raises(ValueError, match=told):
        pipeline_of(**made)(**given)


def test_classes_without_names_are_numbers():
    assert pipeline_of(model=lambda: unet_of(3), id2label=None).class_names == ["0", "1", "2"]
    assert pipeline_of(model=dit_of, id2label=None).class_names == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved pipeline of latents in twelve classes, which do not sort alike as numbers and as texts, with guidance."""
    folder = tmp_path_factory.mktemp("saved")
    names = {label: f"class {label}" for label in range(12)}
    vae = AutoencoderKL.from_pretrained(save_vae(folder / "vae", latent_channels=1)).eval()
    pipeline = pipeline_of("flow", lambda: unet_of(13), names, guidance_scale=2.5, vae=vae)
    pipeline.save_pretrained(folder / "pipeline")
    torch.save(sample(pipeline, [10, 2, 11], output_type="pt"), folder / "images")
    return folder


LOAD = """
import sys, torch
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], custom_pipeline=sys.argv[1], trust_remote_code=True)
assert "diffusers_lrlab" not in sys.modules
assert pipeline.class_names == [f"class {label}" for label in range(12)]
how = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 5, "output_type": "pt"}
assert torch.equal(pipeline(["class 10", 2, 11], **how).images, torch.load(sys.argv[2]))
pipeline.save_pretrained(sys.argv[3])
"""


@pytest.mark.slow
def test_it_loads_without_this_package(saved, tmp_path):
    before, after = saved / "pipeline", tmp_path / "again"
    command = [sys.executable, "-c", LOAD, *map(str, (before, saved / "images", after))]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Expected types" not in result.stderr  # diffusers' warning of other arguments
    index = json.loads((before / "model_index.json").read_text())
    assert json.loads((after / "model_index.json").read_text()) == {**index, "_name_or_path": str(before)}
    assert (after / "pipeline.py").read_bytes() == (before / "pipeline.py").read_bytes()


def test_it_loads_with_it_and_does_not_run_code_of_the_folder(saved):
    known = {*sys.modules}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(saved / "pipeline")
    assert type(pipeline) is ImagePipeline
    assert torch.equal(sample(pipeline, ["class 10", 2, 11], output_type="pt"), torch.load(saved / "images"))
    assert not any("diffusers_modules" in name for name in {*sys.modules} - known)


@pytest.mark.parametrize("name", ["LabelledImagePipeline", "LatentImagePipeline", "DiTImagePipeline"])
def test_pipelines_of_version_0_1_0_load(tmp_path, name):
    """Their indexes name the class that has become this one, and lack the parts that it did not know."""
    pipeline = pipeline_of(model=dit_of if name == "DiTImagePipeline" else unet_of, guidance_scale=2.0)
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    known = {key: value for key, value in index.items() if value != [None, None] and key != "vae_source"}
    (tmp_path / "model_index.json").write_text(json.dumps({**known, "_class_name": name}))
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert torch.equal(sample(loaded, [0, 2]), sample(pipeline, [0, 2]))
