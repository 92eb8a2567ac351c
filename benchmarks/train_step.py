"""The cost of the training loop, alone and beside diffusers' own script; prints the tables of docs/benchmarks.md.

    python benchmarks/train_step.py                                       # (a) our loop over a bare one
    python benchmarks/train_step.py --upstream PATH/train_unconditional.py    # (b) and the whole scripts side by side

(a) times an update of `Trainer` with all logging on against a bare loop: the same model, data, optimizer, clipping and
EMA, nothing else. Both run in this process, taking turns update by update, so that a busy machine hits both alike.
(b) runs both scripts as commands on the same folder of images, model, batch and number of updates, taking turns.
Upstream's script needs torchvision and tensorboard. If torchvision lies in a folder of its own (`pip install --no-deps
--target DIR torchvision`), name it by --torchvision DIR; one that cannot load its compiled operators beside a CPU torch
still does, as only its Python transforms are used.
(c) with --precisions: an update in float32 and under autocast to bfloat16, taking turns, for the UNet of digits on a CPU.
`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before the command makes a CPU do without its instructions for bfloat16.
(d) with --objectives: an update of `Trainer` with flow matching and one with labels, over one with ddpm, taking turns.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import SCRIPT, in_turns, machine, make_parser, make_trainer, parse, updates_in_turns

UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": [32, 64, 64],
    "norm_num_groups": 8,
    "down_block_types": ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
}

# Says when each update ends, from inside whatever script runs: every optimizer step of the process passes here.
STAMPER = """
import atexit, json, os, sys, time
_started, _stamps = time.perf_counter(), []
def _stamp(*_):
    _stamps.append(time.perf_counter() - _started)
def _hook():
    import torch
    if not hasattr(torch, "library"):
        return
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):
        try:
            torch.library.define("torchvision::" + schema.split("(")[0], "(" + schema.split("(", 1)[1])
        except RuntimeError:
            pass  # a torchvision with compiled operators defines them itself
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(_stamp)
_hook()
atexit.register(lambda: open(os.environ["STAMPS"], "w").write(json.dumps(_stamps)))
import runpy
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# --- (a) our loop over a bare one ------------------------------------------------------------------------------------


def bare_updates(trainer):
    """A plain loop over the same data: one update for each `next()`."""
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    config, scheduler = trainer.run.config, trainer.run.process.scheduler
    torch.manual_seed(0)
    model = UNet2DModel(**trainer.run.plan.model_config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.95, 0.999), fused=True)
    ema = EMAModel(model.parameters(), use_ema_warmup=True, power=0.75, foreach=True)
    pixels, batch = trainer.run.data.in_memory.data, config.train_batch_size
    while True:
        for rows in torch.randperm(len(pixels)).split(batch):
            images = pixels[rows]
            if len(images) < batch:
                continue
            noise = torch.randn_like(images)
            timesteps = torch.randint(0, config.num_train_timesteps, (batch,))
            prediction = model(scheduler.add_noise(images, noise, timesteps), timesteps).sample
            torch.nn.functional.mse_loss(prediction, noise).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
            yield


def compare_loops(rounds, arguments, warm_up=10):
    """Median milliseconds of an update, ours and bare, taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, [*arguments, f"--max_train_steps={rounds + 30}", "--num_validation_images=0"])
        loops = {"bare": bare_updates(trainer), "ours": trainer.updates()}
        times = updates_in_turns(loops, rounds, warm_up)
    return {name: statistics.median(values) for name, values in times.items()}


# --- (c) precisions --------------------------------------------------------------------------------------------------


def compare_precisions(rounds, batch):
    """Milliseconds of forward and backward in each round, by precision."""
    from diffusers import UNet2DModel

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, [f"--train_batch_size={batch}", "--max_train_steps=1", "--num_validation_images=0"])
        model = UNet2DModel(**trainer.run.plan.model_config).train()
        images = trainer.run.data.in_memory.data[:batch]
    timesteps = torch.randint(0, 1000, (batch,))

    def passes(enabled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            prediction = model(images, timesteps).sample
        torch.nn.functional.mse_loss(prediction.float(), images).backward()

    return in_turns({"float32": partial(passes, False), "bf16": partial(passes, True)}, rounds, 2)


def cpu_computes_in_bf16():
    """
    Whether this processor has bfloat16 instructions that torch uses (AVX512_BF16 or AMX; BF16 on ARM). Without them torch
    converts, which takes many times as long. Respects `ONEDNN_MAX_CPU_ISA`.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # true of any AVX-512: oneDNN has kernels for it, but slow ones
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def print_precisions(rounds):
    print(f"\n(c) forward and backward, median ms; this CPU computes in bf16: {cpu_computes_in_bf16()}\n")
    print("| batch | float32 | bf16 | bf16 over float32: median (lowest to highest) |\n|---|---|---|---|")
    for batch in (64, 16):
        times = compare_precisions(rounds, batch)
        ratios = [low / full for low, full in zip(times["bf16"], times["float32"], strict=True)]
        medians = " | ".join(f"{statistics.median(each):.1f}" for each in times.values())
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {batch} | {medians} | {spread} |", flush=True)


