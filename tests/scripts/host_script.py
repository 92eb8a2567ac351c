"""A training script of the shape of diffusers' own train_unconditional.py, which knows nothing of diffusers_lrlab."""

import argparse
import json
import math
import os

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr_scheduler", type=str, default="cosine", choices=["linear", "cosine", "constant"])
    parser.add_argument("--lr_warmup_steps", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop_after", type=int, default=None)
    return parser.parse_args()


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999))
    loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=args.train_batch_size)
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * args.gradient_accumulation_steps,
        num_training_steps=len(loader) * args.num_epochs,
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_epochs * math.ceil(len(loader) / args.gradient_accumulation_steps)
    checkpoint = os.path.join(args.output_dir, "checkpoint")
    update, rows = 0, []
    if args.resume:
        accelerator.load_state(checkpoint)
        with open(os.path.join(checkpoint, "update")) as file:
            update = int(file.read())
    while update < args.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                group = optimizer.param_groups[0]
                before = {"update": update, "lr": group["lr"], "beta1": group["betas"][0]}
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                update += 1
                rows.append({**before, "logged": lr_scheduler.get_last_lr()[0]})
            if update == args.max_train_steps:
                break
            if update == args.stop_after and accelerator.sync_gradients:
                accelerator.save_state(checkpoint)
                with open(os.path.join(checkpoint, "update"), "w") as file:
                    file.write(str(update))
                break
        if update == args.stop_after:
            break
    if accelerator.is_main_process and update == args.max_train_steps:
        with open(os.path.join(args.output_dir, "rows.json"), "w") as file:
            json.dump(rows, file)
    # A process that exits with gloo's threads running may abort, and a distributed model that is freed after its process
    # group may wait for ever.
    del model, optimizer, lr_scheduler
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
