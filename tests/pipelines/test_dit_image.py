"""The pipeline of DiTs: guidance by its formula, runs without labels, flow matching, and what is refused."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler

from diffusers_lrlab import DiTImagePipeline

NAMES = {0: "cat", 1: "dog"}
SCHEDULERS = {
    "ddpm": lambda: DDPMScheduler(num_train_timesteps=20),
    "ddim": lambda: DDIMScheduler(num_train_timesteps=20),
    "flow": lambda: FlowMatchEulerDiscreteScheduler(num_train_timesteps=20, shift=2.0),
}


def pipeline_of(scheduler="ddim", **more):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 1, "attention_head_dim": 8, "num_layers": 1, "norm_num_groups": 1}
    model = DiTTransformer2DModel(**sizes, in_channels=1, out_channels=1, sample_size=4).eval()
    torch.nn.init.normal_(model.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight, std=9.0)
    pipeline = DiTImagePipeline(model, SCHEDULERS[scheduler](), **more)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline, **how):
    return pipeline(**how, generator=torch.Generator().manual_seed(0), num_inference_steps=4, output_type="latent").images


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_it_is_the_loop_written_out(scheduler, scale):
    pipeline, labels = pipeline_of(scheduler, id2label=NAMES), torch.tensor([0, 1, 1])
    steps, generator = SCHEDULERS[scheduler](), torch.Generator().manual_seed(0)
    images = torch.randn(3, 1, 4, 4, generator=generator)
    steps.set_timesteps(4)
    with torch.no_grad():
        for t in steps.timesteps:
            own, none = (
                pipeline.transformer(images, timestep=t.expand(3), class_labels=told).sample
                for told in (labels, torch.full((3,), 1000))
            )
            arguments = {} if scheduler == "ddim" else {"generator": generator}
            images = steps.step(none + scale * (own - none), t, images, **arguments).prev_sample
    found = sample(pipeline, class_labels=["cat", 1, "dog"], guidance_scale=scale)
    torch.testing.assert_close(found, images, rtol=1e-4, atol=1e-4)
    assert torch.equal(sample(pipeline_of(scheduler, id2label=NAMES, guidance_scale=scale), class_labels=labels), found)


def test_without_labels_it_is_told_none():
    pipeline = pipeline_of()
    ignored = sample(pipeline_of(id2label=NAMES), class_labels=[0, 1], guidance_scale=0)
    torch.testing.assert_close(sample(pipeline, batch_size=2), ignored, rtol=1e-5, atol=1e-5)
    assert pipeline(num_inference_steps=1).images[0].size == (4, 4)


REFUSED = {
    "labels of a model without": ({}, {"class_labels": [0]}, "class_labels must be left out for a model without labels"),
    "an unknown label": ({"id2label": NAMES}, {"class_labels": [2]}, "class_labels must be labels from 0 to 1, or names"),
    "an unknown name": ({"id2label": NAMES}, {"class_labels": "fox"}, "or names .cat, dog., got 'fox'"),
    "a number besides": ({"id2label": NAMES}, {"class_labels": [0], "batch_size": 1}, "batch_size must be left out"),
    "no labels": ({"id2label": NAMES, "has_null_label": False}, {}, "class_labels must be given"),
    "guidance": (
        {"id2label": NAMES, "has_null_label": False},
        {"class_labels": [0], "guidance_scale": 2.0},
        "guidance_scale must be 1 for a model that was trained without dropped labels",
    ),
    "too many steps": ({}, {"num_inference_steps": 21}, "num_inference_steps must be a whole number from 1 to 20"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    more, how, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        pipeline_of(**more)(**how)
