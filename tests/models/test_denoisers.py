"""A denoiser of one's own, in one file: trained, resumed, saved with its code, loaded again; and what is refused."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import printed
import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from diffusers import ConfigMixin, DDPMPipeline, DiffusionPipeline, ModelMixin, UNet2DModel
from registrations import restored
from safetensors.torch import load_file
from tables import cases

import diffusers_lrlab
from diffusers_lrlab import LabError, TrainingConfig, register_denoiser, train
from diffusers_lrlab.core.plugins import load_plugins
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.models.registry import DENOISERS
from diffusers_lrlab.study.stacked.stacks import not_stackable
from diffusers_lrlab.training.prepare import prepare
from diffusers_lrlab.training.resolve import resolve_config

SMALL = {
    "dataset_name": "dino",
    "max_train_steps": 4,
    "checkpointing_steps": 2,
    "train_batch_size": 8,
    "num_validation_images": 16,
    "eval_batch_size": 16,
    "distance_samples": 0,
    "ddpm_num_steps": 10,
    "num_inference_steps": 2,
    "lr_warmup_steps": 0,
    "preflight": False,
    "denoiser": "gated:width=16",
}
OF_IMAGES = """
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput

from diffusers_lrlab import register_denoiser


@register_denoiser("one_layer", description="a convolution", source="a test")
class OneLayer(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, sample_size: int, in_channels: int):
        super().__init__()
        self.layer = torch.nn.Conv2d(in_channels, in_channels, 3, padding=1)

    def forward(self, sample, timestep, return_dict=True):
        return UNet2DOutput(self.layer(sample)) if return_dict else (self.layer(sample),)
