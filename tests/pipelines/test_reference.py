"""Parts of a pipeline that are not trained: saved by reference, with the class names beside them."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import AutoencoderKL

from diffusers_lrlab import LabError, TrainingConfig, train
from diffusers_lrlab.hub.cards import located_card
from diffusers_lrlab.hub.pipeline_folder import check_pipeline
from diffusers_lrlab.pipelines.point_ddpm import PointDDPMPipeline
from diffusers_lrlab.pipelines.reference import REFERENCES, Reference, saved_references
from diffusers_lrlab.training.kinds.points import KINDS, Points

NAMES = {"0": "head", "1": "tail"}


class CodedPipeline(PointDDPMPipeline):
    def __init__(self, denoiser, scheduler, vae, id2label=None):
        super().__init__(denoiser, scheduler)
        self.register_modules(vae=vae)
        self.names = id2label

    def __call__(self, *args, **kwargs):
        assert not any(parameter.requires_grad for parameter in self.vae.parameters())
        return super().__call__(*args, **kwargs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    sizes = {"block_out_channels": (4,), "norm_num_groups": 2, "latent_channels": 2, "layers_per_block": 1}
    AutoencoderKL(in_channels=1, out_channels=1, **sizes).save_pretrained(folder / "part")
    return Reference("diffusers:AutoencoderKL", str(folder), subfolder="part")


@pytest.fixture(scope="module")
def run(reference, tmp_path_factory):
    class Coded(Points):
        name = "coded"
        pipeline = f"{__name__}:CodedPipeline"

        def pipeline_parts(self, config):
            return {"vae": reference, "id2label": NAMES}

    folder = tmp_path_factory.mktemp("runs") / "coded"
    with KINDS.temporarily():
        KINDS.register("coded", description="points beside a VAE", source="a test")(Coded)
        data = {"dataset_name": "dino", "data_kind": "coded", "num_validation_images": 16}
        short = {"max_train_steps": 2, "train_batch_size": 8, "eval_batch_size": 4, "ddpm_num_steps": 4}
        train(TrainingConfig(**data, **short, preflight=False, output_dir=str(folder)))
    yield folder
    AcceleratorState._reset_state(reset_partial_state=True)


def index_of(folder):
    return json.loads((folder / "model_index.json").read_text())


@pytest.mark.slow
def test_the_index_names_the_source_and_there_are_no_weights(run, reference):
    assert index_of(run)["vae"] == ["diffusers", "AutoencoderKL"]
    assert saved_references(index_of(run)) == {"vae": reference}
    assert index_of(run)["id2label"] == NAMES
    assert not list(run.rglob("vae"))


@pytest.mark.slow
def test_it_loads_with_the_part_and_has_its_class_names(run, reference):
    pipeline = CodedPipeline.from_pretrained(run, vae=reference.load())
    assert pipeline.vae is reference.load()
    assert pipeline.names == NAMES
    assert pipeline(num_points=3, num_inference_steps=2).points.shape == (3, 2)


@pytest.mark.slow
def test_a_folder_without_the_part_is_whole(run, tmp_path):
    check_pipeline(run)
    index = index_of(run)
    del index["_references"]
    (run / "model_index.json").rename(tmp_path / "kept")
    (run / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(LabError, match="vae' is missing, or has no configuration"):
        check_pipeline(run)
    (tmp_path / "kept").replace(run / "model_index.json")


@pytest.mark.slow
def test_the_card_says_how_the_part_is_loaded_also_when_it_is_uploaded(run, reference):
    line = f'`vae=AutoencoderKL.from_pretrained("{reference.name_or_path}", subfolder="part")`'
    assert line in (run / "README.md").read_text()
    card = located_card(run, "user/coded", "main").decode()
    assert line in card
    assert 'DiffusionPipeline.from_pretrained("user/coded")' in card


def test_it_is_loaded_once_for_inference(reference):
    part = reference.load()
    assert part is reference.load()
    assert not part.training
    assert isinstance(part, torch.nn.Module)


@pytest.mark.parametrize(
    "references", [[], {"vae": "a"}, {"vae": {"x": 1}}, {"vae": {"model": 1, "name_or_path": "a/b"}}], ids=str
)
def test_damaged_references_are_told(tmp_path, references):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline", REFERENCES: references}))
    with pytest.raises(LabError, match="references of its parts are damaged"):
        check_pipeline(tmp_path)
