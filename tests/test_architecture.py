"""A third kind of data, in this one file: vectors of a parquet column, learned by a linear denoiser."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import started
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from registrations import restored
from runs import read_metrics, read_record

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.streams import split_rows
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.loading import TrainingData
from diffusers_lrlab.data.points import PointTransform, read_points
from diffusers_lrlab.data.sources import open_dataset
from diffusers_lrlab.evaluation.registry import METRICS, register_metric
from diffusers_lrlab.hub.card import CARD_SECTIONS, CardSection
from diffusers_lrlab.run.train import train
from diffusers_lrlab.study.kind_settings import KIND_SETTINGS, KindSettings
from diffusers_lrlab.study.run import run_study
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.kinds import KINDS, DataKind, row_for
from diffusers_lrlab.training.results import Results

DIMENSION = 5


class LinearDenoiser(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, dimension: int = DIMENSION):
        super().__init__()
        self.linear = torch.nn.Linear(dimension + 1, dimension)

    def forward(self, sample, timestep, return_dict=True):
        timestep = torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        prediction = self.linear(torch.cat([sample, timestep[:, None] / 100], dim=1))
        return SimpleNamespace(sample=prediction) if return_dict else (prediction,)


class Vectors(DataKind):
    name = form = "vectors"
    results = f"{__name__}:VectorResults"
    model = f"{__name__}:LinearDenoiser"
    pipeline = "diffusers_lrlab.pipelines.point_ddpm:PointDDPMPipeline"
    component = "denoiser"
    sampling_batch = 1000
    is_bounded = False
    has_neighbours = False
    num_train_timesteps = 10

    def defaults(self, config):
        sizes = {"num_validation_images": 16, "train_batch_size": 8, "eval_batch_size": 12, "distance_samples": 12}
        return {**sizes, "learning_rate": 1e-2, "max_train_steps": 20}

    def load_data(self, config, num_processes):
        vectors = read_points(open_dataset(config), "vector")
        held_out, training = split_rows(len(vectors), config.num_validation_images)
        transform = PointTransform(vectors.shape[1], "vector")
        return TrainingData("vectors", None, Batch(vectors[held_out]), "vector", "v1", transform, Batch(vectors[training]))

    def data_arguments(self, config, data):
        return {"dimension": data.image_shape[0]}

    def sample(self, pipeline, num, generator, num_inference_steps):
        return pipeline(num_points=num, generator=generator, num_inference_steps=num_inference_steps).points


class VectorResults(Results):
    def draw(self, run, samples, lab):
        (lab / "samples.txt").write_text(str(samples.shape))


def register():
    """What a package with a kind of its own does when it is imported."""
    KINDS.register("vectors", description="vectors, by a linear map", source="this test")(Vectors)
    CARD_SECTIONS["vectors"] = CardSection(tags=("vectors",), plots="\nShapes: `lrlab/samples.txt`\n")
    KIND_SETTINGS["vectors"] = KindSettings(default_metrics=("mean_error",))

    facts = {"form": "vectors", "needs": ("samples",)}

    @register_metric("mean_error", description="Distance of the means", source="this test", traits=("on_hub",), facts=facts)
    def mean_error(real, generated):
        return float(np.linalg.norm(real.mean(0) - generated.mean(0)))


@pytest.fixture(scope="module", autouse=True)
def registered():
    with restored(KINDS, METRICS, CARD_SECTIONS, KIND_SETTINGS):
        register()
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    values = np.random.default_rng(0).normal(size=(200, DIMENSION)).astype(np.float32)
    pq.write_table(pa.table({"vector": values.tolist()}), folder / "train.parquet")
    return folder


def config(data, folder, **options):
    return TrainingConfig(
        dataset_name=str(data), data_kind="vectors", output_dir=str(folder), cache_dir=str(data / ".cache"), **options
    )


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "vectors"
    assert train(config(data, folder, checkpointing_steps=10)) == folder
    return folder


def test_it_trains_samples_is_evaluated_and_has_a_card(finished):
    rows, validations = read_metrics(finished)
    assert rows[-1]["update"] == 19
    assert validations[-1]["validation_loss"] > 0
    record = read_record(finished)
    assert record["run"]["status"] == "finished"
    assert record["train"]["num_held_out_images"] == 16
    assert record["train"]["results"]["mean_error"] > 0
    assert (finished / "lrlab" / "samples.txt").read_text() == f"(12, {DIMENSION})"
    assert LinearDenoiser.from_pretrained(finished / "denoiser").config.dimension == DIMENSION
    card = (finished / "README.md").read_text()
    for part in ("Training vectors", "Distance of the means", "| Shape of vectors | 5 dimensions |", "- vectors\n"):
        assert part in card
    assert "Shapes: `lrlab/samples.txt`" in card


def test_a_kind_is_small():
    members = {name for name in {**vars(DataKind), **DataKind.__annotations__} if not name.startswith("_")}
    assert len(members) <= 20, sorted(members)
    own = {name for name in vars(Vectors) if not name.startswith("_")}
    assert own <= members, sorted(own - members)


def test_a_kind_without_a_card_section_or_settings_has_the_defaults_or_those_of_its_base():
    class Own(Vectors):
        name = "own"

    assert row_for(Own(), {"vectors": 1, "points": 2}, 0) == 1
    assert row_for(Own(), {"own": 3, "vectors": 1}, 0) == 3
    assert row_for(Own(), {"points": 2}, 0) == 0


def test_it_resumes(data, tmp_path, finished):
    train(config(data, tmp_path / "again", checkpointing_steps=10))
    # As if it had been killed after update 10.
    (tmp_path / "again" / "checkpoint-20" / "trainer.json").unlink()
    train(config(data, tmp_path / "again", checkpointing_steps=10, resume_from_checkpoint="latest"))
    straight, resumed = (LinearDenoiser.from_pretrained(folder / "denoiser") for folder in (finished, tmp_path / "again"))
    assert torch.equal(straight.linear.weight, resumed.linear.weight)


@pytest.mark.slow
def test_it_runs_in_a_study(data, tmp_path):
    spec = {
        "title": "Vectors",
        "base": {"max_train_steps": 10, "data_kind": "vectors", "cache_dir": str(data / ".cache")},
        "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine"}},
        "datasets": {"vectors": {"dataset_name": str(data)}},
        "seeds": 2,
        "baseline": "constant",
    }
    assert run_study(load_spec(spec), tmp_path / "study", quiet=True).is_file()
    assert "mean_error" in (tmp_path / "study" / "summary.json").read_text()


def test_it_is_pushed(finished, hub, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_architecture
from diffusers_lrlab.hub.transfer import Target, push_folder
test_architecture.register()
push_folder({finished!r}, Target("vectors"))
""".replace("PosixPath", "__import__('pathlib').Path")
    status, _, stderr = started.run("-c", code, env=hub.env, cwd=tmp_path)
    assert status == 0, stderr
    assert {"model_index.json", "README.md", "lrlab/run.json"} <= {*hub.model("user/vectors").files}
