"""LoRAs: what is refused, what is trained, saved and loaded by diffusers alone, resumed and merged."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import printed
import pytest
import runs
import started
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DiTTransformer2DModel
from helpers import load_data_once
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_start_weights import WEIGHTS, model

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core import extras
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data import image_loading
from diffusers_lrlab.finder.find import find_lr_of
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.forecast.memory import forecast_memory
from diffusers_lrlab.hub.contents import contents_of
from diffusers_lrlab.hub.rerun import compare_runs
from diffusers_lrlab.preflight.model_checks import dead_parameters
from diffusers_lrlab.preflight.subject import Subject
from diffusers_lrlab.run.check_run import check_run
from diffusers_lrlab.run.train import run_training
from diffusers_lrlab.training.lora import base_weights, lora_layers, lora_targets, lora_weights, trained_parameters
from diffusers_lrlab.training.model import find_start, given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.sharding import check_sharding
from diffusers_lrlab.training.trainer import Trainer

peft = pytest.importorskip("peft")  # of the extra `lora`
LORA = "pytorch_lora_weights.safetensors"
NUM_UPDATES = 12
DIT = {
    **{"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 1, "out_channels": 1, "num_layers": 2},
    **{"sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 1},
}


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    return model(tmp_path_factory.mktemp("start") / "unet")


def call(output, start, *more, num_updates=NUM_UPDATES):
    return [
        *runs.tiny_arguments(output.parent)[1:],
        f"--output_dir={output}",
        f"--pretrained_model_name_or_path={start}",
        f"--max_train_steps={num_updates}",
        *("--lora_rank=4", "--lora_target_modules=to_q,to_v,*.conv1,time_emb_proj", "--learning_rate=0.01"),
        *("--train_batch_size=50", "--checkpointing_steps=4", "--checkpoints_total_limit=0", *more),
    ]


@pytest.fixture(scope="module")
def lora(unet, tmp_path_factory):
    """A finished run."""
    output = tmp_path_factory.mktemp("lora") / "run"
    runs.run(*call(output, unet))
    return output


REFUSED = {
    "no layer": (
        {"lora_rank": 2, "lora_target_modules": "to_q,nowhere"},
        "must be names of .* layers, got nowhere.*conv_in",
    ),
    "no rank": ({"lora_rank": 0}, r"--lora_rank 0: must be a whole number in \[1, "),
    "a negative scale": ({"lora_rank": 1, "lora_alpha": -1.0}, "--lora_alpha -1"),
    "no weights": ({"lora_rank": 2, "start": None}, "--lora_rank 2 has no effect without --pretrained_model_name_or_path"),
    "a scale alone": ({"lora_alpha": 2.0}, "--lora_alpha 2.0 has no effect without --lora_rank"),
    "merging nothing": ({"merge_lora": True}, "--merge_lora.* has no effect without --lora_rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_lora_is_refused_before_data_are_read(unet, monkeypatch, tmp_path, case):
    def read(*_):
        raise AssertionError("data were read")

    monkeypatch.setattr(image_loading, "load_image_data", read)
    options, message = REFUSED[case]
    start = options.get("start", str(unet))
    options = {name: value for name, value in options.items() if name != "start"}
    config = TrainingConfig(max_train_steps=2, pretrained_model_name_or_path=start, output_dir=str(tmp_path), **options)
    with pytest.raises(LabError, match=message):
        run_training(config)


def test_without_peft_the_extra_is_named(unet, monkeypatch):
    monkeypatch.setattr(extras, "_is_installed", lambda package: package != "peft")
    config = resolve_config(TrainingConfig(pretrained_model_name_or_path=str(unet), lora_rank=2, max_train_steps=1))
    with pytest.raises(LabError, match=r"--lora_rank 2 needs peft.*diffusers_lrlab\[lora\]"):
        find_start(config)


def test_shards_are_refused(unet, monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = TrainingConfig(pretrained_model_name_or_path=str(unet), lora_rank=2, max_train_steps=1)
    with pytest.raises(LabError, match="--lora_rank needs a whole model, and FSDP shards it.*--multi_gpu"):
        check_sharding(resolve_config(config))


def test_the_layers_are_those_of_attention_or_else_all():
    attention = lora_targets(DiTTransformer2DModel(**DIT), None)
    assert len(attention) == 2 * 4
    assert {name.partition("attn1.")[2] for name in attention} == {"to_q", "to_k", "to_v", "to_out.0"}
    plain = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Conv2d(1, 2, 3))
    assert lora_targets(plain, None) == ["0", "2"]
    assert lora_targets(plain, "2") == ["2"]


def test_grouped_convolutions_get_none():
    """peft cannot merge into them, and takes few ranks."""
    layers = torch.nn.Sequential(torch.nn.Conv2d(6, 6, 3, groups=3), torch.nn.Conv2d(6, 6, 3))
    assert lora_targets(layers, None) == ["1"]


def test_only_the_lora_is_trained_averaged_and_checkpointed(lora, unet):
    checkpoint = lora / f"checkpoint-{NUM_UPDATES}"
    for name in ("unet", "unet_ema"):
        assert [path.name for path in (checkpoint / name).iterdir()] == [LORA]
    weights, average = (load_file(checkpoint / name / LORA) for name in ("unet", "unet_ema"))
    assert all(".lora_A.weight" in key or ".lora_B.weight" in key for key in weights)
    assert weights.keys() == average.keys()
    assert any(not torch.equal(value, average[key]) for key, value in weights.items())
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    assert len(optimizer["state"]) == len(weights)
    record = runs.read_record(lora)
    assert record["train"]["num_trained_parameters"] == sum(value.numel() for value in weights.values())
    assert record["config"]["lora_alpha"] == 4.0
    # The pipeline has the average; the weights beside it are those that it started from, to the bit.
    saved, base, start = (load_file(path) for path in (lora / LORA, lora / "unet" / WEIGHTS, unet / WEIGHTS))
    assert all(torch.equal(value, saved[key]) for key, value in average.items())
    assert base.keys() == start.keys()
    assert all(torch.equal(value, start[key]) for key, value in base.items())
    assert (checkpoint / "optimizer.bin").stat().st_size < (unet / WEIGHTS).stat().st_size


def test_it_is_checked_pushed_and_described(lora, tmp_path):
    assert not check_run(lora).damaged
    files = contents_of(lora, "somebody/lora").files
    assert LORA in files
    assert not [name for name in files if name.startswith("lrlab/base")]
    # Its checkpoints are resumed with the base.
    assert "lrlab/base/config.json" in contents_of(lora, "somebody/lora", include_checkpoints=True).files
    card = (lora / "README.md").read_text()
    assert "| LoRA | rank 4, alpha 4, on `to_q,to_v,*.conv1,time_emb_proj`, beside the weights" in card
    assert "class ModelWithLora(UNet2DModel, PeftAdapterMixin):" in card
    copy = shutil.copytree(lora, tmp_path / "copy")
    (copy / LORA).write_bytes((copy / LORA).read_bytes()[:-10])
    assert [name for name in check_run(copy).damaged if LORA in name]


ALONE = """
import sys
import torch
from diffusers import {model}
from diffusers.loaders import PeftAdapterMixin
from safetensors.torch import save_file

