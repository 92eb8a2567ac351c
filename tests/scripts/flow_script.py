"""A script of the shape of diffusers' own for flow matching, which knows nothing of diffusers_lrlab."""

import argparse
import copy
import json
import os

import torch
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--seed", type=int, default=None)
parser.add_argument("--train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--max_train_steps", type=int, default=6)
parser.add_argument("--weighting_scheme", default="none")
parser.add_argument("--precondition_outputs", type=int, default=0)
parser.add_argument("--shift", type=float, default=1.0)


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(0 if args.seed is None else args.seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(2048, 2), batch_size=args.train_batch_size)
    lr_scheduler = get_scheduler("constant", optimizer)
    noise_scheduler = FlowMatchEulerDiscreteScheduler(shift=args.shift)
    noise_scheduler_copy = copy.deepcopy(noise_scheduler)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    rows, global_step = [], 0
    while global_step < args.max_train_steps:
        for model_input in loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(model_input)
                bsz = model_input.shape[0]
                u = compute_density_for_timestep_sampling(
                    weighting_scheme=args.weighting_scheme,
                    batch_size=bsz,
                    logit_mean=0.0,
                    logit_std=1.0,
                    mode_scale=1.29,
                )
                indices = (u * noise_scheduler_copy.config.num_train_timesteps).long()
                sigmas = noise_scheduler_copy.sigmas[indices][:, None]
                noisy_model_input = (1.0 - sigmas) * model_input + sigmas * noise
                model_pred = model(noisy_model_input)
                target = noise - model_input
                if args.precondition_outputs:
                    model_pred = model_pred * (-sigmas) + noisy_model_input
                    target = model_input
                weighting = compute_loss_weighting_for_sd3(weighting_scheme=args.weighting_scheme, sigmas=sigmas)
                errors = (model_pred - target) ** 2
                loss = torch.mean((weighting.float() * errors).reshape(bsz, -1), 1).mean()
                accelerator.backward(loss)
                rows.append(
                    {
                        "update": global_step,
                        "indices": indices.tolist(),
                        "sigmas": sigmas.flatten().tolist(),
                        "errors": errors.mean(1).tolist(),
                        "loss": loss.item(),
                        "after": torch.rand(1).item(),
                    }
                )
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
            if global_step == args.max_train_steps:
                break
    with open(os.path.join(args.output_dir, f"rows-{accelerator.process_index}.json"), "w") as file:
        json.dump({"rows": rows, "weights": accelerator.unwrap_model(model).weight.tolist()}, file)
    loss = model_pred = None  # whose graph holds the distributed model
    del model, optimizer, lr_scheduler
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(parser.parse_args())
