"""Runs of a DiT on labelled latents: guidance as in diffusers' pipeline, folder, card, and sampling by diffusers alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
import runs
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, DiTPipeline, DiTTransformer2DModel
from diffusers.models.embeddings import LabelEmbedding
from latents import encode, save_vae

import diffusers_lrlab
from diffusers_lrlab.cli.main import main

pytestmark = pytest.mark.slow

TINY = "dit:hidden_size=8,num_layers=2,num_heads=2,patch_size=2"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Digits encoded by autoencoders without and with a shift."""
    place = tmp_path_factory.mktemp("place")
    for name, shift in (("plain", None), ("shifted", 0.1)):
        save_vae(place / f"vae-{name}", shift_factor=shift)
        encode(place / name, place / f"vae-{name}")
    return place


def arguments(place, output, *more, data="plain"):
    return [
        *(f"--train_data_dir={place / data}", f"--output_dir={output}"),
        *(f"--denoiser={TINY}", "--max_train_steps=12", "--train_batch_size=16"),
        *("--checkpointing_steps=4", "--checkpoints_total_limit=0", "--num_validation_images=16", "--eval_batch_size=10"),
        *("--num_inference_steps=2", "--logging_steps=1", "--no_preflight", "--distance_samples=0"),
        *("--learning_rate=0.01", *more),
    ]


LABELS = ("--label_column=label", "--label_dropout=0.2", "--guidance_scale=2")


@pytest.fixture(scope="module")
def labelled(place, tmp_path_factory):
    output = tmp_path_factory.mktemp("labelled") / "run"
    runs.run(*arguments(place, output, *LABELS, "--save_images_epochs=1"))
    return output


def test_guidance_is_that_of_diffusers_own_pipeline(place, labelled):
    """`DiTPipeline`, for what it samples: labelled latents of an autoencoder without a shift."""
    model = DiTTransformer2DModel.from_pretrained(labelled, subfolder="transformer")
    scheduler = DDIMScheduler.from_pretrained(labelled, subfolder="scheduler")
    vae = AutoencoderKL.from_pretrained(place / "vae-plain")
    own, other = DiffusionPipeline.from_pretrained(labelled), DiTPipeline(model, vae, scheduler)
    own.scheduler = scheduler
    for scale in (1.0, 3.0):
        how = {"guidance_scale": scale, "num_inference_steps": 5, "output_type": "np"}
        found, expected = (
            pipeline([3, 7], generator=torch.Generator().manual_seed(1), **how).images for pipeline in (own, other)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_its_folder_card_and_previews(labelled):
    assert main(["check", str(labelled)]) == 0
    card = (labelled / "README.md").read_text()
    assert "A `ImagePipeline` trained by" in card
    assert f"| Denoiser | `{TINY}` |" in card
    previews = {np.load(path).shape for path in (labelled / "lrlab/samples").glob("*.npy")}
    assert previews == {(10, 8, 8, 1)}
    model = DiTTransformer2DModel.from_pretrained(labelled, subfolder="transformer")
    assert model.config.num_embeds_ada_norm == 1000
    assert (
        len(next(module for module in model.modules() if isinstance(module, LabelEmbedding)).embedding_table.weight) == 1001
    )


def test_it_is_sampled_by_the_code_on_its_card(place, tmp_path):
    """Without this package, and with an autoencoder that shifts."""
    runs.run(*arguments(place, tmp_path / "run", *LABELS, data="shifted"))
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run")
    assert type(pipeline) is diffusers_lrlab.ImagePipeline
    assert type(pipeline.scheduler).__name__ == "DDPMScheduler"
    call = {"class_labels": ["3", 7]}
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    how = {"num_inference_steps": 2, "output_type": "np"}
    images = pipeline(**call, **how, generator=generators[0]).images
    assert images.shape == (2, 8, 8, 1)
    code = (tmp_path / "run/README.md").read_text().split("```python")[2].partition("```")[0]
    code = f"import sys\nsys.modules['diffusers_lrlab'] = None\n{code}\n"
    code += f"import torch\nprint(pipeline(**{call}, **{how}, generator=torch.Generator().manual_seed(0)).images.tolist())"
    env = {**runs.environment(), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.array(json.loads(done.stdout)), images, atol=1e-6)
