"""A script that trains two models with rates of their own, and knows nothing of diffusers_lrlab."""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers.optimization import get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--learning_rate", type=float, default=1e-2)
parser.add_argument("--adam_weight_decay", type=float, default=1e-2)
parser.add_argument("--max_train_steps", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--checkpointing_steps", type=int, default=1000)
parser.add_argument("--resume_from_checkpoint", default=None)
parser.add_argument("--report_to", default=None)


def main(args):
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, log_with=args.report_to, project_dir=args.output_dir
    )
    set_seed(0)
    text_encoder = torch.nn.Linear(3, 4)
    unet = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    text_encoder.requires_grad_(True)
    params_to_optimize = [
        {"params": unet.parameters(), "lr": args.learning_rate},
        {"params": text_encoder.parameters(), "lr": args.learning_rate * 0.5, "weight_decay": 0.1},
    ]
    optimizer_class = torch.optim.AdamW
    optimizer = optimizer_class(
        params_to_optimize, lr=args.learning_rate, betas=(0.8, 0.99), weight_decay=args.adam_weight_decay, eps=1e-7
    )
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=0, num_training_steps=args.max_train_steps * accelerator.num_processes
    )
    unet, text_encoder, optimizer, loader, lr_scheduler = accelerator.prepare(
        unet, text_encoder, optimizer, loader, lr_scheduler
    )
    if accelerator.is_main_process:
        accelerator.init_trackers("two-models")
    global_step, rows = 0, []
    if args.resume_from_checkpoint:
        accelerator.load_state(os.path.join(args.output_dir, args.resume_from_checkpoint))
        global_step = int(args.resume_from_checkpoint.split("-")[1])
    batches = accelerator.skip_first_batches(loader, global_step * args.gradient_accumulation_steps)
    while global_step < args.max_train_steps:
        for batch in batches:
            with accelerator.accumulate(unet, text_encoder):
                loss = F.mse_loss(unet(text_encoder(batch)), batch.roll(1, 1))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_([*unet.parameters(), *text_encoder.parameters()], 0.5)
                used = [group["lr"] for group in optimizer.param_groups]
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            rows.append({"lrs": used})
            if not accelerator.sync_gradients:
                continue
            global_step += 1
            if global_step % args.checkpointing_steps == 0 and accelerator.is_main_process:
                accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            accelerator.log({"train_loss": loss.item()}, step=global_step)
            if global_step == args.max_train_steps:
                break
        batches = loader
    models = (accelerator.unwrap_model(unet), accelerator.unwrap_model(text_encoder))
    weights = [parameter.tolist() for model in models for parameter in model.parameters()]
    with open(os.path.join(args.output_dir, f"rows-{accelerator.process_index}.json"), "w") as file:
        json.dump({"rows": rows, "weights": weights, "optimizer": type(optimizer.optimizer).__name__}, file)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(parser.parse_args())
