"""What the launcher's hooks cost a script that is not ours.

    python benchmarks/launcher_hooks.py

A script like diffusers' own, with a UNet of 0.7 M parameters for 8x8 images, is run bare, under the launcher, with each of
its options, and with all of them. They take turns, each in a process of its own, and the CPU time of their updates is
measured: with one thread that is what an update takes on a machine that does nothing else. The last column is the shortest
update of which the overhead is 3 %.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import machine, make_parser, parse
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from tqdm.auto import tqdm

from diffusers_lrlab import launch

SAMPLER, WEIGHTING = ["--timestep_sampler", "clts"], ["--loss_weighting", "min_snr"]
LOG, EMA, RESUME = ["--log_timesteps"], ["--ema", "warmup_power"], ["--exact_resume"]
GROUPS = ["--optimizer", "adamw", "--lr_groups", "*.bias=2"]
WITHOUT_EMA = [*SAMPLER, *WEIGHTING, *LOG, *RESUME, *GROUPS]
HOOKS = {
    "bare": None,
    "launcher alone: audit, log of gradient norms": [],
    "`--timestep_sampler`": SAMPLER,
    "`--loss_weighting`": WEIGHTING,
    "`--log_timesteps`": LOG,
    "`--exact_resume`": RESUME,
    "`--optimizer`, `--lr_groups`": GROUPS,
    "`--ema`": EMA,
    "all of these but `--ema`": WITHOUT_EMA,
    "all of these": [*WITHOUT_EMA, *EMA],
    "all, and `--timestep_grad_every 100`": [*WITHOUT_EMA, *EMA, "--timestep_grad_every", "100"],
}
GOAL = 0.03


def train(output_dir, max_train_steps):
    """The script that is hooked; its updates' seconds go to `output_dir`."""
    accelerator = Accelerator(gradient_accumulation_steps=1)
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 64), **blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(torch.randn(512, 1, 8, 8), batch_size=16, shuffle=True)
    noise_scheduler = DDPMScheduler()
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=max_train_steps)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    if os.path.exists(os.path.join(output_dir, "checkpoint")):
        accelerator.load_state(os.path.join(output_dir, "checkpoint"))
    seconds, begun = [], time.process_time()
    while len(seconds) < max_train_steps:
        for images in loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(images)
                timesteps = torch.randint(
                    0, noise_scheduler.config.num_train_timesteps, (len(images),), device=images.device
                )
                noisy = noise_scheduler.add_noise(images, noise, timesteps)
                loss = F.mse_loss(model(noisy, timesteps).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            seconds.append(time.process_time() - begun)
            begun = time.process_time()
            if len(seconds) == max_train_steps:
                break
    accelerator.save_state(os.path.join(output_dir, "checkpoint"))
    accelerator.unwrap_model(model).save_pretrained(os.path.join(output_dir, "unet"))
    Path(output_dir, "seconds.json").write_text(json.dumps(seconds))
    accelerator.end_training()


def run(options, script):
    """The script as the launcher runs it, or bare; what it says goes to a file."""
    sys.stdout = sys.stderr = open(Path(script[1].partition("=")[2], "said"), "w")
    torch.set_num_threads(1)
    if options is None:
        launch.run_script(script[0], script[1:])
    else:
        sys.argv = ["launch", *["--strict"] * bool(options), *options, *script]
        launch.main()


def measure(options, updates):
    """The seconds of an update after the first tenth of them, in a process of its own: a fork, which has all imports."""
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, f"--output_dir={folder}", f"--max_train_steps={updates}"]
        process = multiprocessing.get_context("fork").Process(target=run, args=(options, script))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(Path(folder, "said").read_text())
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    # The mean: some hooks have more to do at some of the updates.
    return statistics.mean(seconds[len(seconds) // 10 :])


def compare(rounds, updates):
    """Prints medians of the turns, and what is above the bare script in the same turn; every second turn goes backwards."""
    measured = {name: [] for name in HOOKS}
    for turn in tqdm(range(rounds), desc="turns", disable=None):
        for name in [*HOOKS][:: 1 if turn % 2 == 0 else -1]:
            measured[name].append(measure(HOOKS[name], updates))
    print(f"{machine()}; {rounds} turns of {updates} updates\n")
    print("| what | ms an update | over bare | microseconds | 3 % of an update of |\n|---|---|---|---|---|")
    for name, values in measured.items():
        extra = [1e6 * (value - bare) for value, bare in zip(values, measured["bare"], strict=True)]
        ratio = statistics.median(value / bare for value, bare in zip(values, measured["bare"], strict=True))
        added = max(0.0, statistics.median(extra))
        row = [f"{1e3 * statistics.median(values):.2f}", f"{100 * (ratio - 1):+.1f} %", f"{added:.0f}"]
        print(f"| {' | '.join([name, *row, f'{added / GOAL / 1e3:.1f} ms'])} |")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--output_dir", help="run the script that is hooked, and write its times there")
    parser.add_argument("--max_train_steps", type=int)
    options = parse(parser, rounds=1, updates=5)
    if options.output_dir:
        train(options.output_dir, options.max_train_steps)
    else:
        compare(options.rounds, options.updates)


if __name__ == "__main__":
    main()
