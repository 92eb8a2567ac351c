"""One clock, batch-split invariance and the audit of the rate, for every objective."""

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import load_data_once

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.objective.process import OBJECTIVES
from diffusers_lrlab.training.model import given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 16, "num_layers": 1, "embedding_size": 8}
LAYOUTS = [(1, 32), (2, 16), (4, 8)]


def run(folder, objective, accumulation, micro_batch):
    """A trainer at the end of its run, and the rows of its log."""
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    options = {"dataset_name": "moons", "max_train_steps": 12, "num_validation_images": 40, "validation_steps": 4}
    options |= {"model_config_name_or_path": str(folder / "model.json"), "num_inference_steps": 3, "logging_steps": 1}
    options |= {"gradient_accumulation_steps": accumulation, "train_batch_size": micro_batch, "cpu_threads": 1}
    options |= {"loss_weighting": "min_snr", "timestep_sampler": "laplace:draw=stratified", "save_images_epochs": 10**6}
    config = resolve_config(TrainingConfig(**options, objective=objective, output_dir=str(folder / "run")))
    data = load_data_once(config)
    plan = make_plan(config, data, given_model_config(config))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    trainer = Trainer(plan, data, accelerator, RunFolder(folder / "run"))
    for _ in trainer.updates(show_progress=False):
        pass
    return trainer, trainer.folder.read_metrics()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_how_a_batch_is_split_changes_neither_rates_nor_losses_nor_weights(tmp_path, objective):
    runs = [run(tmp_path / str(layout[0]), objective, *layout) for layout in LAYOUTS]
    first, rows = runs[0]
    assert first.run.audit.largest_lr_deviation == 0
    for trainer, others in runs[1:]:
        assert trainer.run.audit.largest_lr_deviation == 0
        assert len(rows) == len(others)
        for row, other in zip(rows, others, strict=True):
            assert row.get("lr") == other.get("lr")
            assert row.get("images_seen") == other.get("images_seen")
            for name in {"loss", "unweighted_loss", "validation_loss", "validation_loss_ema"} & row.keys():
                assert other[name] == pytest.approx(row[name], rel=1e-4)
        for one, other in zip(first.run.model.parameters(), trainer.run.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