class ModelWithLora({model}, PeftAdapterMixin):
    pass

def outputs(model):
    torch.manual_seed(0)
    with torch.no_grad():
        return model.eval()(torch.randn({shape}), torch.arange(4) * 200, **{told}).sample

base = ModelWithLora.from_pretrained(sys.argv[1], subfolder="{part}")
found = {{"base": outputs(base)}}
base.load_lora_adapter(sys.argv[1], prefix="{part}", use_safetensors=True)
found["lora"] = outputs(base)
found["merged"] = outputs({model}.from_pretrained(sys.argv[2], subfolder="{part}"))
assert not [name for name in sys.modules if name.startswith("diffusers_lrlab")]
save_file(found, sys.argv[3])
"""


def outputs_of_diffusers_alone(lora, merged, file, model="UNet2DModel", told="{}", part="unet", shape=(4, 1, 8, 8)):
    """Outputs of the model in a process that does not know this package: as it was, with the LoRA, and merged."""
    code = ALONE.format(model=model, told=told, part=part, shape=shape)
    done = subprocess.run(
        [sys.executable, "-c", code, lora, merged, file], cwd=file.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return load_file(file)


@pytest.mark.slow
def test_diffusers_alone_loads_it_and_merged_it_is_the_same(lora, unet, tmp_path):
    runs.run(*call(tmp_path / "merged", unet, "--merge_lora"))
    assert not (tmp_path / "merged" / LORA).exists()
    found = outputs_of_diffusers_alone(lora, tmp_path / "merged", tmp_path / "outputs")
    assert (found["lora"] - found["base"]).abs().max() > 1e-3
    torch.testing.assert_close(found["merged"], found["lora"], rtol=1e-5, atol=1e-5)
    # A run that goes on after it has finished saves its pipeline again, in the other way.
    runs.run(*call(tmp_path / "merged", unet), "--resume_from_checkpoint=latest")
    kept = [load_file(folder / LORA) for folder in (lora, tmp_path / "merged")]
    assert all(torch.equal(value, kept[1][key]) for key, value in kept[0].items())
    runs.run(*call(tmp_path / "merged", unet, "--merge_lora"), "--resume_from_checkpoint=latest")
    assert not (tmp_path / "merged" / LORA).exists()


@pytest.mark.slow
def test_it_loads_as_printed(lora, tmp_path):
    """By the code in its card, and by that of the tutorial."""
    code = printed.block_with("class UNetWithLora", "python").code.replace("photos-lora", str(lora))
    card = (lora / "README.md").read_text().split("```python")[2].partition("```")[0]
    check = "assert any('.lora_A.' in name for name in pipeline.unet.state_dict())\n"
    code = f"{code}\n{check}del pipeline\n{card}\n{check}pipeline(batch_size=1, num_inference_steps=1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_with_labels_its_card_loads_it_alone(tmp_path):
    start = model(tmp_path / "start", num_class_embeds=10)
    runs.run(*call(tmp_path / "run", start, "--label_column=label", num_updates=1))
    card = (tmp_path / "run" / "README.md").read_text().split("```python")[3].partition("```")[0]
    code = f"{card}\nassert any('.lora_A.' in name for name in pipeline.unet.state_dict())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_rerun_reproduces_it_to_the_bit(lora, tmp_path):
    command = ["-m", "diffusers_lrlab.cli.main", "rerun", lora, "--out", tmp_path / "again", "--compare"]
    status, stdout, stderr = started.run(*command, env=runs.environment())
    assert status == 0, stdout + stderr
    assert "reproduced, to the bit" in stdout
    again = load_file(tmp_path / "again" / LORA)
    save_file({name: value + 1 for name, value in again.items()}, tmp_path / "again" / LORA)
    found = compare_runs(lora, tmp_path / "again")
    assert f"{len(again)} of " in found.findings["weights"]


def assert_same_end(first, second, num_updates=NUM_UPDATES):
    names = [f"checkpoint-{num_updates}/{part}/{LORA}" for part in ("unet", "unet_ema")] + [LORA, f"unet/{WEIGHTS}"]
    for name in names:
        expected, found = load_file(first / name), load_file(second / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items()), name
        with safe_open(first / name, "pt") as one, safe_open(second / name, "pt") as other:
            assert one.metadata() == other.metadata()
    states = [torch.load(run / f"checkpoint-{num_updates}/optimizer.bin", weights_only=True) for run in (first, second)]
    for index, state in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][key]) for key, value in state.items())
    assert (first / "lrlab/metrics.jsonl").read_text() == (second / "lrlab/metrics.jsonl").read_text()


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_bits_without_its_start(lora, unet, tmp_path):
    start = shutil.copytree(unet, tmp_path / "start")
    output = tmp_path / "run"
    process = runs.start_and_wait_for((output / "checkpoint-4/manifest.json").exists, *call(output, start))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (output / "model_index.json").exists()
    shutil.rmtree(start)
    runs.run(*call(output, start), "--resume_from_checkpoint=latest")
    assert_same_end(lora, output)


def test_without_its_base_it_does_not_go_on(lora, unet, tmp_path):
    copy = shutil.copytree(lora, tmp_path / "copy")
    (copy / "lrlab/base" / WEIGHTS).write_bytes(b"")
    stderr = runs.run(*call(copy, unet), "--resume_from_checkpoint=latest", expect=2)
    assert "the weights beside it are damaged" in stderr
    assert [name for name in check_run(copy).damaged if name.startswith("weights beside the LoRA of checkpoints: ")]
    other = call(copy, unet, "--lora_rank=2", "--resume_from_checkpoint=latest")
    assert "--lora_rank: 4 then, 2 now" in runs.run(*other, expect=2)


@pytest.mark.slow
def test_two_processes_train_the_same_lora(lora, unet, tmp_path):
    more = [option for option in call(tmp_path / "run", unet) if "batch_size=50" not in option]
    runs.run(*more, "--train_batch_size=25", processes=2)
    expected, found = load_file(lora / LORA), load_file(tmp_path / "run" / LORA)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


@pytest.fixture
def trainer(unet, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    config = resolve_config(
        TrainingConfig(
            **{"max_train_steps": 5, "pretrained_model_name_or_path": str(unet), "lora_rank": 2, "train_batch_size": 20},
            **{"num_validation_images": 16, "mixed_precision": "no"},
        )
    )
    start = find_start(config)
    plan = make_plan(config, load_data_once(config), given_model_config(config, start), start=start)
    return Trainer(plan, load_data_once(config), Accelerator(cpu=True), RunFolder(tmp_path / "run"))


@pytest.mark.slow
def test_finder_checks_and_forecast_know_it(trainer):
    model, plan = trainer.run.model, trainer.run.plan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert find_lr_of(trainer, FinderConfig(num_updates=10, repeats=1, start_lr=1e-5, end_lr=1e-1)).sweeps
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert dead_parameters(Subject(trainer)) is None
    memory = forecast_memory(plan)
    trained = 4 * plan.num_trained_parameters
    assert (memory.parameters, memory.ema, memory.optimizer) == (4 * plan.num_parameters, trained, memory.optimizer)
    assert trained <= memory.optimizer / 2 < 1.1 * trained
    assert plan.num_parameters == sum(value.numel() for value in model.parameters())


def test_it_is_saved_as_peft_and_diffusers_do_and_merges_without_touching_the_model(trainer, tmp_path):
    model = trainer.run.model
    for index, parameter in enumerate(trained_parameters(model).values()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved = lora_weights(model, "unet")
    saved.save_pretrained(tmp_path)
    expected = peft.get_peft_model_state_dict(model)
    found = load_file(tmp_path / LORA)
    assert found.keys() == {f"unet.{name}" for name in expected}
    assert all(torch.equal(value, found[f"unet.{name}"]) for name, value in expected.items())
    settings = json.loads(saved.metadata["lora_adapter_metadata"])
    assert (settings["unet.r"], settings["unet.lora_alpha"], settings["unet.peft_type"]) == (2, 2, "LORA")
    merged, base = base_weights(model, merged=True), base_weights(model)
    name, layer = next(iter(lora_layers(model).items()))
    low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + high @ low)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_transformer_with_labels(tmp_path):
    """A DiT: trained, killed, resumed, saved, loaded by diffusers alone, and merged."""
    start = model(tmp_path / "start", DiTTransformer2DModel, DIT)
    plugin = f"--import={Path(__file__).with_name('dit.py')}"
    own = [plugin, "--denoiser=tiny_dit", "--no_evaluation", "--lora_target_modules=to_q,to_v,ff.net.*"]
    for name in ("run", "merged"):
        runs.run(*call(tmp_path / name, start, *own, *(("--merge_lora",) if name == "merged" else ())))
    found = outputs_of_diffusers_alone(
        *(tmp_path / "run", tmp_path / "merged", tmp_path / "outputs"),
        *("DiTTransformer2DModel", "{'class_labels': torch.arange(4)}"),
    )
    assert (found["lora"] - found["base"]).abs().max() > 1e-3
    torch.testing.assert_close(found["merged"], found["lora"], rtol=1e-5, atol=1e-5)
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / f"checkpoint-{NUM_UPDATES}")
    runs.run(*call(tmp_path / "resumed", start, *own), "--resume_from_checkpoint=latest")
    assert_same_end(tmp_path / "run", tmp_path / "resumed")