# --- (d) objectives --------------------------------------------------------------------------------------------------


VARIANTS = {
    "ddpm": [],
    "flow_matching": ["--objective=flow_matching"],
    "ddpm with labels": ["--label_column=label", "--label_dropout=0.1"],
}


def compare_objectives(rounds, names, arguments, warm_up=10):
    """Milliseconds of an update in each round, by the name of a variant."""
    common = [f"--max_train_steps={rounds + 30}", "--num_validation_images=0", "--distance_samples=0", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        loops = {name: make_trainer(Path(folder) / name, [*common, *VARIANTS[name]]).updates() for name in names}
        return updates_in_turns(loops, rounds, warm_up)


def print_objectives(rounds, warm_up):
    print("\n(d) an update, median ms, and the median of ratios to ddpm (quartiles)\n")
    print(f"| data, batch | {' | '.join(VARIANTS)} |\n|---{'|---' * len(VARIANTS)}|")
    for data, batch in (("digits", 64), ("digits", 16), ("moons", 256)):
        names = list(VARIANTS) if data == "digits" else ["ddpm", "flow_matching"]  # points have no labels
        times = compare_objectives(rounds, names, [f"--dataset_name={data}", f"--train_batch_size={batch}"], warm_up)
        cells = [f"{statistics.median(times['ddpm']):.2f}"]
        for name in names[1:]:
            ratios = [other / ddpm for other, ddpm in zip(times[name], times["ddpm"], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            median = statistics.median(times[name])
            cells.append(f"{median:.2f}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
        cells += ["–"] * (len(VARIANTS) - len(names))
        print(f"| {data}, {batch} | {' | '.join(cells)} |", flush=True)


# --- (b) the two scripts ---------------------------------------------------------------------------------------------


def write_images(folder, count=512):
    """The first digits as 32x32 RGB files; whole batches, since upstream's last one would be smaller."""
    from diffusers_lrlab.data.image_sets import load_image_dataset

    folder.mkdir()
    for index, image in enumerate(load_image_dataset("digits")["image"][:count]):
        image.convert("RGB").resize((32, 32)).save(folder / f"{index:04d}.png")


def run_script(script, arguments, folder, path=None):
    """Seconds of the whole command, and the time of each update in it."""
    stamps = Path(folder) / "stamps.json"
    stamper = Path(folder) / "stamper.py"
    stamper.write_text(STAMPER)
    environment = {**os.environ, "STAMPS": str(stamps), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    if path:
        environment["PYTHONPATH"] = str(path)
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, str(stamper), str(script), *arguments], check=True, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    times = json.loads(stamps.read_text())
    return seconds, [1e3 * (after - before) for before, after in zip(times[4:], times[5:], strict=False)]


def compare_scripts(upstream, rounds, torchvision, num_epochs, inference_steps):
    """Median step and whole command of both scripts, alternating."""
    with tempfile.TemporaryDirectory() as base:
        base = Path(base)
        write_images(base / "images")
        (base / "unet.json").write_text(json.dumps(UNET))
        (base / "unet").mkdir()
        (base / "unet" / "config.json").write_text(json.dumps(UNET))
        common = [
            f"--train_data_dir={base / 'images'}", f"--model_config_name_or_path={base / 'unet'}", "--resolution=32",
            "--train_batch_size=16", f"--num_epochs={num_epochs}", "--learning_rate=1e-3", "--lr_warmup_steps=10",
            "--use_ema",
            f"--num_inference_steps={inference_steps}", "--eval_batch_size=16", "--checkpointing_steps=500",
            f"--cache_dir={base / 'cache'}", "--save_model_epochs=10",
        ]  # fmt: skip
        # Upstream samples after its first and last epoch, so twice; ours is made to do as much. It holds nothing out.
        ours = ["--num_validation_images=0", f"--save_images_epochs={num_epochs - 1}"]
        scripts = {"diffusers' script": (upstream, [], torchvision), "ours": (SCRIPT, ours, None)}
        whole, steps = {name: [] for name in scripts}, {name: [] for name in scripts}
        for turn in range(rounds + 1):
            for name in scripts if turn % 2 else reversed(scripts):
                script, more, path = scripts[name]
                output = base / f"out-{turn}-{script.stem}"
                seconds, times = run_script(script, [*common, *more, f"--output_dir={output}"], base, path)
                if turn:  # the first turn fills the caches
                    whole[name].append(seconds)
                    steps[name].append(statistics.median(times))
                print(f"  turn {turn}, {name}: {seconds:.1f} s, median step {statistics.median(times):.1f} ms")
    # A busy machine is slower for minutes on end, so it is the turns that are compared, each with itself.
    first, second = scripts
    for what, values in (("median step", steps), ("whole command", whole)):
        ratios = [ours / theirs for theirs, ours in zip(values[first], values[second], strict=True)]
        print(
            f"  {what}, ours over theirs: median {statistics.median(ratios):.3f} of {[round(ratio, 3) for ratio in ratios]}"
        )
    return {name: (statistics.median(steps[name]), statistics.median(whole[name]), whole[name]) for name in scripts}


def main():
    from diffusers_lrlab.training.prepare import keep_freed_memory

    parser = make_parser(__doc__)
    parser.add_argument("--upstream", type=Path, help="diffusers' train_unconditional.py; without it only (a) is run")
    parser.add_argument("--torchvision", type=Path, help="folder that holds torchvision, if it is not installed")
    parser.add_argument(
        "--rounds", type=int, default=200, help="updates of each loop that are timed in (a); 0 leaves it out"
    )
    parser.add_argument("--precisions", type=int, default=0, help="rounds of (c); 0 leaves it out")
    parser.add_argument("--objectives", type=int, default=0, help="rounds of (d); 0 leaves it out")
    parser.add_argument("--turns", type=int, default=4, help="times each script is run in (b)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of 32 updates in (b), 2 at least")
    parser.add_argument("--inference_steps", type=int, default=10, help="denoising steps of the samples in (b)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parse(parser, rounds=1, threads=1, precisions=1, objectives=2)
    torch.set_num_threads(options.threads)
    print(machine())
    # First as glibc does it, then as `train` does it on a CPU: what is measured last may change the process for good.
    print("\n(a) an update, median ms\n\n| model, batch, freed memory | bare loop | ours, all logging on | ratio |")
    print("|---|---|---|---|")
    for memory in ("given back", "kept") if options.rounds else ():
        if memory == "kept":
            keep_freed_memory()
        for batch in (64, 16):
            times = compare_loops(options.rounds, [f"--train_batch_size={batch}"], warm_up=1 if options.tiny else 10)
            ratio = times["ours"] / times["bare"]
            print(f"| digits, {batch}, {memory} | {times['bare']:.2f} | {times['ours']:.2f} | {ratio:.3f} |", flush=True)
    if options.precisions:
        print_precisions(options.precisions)
    if options.objectives:
        print_objectives(options.objectives, warm_up=1 if options.tiny else 10)
    if options.upstream:
        print("\n(b) the same images, model, batch and updates")
        results = compare_scripts(
            options.upstream.resolve(), options.turns, options.torchvision, options.epochs, options.inference_steps
        )
        print("\n| script | median step, ms | whole command, s (each run) |\n|---|---|---|")
        for name, (step, whole, each) in results.items():
            print(f"| {name} | {step:.1f} | {whole:.1f} ({', '.join(f'{seconds:.1f}' for seconds in each)}) |")


if __name__ == "__main__":
    main()
