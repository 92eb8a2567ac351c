"""A script of the shape of diffusers' own that saves a model and resumes; beside it, it averages by EMAModel."""

import argparse
import os

import torch
from accelerate import Accelerator
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from safetensors.torch import save_file

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--max_train_steps", type=int, default=8)
parser.add_argument("--checkpointing_steps", type=int, default=5)
parser.add_argument("--resume_from_checkpoint", default=None)
parser.add_argument("--decay", type=float, default=None)
parser.add_argument("--without_hook", action="store_true")
parser.add_argument("--leave_weights", action="store_true", help="Its hook leaves the weights to accelerate.")
parser.add_argument("--fail_at_end", action="store_true", help="After the last update, before it saves.")


class Tiny(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, width=3):
        super().__init__()
        self.frozen = torch.nn.Linear(2, width).requires_grad_(False)
        self.trained = torch.nn.Linear(width, 2)

    def forward(self, images):
        return self.trained(self.frozen(images))


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(0)
    model = Tiny()

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process and not args.leave_weights:
            for each in models:
                each.save_pretrained(os.path.join(output_dir, "model"))
                weights.pop()

    def load_model_hook(models, input_dir):
        while models and not args.leave_weights:
            models.pop().load_state_dict(Tiny.from_pretrained(input_dir, subfolder="model").state_dict())

    if not args.without_hook:
        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=args.train_batch_size)
    lr_scheduler = get_scheduler("constant", optimizer)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    trained = [each for each in model.parameters() if each.requires_grad]
    options = {"use_ema_warmup": True, "power": 3 / 4} if args.decay is None else {"min_decay": args.decay}
    ema = EMAModel(trained, decay=args.decay or 0.9999, foreach=True, **options)
    global_step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        global_step = int(args.resume_from_checkpoint.rpartition("-")[2])
    while global_step < args.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(batch) - batch).square().mean())
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                ema.step(trained)
                if global_step % args.checkpointing_steps == 0 and accelerator.is_main_process:
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            if global_step == args.max_train_steps:
                break
    with torch.no_grad():
        raw = {f"raw.{place}": each.clone() for place, each in enumerate(trained)}
    if args.fail_at_end:
        raise RuntimeError("failed after the last update")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(os.path.join(args.output_dir, "saved"))
        shadows = {f"ema.{place}": value for place, value in enumerate(ema.shadow_params)}
        save_file({**raw, **shadows, "after": torch.rand(1)}, os.path.join(args.output_dir, "beside.safetensors"))
    del model, optimizer, lr_scheduler
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(parser.parse_args())