"""


@pytest.fixture(autouse=True)
def accelerate_begins_anew():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def gated(tmp_path):
    """The printed file, loaded as `--import` does."""
    file = tmp_path / "gated.py"
    file.write_text(printed.block_with("class GatedDenoiser", "python").code)
    with printed.registrations_undone():
        load_plugins(str(file))
        yield file


@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model name or path:FutureWarning")
def test_it_is_trained_saved_with_its_code_and_resumed_to_the_same_bits(tmp_path, gated):
    run = tmp_path / "run"
    train(TrainingConfig(**SMALL, plugins=str(gated), output_dir=run))
    assert json.loads((run / "denoiser/config.json").read_text())["width"] == 16
    assert (run / "denoiser/diffusers_lrlab.py").read_text() == gated.read_text()
    points = DiffusionPipeline.from_pretrained(run)(num_points=8, num_inference_steps=2).points
    assert points.shape == (8, 2)
    assert np.isfinite(points).all()
    card = (run / "README.md").read_text()
    assert "`denoiser/diffusers_lrlab.py`, which needs diffusers_lrlab" in card
    assert "| Denoiser | `gated:width=16` |" in card
    assert "Without diffusers_lrlab" not in card  # as the weights need it
    weights = run / "denoiser/diffusion_pytorch_model.safetensors"
    at_first = load_file(weights)
    weights.unlink()
    AcceleratorState._reset_state(reset_partial_state=True)
    train(TrainingConfig(**SMALL, plugins=str(gated), output_dir=run, resume_from_checkpoint="checkpoint-2"))
    again = load_file(weights)
    assert all(again[name].equal(at_first[name]) for name in at_first)
    other = {**SMALL, "denoiser": "gated:width=8", "resume_from_checkpoint": "checkpoint-2"}
    with pytest.raises(LabError, match="denoiser_kwargs: {'width': 16} then, {'width': 8} now"):
        train(TrainingConfig(**other, plugins=str(gated), output_dir=run))


def test_a_pipeline_whose_code_is_not_there_says_so():
    with pytest.raises(AttributeError, match="no attribute 'GatedDenoiser'. If it is a third-party denoiser, import"):
        diffusers_lrlab.GatedDenoiser  # noqa: B018  # diffusers does this


@cases(
    "options, message",
    [
        ({"denoiser": None, "denoiser_kwargs": {"width": 3}}, "{.width.: 3} has no effect without --denoiser"),
        ({"model_config_name_or_path": "here"}, "--model_config_name_or_path .here. has no effect with --denoiser"),
        ({"dataset_name": "digits", "distance_samples": None}, "does not suit images: GatedDenoiser takes no sample_size"),
        ({"denoiser": "mlp:embedding_size=5"}, "cannot be built as MLPDenoiser.*embedding_size=5 is odd"),
    ],
)
def test_what_cannot_be_is_said_before_training(options, message, gated):
    with pytest.raises(LabError, match=message):
        prepare(TrainingConfig(**{**SMALL, **options}))


def test_stacks_are_for_the_default(gated):
    spec = SimpleNamespace(config=resolve_config(TrainingConfig(**SMALL)))
    assert not_stackable(spec, None) == "stacks need an MLPDenoiser, and its model is a GatedDenoiser"


class NotInAFile(ModelMixin, ConfigMixin):
    exec(compile("def forward(self, sample, timestep): pass", "<a notebook>", "exec"))


@cases(
    "model_class, message",
    [
        (torch.nn.Linear, "must be a class of diffusers' ModelMixin and ConfigMixin"),
        (type("MLPDenoiser", (NotInAFile,), {}), "cannot be a class MLPDenoiser: that name is taken"),
        (NotInAFile, "is not in a file \\(<a notebook>\\)"),
    ],
)
def test_a_class_that_could_not_be_loaded_again_is_refused(model_class, message):
    with pytest.raises(LabError, match=message):
        register_denoiser("refused", description="", source="")(model_class)


@pytest.mark.slow
def test_a_class_of_diffusers_is_registered_as_it_is(tmp_path):
    """Neither is it renamed, nor is its file copied beside the weights, which diffusers loads by itself."""
    channels = Parameter("block_out_channels", list, (32, 32, 32, 32), "channels of each level", items=int)
    home = UNet2DModel.__module__
    with restored(DENOISERS):
        about = {"description": "diffusers' UNet", "source": "diffusers"}
        assert register_denoiser("unet", **about, parameters=(channels,))(UNet2DModel) is UNet2DModel
        run = tmp_path / "run"
        images = {"dataset_name": "digits", "distance_samples": 0, "resolution": 16}
        train(TrainingConfig(**{**SMALL, **images, "denoiser": "unet", "eval_batch_size": 2}, output_dir=run))
    assert UNet2DModel.__module__ == home
    assert "UNet2DModel" not in vars(diffusers_lrlab)
    assert sorted(path.name for path in (run / "unet").iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert json.loads((run / "model_index.json").read_text())["unet"] == ["diffusers", "UNet2DModel"]
    assert DDPMPipeline.from_pretrained(run).unet.config.block_out_channels == [32] * 4
    assert "third-party code" not in (run / "README.md").read_text()


@pytest.mark.slow
def test_images_and_what_others_can_do_with_the_folder(tmp_path):
    """Run again from the record, loaded with the code beside the weights, and by those who trust it without our import."""
    file, out = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(OF_IMAGES)
    small = [argument for argument in runs.tiny_arguments(tmp_path) if "model_config" not in argument]
    runs.run(*small, "--max_train_steps=2", f"--import={file}", "--denoiser=one_layer", f"--output_dir={out}")
    assert (out / "unet/diffusers_lrlab.py").read_text() == OF_IMAGES

    load = f"from diffusers import DDPMPipeline; p = DDPMPipeline.from_pretrained({str(out)!r}, trust_remote_code=True)"
    draw = "; print(p(batch_size=1, num_inference_steps=2, output_type='np').images.shape)"
    code = str(out / "unet/diffusers_lrlab.py")
    plugin = f"from diffusers_lrlab.core.plugins import load_plugins; load_plugins({code!r}); "
    for script in (plugin + load + draw, load + draw):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True)
        assert done.stdout.strip() == "(1, 8, 8, 1)", done.stderr
