"""A script of the shape of diffusers' own, which resumes as 49 of them do: from the first batch of an epoch."""

import argparse
import json
import math
import os
import random
import signal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--dataloader_num_workers", type=int, default=0)
parser.add_argument("--max_train_steps", type=int, default=14)
parser.add_argument("--checkpointing_steps", type=int, default=1)
parser.add_argument("--resume_from_checkpoint", default=None)
parser.add_argument("--learning_rate", type=float, default=1e-2)
parser.add_argument("--lr_scheduler", default="constant")
parser.add_argument("--lr_warmup_steps", type=int, default=0)
parser.add_argument("--rows", type=int, default=22)
parser.add_argument("--kill_at", type=int, default=None, help="Micro-batches of this start.")
parser.add_argument("--kill_while_saving", action="store_true")
parser.add_argument("--buckets", action="store_true", help="A sampler that shuffles its batches in place.")
parser.add_argument("--draw_after_saving", action="store_true")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--skipped_updates", action="store_true", help="Gradients overflow at first, as with fp16.")


class Images(torch.utils.data.Dataset):
    """Augmented at random, by each kind of generator."""

    def __init__(self, args):
        self.images = torch.randn(args.rows, 2, generator=torch.Generator().manual_seed(1))
        self.own = random.Random(7)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index] * random.random() + float(np.random.rand()) + torch.rand(2) * self.own.random()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(22, 2))


class Buckets(torch.utils.data.BatchSampler):
    def __init__(self, rows, batch_size):
        self.batch_size, self.drop_last = batch_size, False
        self.batches = [list(range(rows))[start : start + batch_size] for start in range(0, rows, batch_size)]

    def __iter__(self):
        random.shuffle(self.batches)
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def how_to_load(args):
    workers = args.dataloader_num_workers
    how = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    if args.buckets:
        return how | {"batch_sampler": Buckets(args.rows, args.train_batch_size)}
    return how | {"batch_size": args.train_batch_size, "shuffle": not args.stream}


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    if args.skipped_updates:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.3), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    rates = []  # of the steps, read while they end
    optimizer.register_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    train_dataloader = torch.utils.data.DataLoader(Stream() if args.stream else Images(args), **how_to_load(args))
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    prepared = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
    model, optimizer, train_dataloader, lr_scheduler = prepared
    generator = torch.Generator().manual_seed(args.seed)  # as instruct_pix2pix has
    per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps) if not args.stream else 6
    log = os.path.join(args.output_dir, f"losses-{accelerator.process_index}.jsonl")
    global_step, first_epoch, micro_batches = 0, 0, 0
    if args.resume_from_checkpoint:
        found = sorted(int(name.split("-")[1]) for name in os.listdir(args.output_dir) if name.startswith("checkpoint"))
        if found:
            torch.rand(5)  # as a script may draw before it resumes
            accelerator.load_state(os.path.join(args.output_dir, f"checkpoint-{found[-1]}"))
            global_step = found[-1]
            first_epoch = global_step // per_epoch
            # a test puts in: resume_step
    torch.rand(3 if args.resume_from_checkpoint else 0)
    for epoch in range(first_epoch, math.ceil(args.max_train_steps / per_epoch)):  # noqa: B007
        for step, images in enumerate(train_dataloader):  # noqa: B007
            # a test puts in: continue
            with accelerator.accumulate(model):
                noise = torch.randn_like(images) * torch.rand(1, generator=generator)
                bsz = images.shape[0]
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=images.device).long()
                noisy = noise_scheduler.add_noise(images, noise, timesteps)
                prediction = model(noisy)
                loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")
                accelerator.backward(loss)
                with open(log, "a") as file:
                    file.write(json.dumps([global_step, loss.item(), images.tolist()]) + "\n")
                if args.skipped_updates and global_step < 2:
                    model[0].weight.grad.fill_(math.inf)
                optimizer.step()
                if accelerator.sync_gradients and accelerator.is_main_process and rates:
                    with open(os.path.join(args.output_dir, "rates.jsonl"), "a") as file:
                        file.write(json.dumps([global_step, rates.pop()]) + "\n")
                lr_scheduler.step()
                optimizer.zero_grad()
            micro_batches += 1
            if accelerator.sync_gradients:
                global_step += 1
                if global_step % args.checkpointing_steps == 0 and accelerator.is_main_process:
                    if args.kill_while_saving and micro_batches == args.kill_at:
                        accelerator.register_save_state_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
                if args.draw_after_saving:
                    torch.rand(2)
            if micro_batches == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if global_step >= args.max_train_steps:
                break
    if accelerator.is_main_process:
        end = {"weights": [weight.tolist() for weight in accelerator.unwrap_model(model).parameters()]}
        end["optimizer"] = [{name: value.tolist() for name, value in part.items()} for part in optimizer.state.values()]
        with open(os.path.join(args.output_dir, "end.json"), "w") as file:
            json.dump(end, file)
    # With its last loss, which holds the graph: what is left of DDP when the processes part can wait for itself, in torch.
    loss = prediction = None
    del model, optimizer, lr_scheduler, prepared
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(parser.parse_args())
