"""A script of the shape of diffusers' own for DDPM, which knows nothing of diffusers_lrlab; it writes what it did."""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--seed", type=int, default=None)
parser.add_argument("--train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--max_train_steps", type=int, default=6)
parser.add_argument("--prediction_type", default="epsilon")
parser.add_argument("--snr_gamma", type=float, default=None)
parser.add_argument("--draw_twice", action="store_true")
parser.add_argument("--fail_at_end", action="store_true", help="After the last update.")


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(0 if args.seed is None else args.seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(2048, 2), batch_size=args.train_batch_size)
    lr_scheduler = get_scheduler("constant", optimizer)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000, prediction_type=args.prediction_type)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    rows, global_step = [], 0
    while global_step < args.max_train_steps:
        for images in loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(images)
                bsz = images.shape[0]
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=images.device)
                timesteps = timesteps.long()
                if args.draw_twice:
                    torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,))
                noisy = noise_scheduler.add_noise(images, noise, timesteps)
                target = noise
                if args.prediction_type == "v_prediction":
                    target = noise_scheduler.get_velocity(images, noise, timesteps)
                prediction = model(noisy)
                loss = F.mse_loss(prediction.float(), target.float(), reduction="mean")
                errors = (prediction - target).square().mean(1)
                accelerator.backward(loss)
                rows.append(
                    {
                        "update": global_step,
                        "timesteps": timesteps.tolist(),
                        "errors": errors.tolist(),
                        "loss": loss.item(),
                        "after": torch.rand(1).item(),  # of the generator, after all draws of this micro-batch
                    }
                )
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
            if global_step == args.max_train_steps:
                break
    if args.fail_at_end:
        raise RuntimeError("failed after the last update")
    with open(os.path.join(args.output_dir, f"rows-{accelerator.process_index}.json"), "w") as file:
        json.dump({"rows": rows, "weights": accelerator.unwrap_model(model).weight.tolist()}, file)
    loss = prediction = None  # whose graph holds the distributed model
    del model, optimizer, lr_scheduler
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(parser.parse_args())
