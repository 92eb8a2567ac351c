"""The cost of the launcher's hooks in a third-party script.

    python benchmarks/launcher_hooks.py

A script like diffusers' own, with a UNet of 0.9 M parameters for 8x8 images, is run bare, under the launcher, with each of
its options, and with all of them. All run side by side, each in a process of its own, and take turns update by update, so
that a machine whose speed changes is as fast for each. The CPU time of an update is measured: with one thread that is what
it takes where nothing else runs. The last column is the shortest update of which the overhead is 3 %.
"""

import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import machine, make_parser, parse
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler

from diffusers_lrlab import launch

SAMPLER, WEIGHTING = ["--timestep_sampler", "clts"], ["--loss_weighting", "min_snr"]
LOG, EMA, OPTIMIZER = ["--log_timesteps"], ["--ema", "warmup_power"], ["--optimizer", "adamw"]
SEEN = [*SAMPLER, *WEIGHTING, *LOG]
HOOKS = {
    "bare": None,
    "launcher alone: audit, log of gradient norms": [],
    "`--timestep_sampler`": SAMPLER,
    "`--loss_weighting`": WEIGHTING,
    "`--log_timesteps`": LOG,
    "`--optimizer`": OPTIMIZER,
    "`--ema`": EMA,
    "all but `--optimizer` and `--ema`": SEEN,
    "all but `--optimizer`": [*SEEN, *EMA],
    "all": [*SEEN, *EMA, *OPTIMIZER],
}
GOAL = 0.03


def train(output_dir, max_train_steps, place):
    """The hooked script, which writes the seconds of its updates to `output_dir`."""
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
    turns, seconds = multiprocessing.current_process().turns, []
    turns[place].acquire()
    begun = time.process_time()
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
            turns[(place + 1) % len(turns)].release()
            if len(seconds) == max_train_steps:
                break
            turns[place].acquire()
            begun = time.process_time()
    accelerator.save_state(os.path.join(output_dir, "checkpoint"))
    accelerator.unwrap_model(model).save_pretrained(os.path.join(output_dir, "unet"))
    Path(output_dir, "seconds.json").write_text(json.dumps(seconds))
    accelerator.end_training()


def run(options, script, turns):
    """The script under the launcher, or alone, with its output in a file."""
    multiprocessing.current_process().turns = turns  # this file is run once more, as the script
    sys.stdout = sys.stderr = open(Path(script[1].partition("=")[2], "said"), "w")
    torch.set_num_threads(1)
    if options is None:
        launch.run_script(script[0], script[1:])
    else:
        sys.argv = ["launch", *["--strict"] * bool(options), *options, *script]
        launch.main()


def measure(updates):
    """Seconds of each update after the first tenth, by name, in forks that have all imports."""
    context = multiprocessing.get_context("fork")
    turns = [context.Semaphore(place == 0) for place in range(len(HOOKS))]
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for place, (name, options) in enumerate(HOOKS.items()):
            Path(folder, str(place)).mkdir()
            own = [f"--output_dir={folder}/{place}", f"--max_train_steps={updates}", f"--place={place}"]
            running[name] = context.Process(target=run, args=(options, [__file__, *own], turns))
            running[name].start()
        _wait(running, Path(folder))
        measured = [json.loads(Path(folder, str(place), "seconds.json").read_text()) for place in range(len(running))]
    return {name: np.array(seconds[updates // 10 :]) for name, seconds in zip(HOOKS, measured, strict=True)}


def _wait(running, folder):
    """Waits until all have ended, and stops the others if one fails."""
    left = {each.sentinel: each for each in running.values()}
    while left:
        for sentinel in multiprocessing.connection.wait([*left]):
            process = left.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in left.values():
                    other.kill()
                place = [*running.values()].index(process)
                sys.exit((folder / str(place) / "said").read_text())


def compare(updates):
    """Prints the extra time of an update over the bare one of the same turn: mean and standard error."""
    measured = measure(updates)
    bare = measured["bare"]
    print(f"{machine()}; {updates} updates\n")
    print("| what | ms an update | over bare | microseconds | 3 % of an update of |\n|---|---|---|---|---|")
    for name, seconds in measured.items():
        # The mean: some hooks have more to do at some of the updates.
        extra = seconds - bare
        added, error = extra.mean(), extra.std(ddof=1) / math.sqrt(len(extra))
        row = [f"{1e3 * seconds.mean():.2f}", f"{100 * added / bare.mean():+.1f} ± {100 * error / bare.mean():.1f} %"]
        row += [f"{1e6 * added:.0f} ± {1e6 * error:.0f}", f"{1e3 * max(0.0, added) / GOAL:.1f} ms"]
        print(f"| {' | '.join([name, *row])} |")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--output_dir", help="run the script that is hooked, and write its times there")
    parser.add_argument("--max_train_steps", type=int)
    parser.add_argument("--place", type=int, help="of the script in a turn")
    options = parse(parser, updates=5)
    if options.output_dir:
        train(options.output_dir, options.max_train_steps, options.place)
    else:
        compare(options.updates)


if __name__ == "__main__":
    main()
