"""Runs that start from weights: what is refused before data are read, weights of models and pipelines, resuming, the Hub."""

import json
import shutil
from unittest.mock import Mock

import pytest
import runs
import started
import torch
from accelerate.state import AcceleratorState
from continued_runs import repeated_options
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from faults.cases import MODEL, OPTIONS
from registrations import restored
from runs import TINY_UNET
from safetensors.torch import load_file, save_file
from tables import cases

from diffusers_lrlab import MLPDenoiser, TrainingConfig
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.manifest import file_sums
from diffusers_lrlab.data import loading, points
from diffusers_lrlab.models.loading import find_start_weights
from diffusers_lrlab.models.registry import DENOISERS, register_denoiser
from diffusers_lrlab.run.train import run_training
from diffusers_lrlab.training.model import find_start, given_model_config
from diffusers_lrlab.training.resolve import resolve_config

WEIGHTS = "diffusion_pytorch_model.safetensors"
DIGITS = {"dataset_name": "digits", "max_train_steps": 2}
MOONS = {"dataset_name": "moons", "max_train_steps": 2}
LABELLED = {**TINY_UNET, "num_class_embeds": 10}


def model(folder, model_class=UNet2DModel, config=TINY_UNET, **changed):
    """The folder of a model with random weights."""
    arguments = {key: value for key, value in (config | changed).items() if key != "_class_name"}
    torch.manual_seed(5)
    model_class(**arguments).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models and pipelines, good and bad, by name."""
    base = tmp_path_factory.mktemp("models")
    unet = model(base / "unet")
    model(base / "mlp", MLPDenoiser, MODEL)
    model(base / "rgb", in_channels=3, out_channels=3)
    model(base / "labelled", config=LABELLED)
    for name in ("damaged", "misfit", "missing"):
        shutil.copytree(unet, base / name)
    weights = load_file(unet / WEIGHTS)
    (base / "damaged" / WEIGHTS).write_bytes((unet / WEIGHTS).read_bytes()[:-100])
    save_file({**weights, "conv_in.weight": torch.zeros(8, 1, 5, 5)}, base / "misfit" / WEIGHTS, {"format": "pt"})
    save_file({key: weights[key] for key in [*weights][1:]}, base / "missing" / WEIGHTS, {"format": "pt"})
    (base / "weightless").mkdir()
    shutil.copy(unet / "config.json", base / "weightless")
    (base / "beside").mkdir()
    (base / "beside" / "pytorch_lora_weights.safetensors").write_bytes(b"")
    return base


REFUSED = [
    (DIGITS, "nowhere/at/all", "must be a folder, or a Hub id.*no such folder exists"),
    (MOONS, "unet", "must be weights of a MLPDenoiser, got those of a UNet2DModel.*--denoiser"),
    (DIGITS, "rgb", "in_channels=3 of the model.*--image_channels 3"),
    (DIGITS, "weightless", "no weights beside the config.json"),
    (DIGITS, "damaged", "its weights cannot be loaded"),
    (DIGITS, "missing", "missing: conv_in"),
    (DIGITS, "misfit", "conv_in.weight"),
    (DIGITS, "beside", "without a LoRA beside it.*fuse_lora"),
]


@cases("of_data, start, message", REFUSED)
def test_what_contradicts_is_refused_before_data_are_read(models, monkeypatch, tmp_path, of_data, start, message):
    for module, name in ((loading, "load_image_data"), (points, "load_point_data")):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("data were read")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = TrainingConfig(**of_data, pretrained_model_name_or_path=str(models / start), output_dir=str(tmp_path / "run"))
    with pytest.raises(LabError, match=message):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_replace_the_weights_that_it_starts_from(models, tmp_path):
    """They would be removed before they are loaded."""
    run = tmp_path / "run"
    shutil.copytree(models / "unet", run / "unet")
    (run / "model_index.json").write_text('{"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}')
    for start in (run, run / "unet"):
        own = {"pretrained_model_name_or_path": str(start), "output_dir": str(run), "overwrite_output_dir": True}
        with pytest.raises(LabError, match="must be outside of --output_dir .*give another --output_dir"):
            run_training(TrainingConfig(**DIGITS, **own))
    assert (run / "unet" / WEIGHTS).exists()


def test_a_run_starts_from_an_average_that_diffusers_saved(models, tmp_path):
    """Its config.json has the state of the average, too, which is no argument of the model."""
    saved = UNet2DModel.from_pretrained(models / "unet")
    average = EMAModel(saved.parameters(), model_cls=UNet2DModel, model_config=saved.config)
    average.save_pretrained(tmp_path / "unet_ema")
    config = resolve_config(TrainingConfig(**DIGITS, pretrained_model_name_or_path=str(tmp_path / "unet_ema")))
    start = find_start(config)
    given = given_model_config(config, start)
    assert "decay" not in given
    assert start.read(UNet2DModel).keys() == saved.state_dict().keys()


def test_the_part_of_a_pipeline_is_found(models, tmp_path):
    """By the name that the kind of data has for it, else by its class; old pipelines have it beside their index."""
    index = {"_class_name": "X", "a": ["diffusers", "UNet2DModel"], "unet": ["diffusers", "UNet2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))

    def found():
        return find_start_weights(str(tmp_path), None, "UNet2DModel", "unet").folder

    shutil.copytree(models / "unet", tmp_path / "a")
    assert found() == str(tmp_path / "a")
    shutil.copytree(models / "unet", tmp_path / "unet")
    assert found() == str(tmp_path / "unet")
    for part in ("a", "unet"):
        shutil.rmtree(tmp_path / part)
    shutil.copytree(models / "unet", tmp_path, dirs_exist_ok=True)
    assert found() == str(tmp_path)


@pytest.mark.parametrize("how", [{"safe_serialization": False}, {"max_shard_size": "60KB"}], ids=str)
def test_weights_of_other_files_are_read(models, tmp_path, how):
    """In half precision, pickled or in parts; the model has them in float32."""
    saved = UNet2DModel.from_pretrained(models / "unet").half()
    saved.save_pretrained(tmp_path, **how)
    start = find_start_weights(str(tmp_path), None, "UNet2DModel", "unet")
    fresh = UNet2DModel.from_config(saved.config)
    start.load_into(fresh)
    for name, value in fresh.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, saved.state_dict()[name].float())


def call(output, *more):
    """A run from the tiny UNet, or from another start."""
    return [*runs.tiny_arguments(output.parent)[1:], f"--output_dir={output}", "--train_batch_size=100", *more]


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_goes_on_without_them(models, tmp_path):
    start = shutil.copytree(models / "unet", tmp_path / "start")
    run = [*call(tmp_path / "whole", "--max_train_steps=6", "--checkpointing_steps=3")]
    run.append(f"--pretrained_model_name_or_path={start}")
    runs.run(*run)
    record = runs.read_record(tmp_path / "whole")
    facts = {"name_or_path": str(start), "commit": None, "sha256": file_sums(start / WEIGHTS)["sha256"]}
    assert record["train"]["started_from"] == facts
    assert f"`{start}`, SHA-256 `{facts['sha256'][:16]}`" in (tmp_path / "whole" / "README.md").read_text()
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for gone in (tmp_path / "resumed" / "checkpoint-6", start):
        shutil.rmtree(gone)
    run[run.index(f"--output_dir={tmp_path / 'whole'}")] = f"--output_dir={tmp_path / 'resumed'}"
    runs.run(*run, "--resume_from_checkpoint=latest")
    assert runs.read_record(tmp_path / "resumed")["train"]["started_from"] == facts
    for name in (f"unet/{WEIGHTS}", f"checkpoint-6/unet/{WEIGHTS}", f"checkpoint-6/unet_ema/{WEIGHTS}"):
        expected, found = (load_file(tmp_path / run / name) for run in ("whole", "resumed"))
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.slow
def test_the_weights_before_the_first_update_are_those(models, tmp_path):
    """At a rate of almost nothing they stay; that the scheduler of their pipeline contradicts is a warning."""
    start = tmp_path / "start"
    shutil.copytree(models / "unet", start / "unet")
    DDPMScheduler(prediction_type="v_prediction").save_pretrained(start / "scheduler")
    index = {"unet": ["diffusers", "UNet2DModel"], "scheduler": ["diffusers", "DDPMScheduler"]}
    (start / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline", **index}))
    still = ("--max_train_steps=1", "--learning_rate=1e-30", "--lr_scheduler=constant", "--no_evaluation")
    options = call(tmp_path / "run", *still, f"--pretrained_model_name_or_path={start}")
    stderr = runs.run(*(option for option in options if option != "--no_preflight"))
    assert f"The scheduler beside the model {str(start)!r} " in stderr
    found, expected = load_file(tmp_path / "run/unet" / WEIGHTS), load_file(models / "unet" / WEIGHTS)
    assert all(torch.allclose(value, found[key], rtol=0, atol=1e-20) for key, value in expected.items())


def test_a_named_denoiser_starts_from_weights(models, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    options = [option for option in OPTIONS if "save_model" not in option]
    start = f"--pretrained_model_name_or_path={models / 'mlp'}"
    runs.run(*options, "--denoiser=mlp", start, "--no_evaluation", f"--output_dir={tmp_path / 'run'}")
    record = runs.read_record(tmp_path / "run")
    assert record["config"]["denoiser_kwargs"] == {}
    assert json.loads((tmp_path / "run/denoiser/config.json").read_text())["hidden_size"] == MODEL["hidden_size"]


@pytest.mark.parametrize(
    ("start", "labels", "told"), [("unet", "label", "None.*must be 10"), ("labelled", None, "10.*must be None")]
)
def test_a_named_denoiser_knows_the_labels_of_the_data(models, tmp_path, start, labels, told):
    options = {**DIGITS, "label_column": labels, "pretrained_model_name_or_path": str(models / start)}
    with restored(DENOISERS):
        register_denoiser("labelled_unet", description="a UNet", source="diffusers")(UNet2DModel)
        with pytest.raises(LabError, match=f"num_class_embeds={told}, as in the data 'digits'"):
            run_training(TrainingConfig(**options, denoiser="labelled_unet", output_dir=str(tmp_path / "run")))


@pytest.mark.slow
def test_a_start_on_the_hub_is_recorded_by_its_commit_which_its_options_have(models, tmp_path, hub):
    files = {f"unet/{name}": (models / "unet" / name).read_bytes() for name in ("config.json", WEIGHTS)}
    index = {"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}
    files["model_index.json"] = json.dumps(index).encode()
    repo = hub.put("somebody/unet", files)
    commit, _ = repo.resolve("main")
    first = call(tmp_path / "first", "--max_train_steps=2", "--pretrained_model_name_or_path=somebody/unet")
    status, _, stderr = started.run(runs.SCRIPT, *first, env=hub.env)
    assert status == 0, stderr
    record = runs.read_record(tmp_path / "first")
    assert record["train"]["started_from"]["commit"] == commit
    assert (
        f"[somebody/unet](https://huggingface.co/somebody/unet) at `{commit}`" in (tmp_path / "first/README.md").read_text()
    )
    assert "base_model: somebody/unet" in (tmp_path / "first" / "README.md").read_text()
    other = load_file(models / "unet" / WEIGHTS)
    save_file({key: value + 1 for key, value in other.items()}, tmp_path / "other", {"format": "pt"})
    repo.commit({**files, f"unet/{WEIGHTS}": (tmp_path / "other").read_bytes()}, "others")
    assert repeated_options(tmp_path / "first")["pretrained_model_name_or_path"] == f"somebody/unet@{commit}"
    # The branch has moved on, and the commit is what it was.
    again = call(tmp_path / "again", *first[-2:], f"--pretrained_model_name_or_path=somebody/unet@{commit}")
    status, _, stderr = started.run(runs.SCRIPT, *again, env=hub.env)
    assert status == 0, stderr
    assert runs.read_record(tmp_path / "again")["train"]["started_from"] == record["train"]["started_from"]
