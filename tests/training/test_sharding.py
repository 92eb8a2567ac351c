"""FSDP2 beside DDP: the same run, with parameters, average and optimizer spread over the processes; what is refused."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import runs
import started
import torch
from safetensors.torch import load_file

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.sharding import check_sharding

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "DeepSpeed cannot be used here.*--use_fsdp --fsdp_version 2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "Megatron-LM cannot be used here"),
        ({"ACCELERATE_USE_FSDP": "true"}, {}, "FSDP 1 cannot be used here.* fsdp_version: 2"),
        ({**FSDP, "WORLD_SIZE": "1"}, {}, "there is one. Give --num_processes 2"),
        ({**FSDP, "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, {}, "SHARDED_STATE_DICT"),
        (FSDP, {"optimizer": "muon"}, "--optimizer muon has not been tried on shards.* adamw, adam"),
        (FSDP, {"learning_rate": "auto"}, "--learning_rate auto needs a whole model"),
        (FSDP, {"timestep_grad_every": 5}, "--timestep_grad_every needs a whole model"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(monkeypatch, environment, options, message):
    for name, value in {"WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    config = resolve_config(TrainingConfig(dataset_name="digits", max_train_steps=2, **options))
    with pytest.raises(LabError, match=message):
        check_sharding(config)


def test_without_a_word_of_it_nothing_is_refused_and_the_finder_needs_a_whole_model(monkeypatch):
    config = resolve_config(TrainingConfig(dataset_name="digits", max_train_steps=2))
    check_sharding(config, finder=True)
    for name, value in {"WORLD_SIZE": "2", **FSDP}.items():
        monkeypatch.setenv(name, value)
    check_sharding(config)
    with pytest.raises(LabError, match="find-lr needs a whole model"):
        check_sharding(config, finder=True)


SHARES = """
import json, os, sys
from pathlib import Path

from diffusers_lrlab.training import trainer

save = trainer.Trainer.save


def measured(self, **how):
    from diffusers_lrlab.training.sharding import local_shard

    def size(tensors):
        return sum(local_shard(tensor).numel() for tensor in tensors)

    state = [value for state in self.run.optimizer.state.values() for key, value in state.items() if key != "step"]
    share = {"parameters": size(self.run.model.parameters()), "optimizer": size(state)}
    share["ema"] = size(value for average in self.run.averages for value in average.shadow_params)
    Path(os.environ["LRLAB_SHARES"], os.environ["RANK"] + ".json").write_text(json.dumps(share))
    return save(self, **how)


trainer.Trainer.save = measured
from diffusers_lrlab.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
"""


def arguments(base, folder, batch=8):
    return [
        *runs.tiny_arguments(base),
        f"--output_dir={folder}",
        "--max_train_steps=6",
        f"--train_batch_size={batch}",
        "--validation_steps=3",
        "--checkpointing_steps=3",
        "--checkpoints_total_limit=0",
        "--lr_warmup_steps=2",
        "--ema=constant:decay=0.9",
        "--ema=posthoc:sigma_rels=[0.1|0.2],snapshots=2",
        "--ema=constant:decay=0.5",
    ]


def weights_of(folder):
    return load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")


def averages_of(folder):
    """The averages beside the first one, and the snapshots, by file."""
    files = [*(folder / "ema_snapshots").rglob("*.safetensors"), *(folder / "lrlab" / "averages").rglob("*.safetensors")]
    return {str(path.relative_to(folder)): load_file(path) for path in files}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same run of two processes by DDP and by FSDP2, by a real `accelerate launch` with a configuration file."""
    base = tmp_path_factory.mktemp("sharded")
    runs.run(*arguments(base, base / "ddp"), processes=2)
    (base / "script.py").write_text(SHARES)
    (base / "accelerate.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        "mixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\n"
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={base / 'accelerate.yaml'}"]
    launcher += ["--main_process_port", str(started.free_port()), str(base / "script.py")]
    env = {**runs.environment(), "LRLAB_SHARES": str(base)}
    command = [*launcher, *arguments(base, base / "fsdp")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return base


def assert_alike(found, expected, tolerance=1e-6):
    for rows, others in zip(runs.read_metrics(found), runs.read_metrics(expected), strict=True):
        assert len(rows) == len(others) > 0
        for row, other in zip(rows, others, strict=True):
            assert row.keys() == other.keys()
            for key in row:
                np.testing.assert_allclose(row[key], other[key], rtol=tolerance, err_msg=key)


@pytest.mark.slow
def test_losses_norms_and_weights_are_those_of_ddp(folders):
    assert_alike(folders / "fsdp", folders / "ddp")
    expected, found = weights_of(folders / "ddp"), weights_of(folders / "fsdp")
    assert {*expected} == {*found}
    for name, value in expected.items():
        if not name.endswith("to_k.bias"):  # its gradient is rounding noise
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
    averages = [averages_of(folders / name) for name in ("ddp", "fsdp")]
    assert len(averages[0]) == 3  # two snapshots, and the average beside those
    for name, expected in averages[0].items():
        known = {key: value for key, value in averages[1][name].items() if not key.endswith("to_k.bias")}
        assert known.keys() == {key for key in expected if not key.endswith("to_k.bias")}
        torch.testing.assert_close(known, {key: expected[key] for key in known}, rtol=0, atol=1e-5)
    assert main(["ema", str(folders / "fsdp"), "--sigma_rel", "0.2", "--out", str(folders / "width")]) == 0
    assert runs.read_record(folders / "fsdp")["train"]["preflight"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "batch"), [(2, 8), (4, 4)])
def test_a_sharded_run_resumes_with_any_number_of_processes(folders, tmp_path, processes, batch):
    shutil.copytree(folders / "fsdp", tmp_path / "run")
    for name in ("checkpoint-6", "unet"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / "model_index.json").unlink()
    env = {**runs.environment(), **FSDP}
    resumed = [*arguments(folders, tmp_path / "run", batch), "--resume_from_checkpoint=latest"]
    runs.run(*resumed, processes=processes, env=env)
    if processes == 2:
        assert (tmp_path / "run/lrlab/metrics.jsonl").read_text() == (folders / "fsdp/lrlab/metrics.jsonl").read_text()
        for name, value in weights_of(folders / "fsdp").items():
            assert torch.equal(weights_of(tmp_path / "run")[name], value), name
        found, expected = averages_of(tmp_path / "run"), averages_of(folders / "fsdp")
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert_alike(tmp_path / "run", folders / "fsdp", 1e-5)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_with_one(folders, tmp_path):
    shutil.copytree(folders / "ddp", tmp_path / "run")
    for name in ("checkpoint-6", "unet"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / "model_index.json").unlink()
    runs.run(*arguments(folders, tmp_path / "run", 16), "--resume_from_checkpoint=latest")
    assert_alike(tmp_path / "run", folders / "ddp", 1e-5)


@pytest.mark.slow
def test_ddp_and_fsdp_do_not_go_on_with_each_other(folders):
    args = [*arguments(folders, folders / "fsdp"), "--resume_from_checkpoint=checkpoint-3"]
    message = runs.run(*args, processes=2, expect=2)
    assert "sharded: True then, False now" in message


@pytest.mark.slow
def test_each_process_has_its_share(folders):
    total = runs.read_record(folders / "fsdp")["train"]["num_parameters"]
    shares = [json.loads((folders / f"{rank}.json").read_text()) for rank in range(2)]
    for part, whole in (("parameters", total), ("ema", 4 * total), ("optimizer", 2 * total)):
        assert sum(share[part] for share in shares) == whole
        for share in shares:
            assert abs(share[part] / whole - 0.5) < 0.05, (part, share)
