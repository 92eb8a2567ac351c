"""A run that goes on with other processes and micro-batches, at the same global batch, ends like one that did not change."""

import json

import pytest
import runs
import torch

ARGUMENTS = """--dataset_name=moons --max_train_steps=12 --checkpointing_steps=4 --checkpoints_total_limit=0
    --logging_steps=1 --num_validation_images=0 --eval_batch_size=4 --distance_samples=0 --ddpm_num_steps=20
    --num_inference_steps=2 --no_preflight""".split()
MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 16, "num_layers": 2, "embedding_size": 8}
BATCH = 32


def in_float64():
    """Called in each process, first: weights, data and losses are float64, where sums in another order agree."""
    from diffusers_lrlab.training import trainer

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    to_device = trainer.to_device
    trainer.to_device = lambda batch, device: to_device(batch, device).map(torch.Tensor.double)


@pytest.mark.slow
def test_four_then_two_then_one_process(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def train(folder, processes, *more):
        arguments = [*ARGUMENTS, f"--model_config_name_or_path={tmp_path / 'config.json'}", f"--output_dir={folder}"]
        runs.run(*arguments, f"--train_batch_size={BATCH // processes}", *more, processes=processes, before=in_float64)
        return folder

    alone, fewer = train(tmp_path / "alone", 1), tmp_path / "fewer"
    train(fewer, 4)
    train(fewer, 2, "--resume_from_checkpoint=checkpoint-4")  # drops what came after it
    halves = ("--gradient_accumulation_steps=2", f"--train_batch_size={BATCH // 2}")
    train(fewer, 1, "--resume_from_checkpoint=checkpoint-8", *halves)
    assert [len(runs.read_record(fewer)["run"]["starts"]), runs.read_record(fewer)["train"]["num_processes"]] == [3, 1]
    for name in ("denoiser", "denoiser_ema"):
        expected, found = (runs.read_weights(folder / "checkpoint-12" / name) for folder in (alone, fewer))
        start = runs.read_weights(alone / "checkpoint-4" / name)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert found[key].dtype == torch.float64
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
        assert any((value - start[key]).abs().max() > 1e-4 for key, value in expected.items())  # it learned meanwhile
    losses = [[row["loss"] for row in runs.read_metrics(folder)[0]] for folder in (alone, fewer)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
