"""Speed of this package on a GPU beside the GPU's limits: JSON rows while it runs, and a table at the end.

    python benchmarks/gpu.py | tee gpu.jsonl

Roofs (products, memory, copies, launches); updates of the 35.75 M UNet at 32 pixels in several precisions and layouts, with
their share of the roof and their memory; the costliest operators of an update, on host and device; stacks of small networks
beside the study's template, and a stack that a member leaves and that goes on from its state; decoding, and a slow source
beside updates; losses in bf16 beside float32. It stops after --minutes; what fails is a row with its error, and the rest
goes on.

Without a GPU it measures the CPU, which is of use with --tiny only. It needs torch, numpy and what benchmarks/gpu_wheels.sh
fetches: no datasets, pyarrow, scikit-learn, scipy and matplotlib.
"""

import dataclasses
import gc
import io
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

import torch
from common import UNET, make_parser, parse
from template import BATCH, plain_updates

from diffusers_lrlab.core import environment

TINY_UNET = {**UNET, "sample_size": 8, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
SEEDS = 4
POINTS = {"dimension": 2, "hidden_size": 256, "num_layers": 3, "embedding_size": 128}
# Precision, allowed TF32, compiled.
VARIANTS = {
    "fp32": ("no", False, False),
    "tf32": ("no", True, False),
    "bf16": ("bf16", True, False),
    "bf16 compile": ("bf16", True, True),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(work, repeats):
    """Median times of a call, and of its host part, until everything is launched."""
    work()
    whole, host = [], []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        work()
        host.append(time.perf_counter() - start)
        wait()
        whole.append(time.perf_counter() - start)
    return statistics.median(whole), statistics.median(host)


class OutOfTime(BaseException):
    """A measurement takes too long. Not an `Exception`, so that no library catches it."""


# A part is a function of the options, and of the roofs by precision, that yields names and functions; those yield rows. So
# what one of them fails at, or leaves in memory, is no matter of the next one.


def roofs(options, roof):
    """Products, memory, copies from pinned memory, launches."""
    size, repeats = (128, 2) if options.tiny else (8192, 10)
    products = {"fp32": (torch.float32, False), "tf32": (torch.float32, True), "bf16": (torch.bfloat16, True)}

    def product(name):
        dtype, torch.backends.cuda.matmul.allow_tf32 = products[name]
        one, other = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
        took, _ = seconds(lambda: one @ other, repeats)
        roof[name] = 2 * size**3 / took / 1e12
        yield {"what": f"product {name} {size}", "teraflops": roof[name]}

    def memory():
        source = torch.empty(2**20 if options.tiny else 2**30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        took, _ = seconds(lambda: target.copy_(source), repeats)
        yield {"what": "memory, read and written", "gigabytes_per_second": 2 * source.numel() / took / 1e9}
        pinned = torch.empty(source.numel() // 4, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
        took, _ = seconds(lambda: target[: len(pinned)].copy_(pinned, non_blocking=True), repeats)
        yield {"what": "copy from pinned memory", "gigabytes_per_second": len(pinned) / took / 1e9}

    def launch():
        number = torch.zeros(1, device=DEVICE)
        took, host = seconds(lambda: [number.add_(1) for _ in range(1000)], repeats)
        yield {"what": "launch", "microseconds": 1e3 * took, "host_microseconds": 1e3 * host}

    yield from ((f"product {name}", partial(product, name)) for name in products)
    yield "memory", memory
    yield "launch", launch


@contextmanager
def open_trainer(*how, **options):
    """[`make_trainer`] in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, *how, **options)
        try:
            yield trainer
        finally:
            trainer.release()


def make_trainer(folder, model, batch, precision="no", tf32=False, compiled=False):
    """A trainer on made-up images, with all logging on."""
    from accelerate.state import AcceleratorState

    from diffusers_lrlab import TrainingConfig
    from diffusers_lrlab.data.batch import Batch
    from diffusers_lrlab.data.images import ImageTransform
    from diffusers_lrlab.data.loading import TrainingData
    from diffusers_lrlab.training.plan import make_plan
    from diffusers_lrlab.training.prepare import make_accelerator
    from diffusers_lrlab.training.resolve import resolve_config
    from diffusers_lrlab.training.run_folder import RunFolder
    from diffusers_lrlab.training.trainer import Trainer

    size = model["sample_size"]
    options = {"resolution": size, "image_channels": 3, "train_batch_size": batch, "max_train_steps": 1000}
    options |= {"mixed_precision": precision, "output_dir": str(folder), "distance_samples": 0}
    options |= {"save_images_epochs": 10**6}
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if compiled else "no"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32  # torch allows the latter by itself
    # The name only says what kind of data these are.
    config = resolve_config(TrainingConfig(dataset_name="digits", num_validation_images=0, **options))
    images = torch.rand(max(64, batch), 3, size, size) * 2 - 1
    transform = ImageTransform(size, 3, center_crop=True, random_flip=False, eight_bit=True, seed=0)
    held_out = Batch(torch.empty(0, 3, size, size))
    data = TrainingData("random", None, held_out, "image", "random", transform, in_memory=Batch(images))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = make_accelerator(config)
    return Trainer(make_plan(config, data, dict(model)), data, accelerator, RunFolder(Path(folder)))


def updates_of(trainer):
    """A function that does one whole update, except for rows of the log."""
    batches = trainer.batches(0, range(trainer.run.update, trainer.run.plan.num_updates))
    trainer.set_training()

    def update():
        trainer.run.check_rates()
        trainer.do_update(next(batches))
        trainer.run.advance()

    return update


def flops_of(trainer, batch):
    """FLOP of a forward and a backward pass of a batch, counted by torch on the meta device for one image."""
    from torch.utils.flop_counter import FlopCounterMode

    from diffusers_lrlab.training.model import build_model

    plan = trainer.run.plan
    with torch.device("meta"):
        model, images = build_model(plan.config, plan.model_config), torch.empty(1, *plan.item_shape)
        with FlopCounterMode(display=False) as counter:
            model(images, torch.zeros(1, dtype=torch.long)).sample.sum().backward()
    return batch * counter.get_total_flops()


def unet(options, roof):
    """Milliseconds, images per second, share of the roof, memory, and seconds to compile."""
    model, batches = (TINY_UNET, (2,)) if options.tiny else (UNET, (512, 128, 64))  # the one that a goal is for comes first
    for (name, variant), batch in itertools.product(VARIANTS.items(), batches):
        if not (variant[-1] and options.tiny):
            yield f"UNet {name}, batch {batch}", partial(unet_rows, options, roof, name, model, batch)


def unet_rows(options, roof, name, model, batch):
    """The row of one variant and batch."""
    precision, tf32, compiled = VARIANTS[name]
    if compiled:
        torch.compiler.reset()  # or a second batch is compiled for any
    what = f"UNet {name}, batch {batch}"
    on_gpu = DEVICE.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with open_trainer(model, batch, *VARIANTS[name]) as trainer:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        update = updates_of(trainer)
        start = time.perf_counter()
        update()
        wait()
        first = time.perf_counter() - start
        took, host = seconds(update, 2 if options.tiny else 15)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
        per_second = flops_of(trainer, batch) / took / 1e12
        own_roof = roof.get("bf16" if precision == "bf16" else "tf32" if tf32 else "fp32", float("nan"))
        yield {
            "what": what,
            "ms": 1e3 * took,
            "host_ms": 1e3 * host,
            "images_per_second": batch / took,
            "teraflops": per_second,
            "share_of_roof": per_second / own_roof,
            "peak_mib": peak,
            "first_update_seconds": first,
        }


def split(options, _roof):
    """Host and device time of the costliest operators of an update, by torch's profiler."""
    for precision, name in (("no", "tf32"), ("bf16", "bf16")):
        yield f"profile {name}", partial(split_rows, options, precision, name)


def split_rows(options, precision, name):
    """The rows of one precision."""
    from torch.profiler import profile, schedule

    model, batch, count = (TINY_UNET, 2, 2) if options.tiny else (UNET, 128, 20)
    with open_trainer(model, batch, precision, tf32=True) as trainer:
        updates = trainer.updates(show_progress=False)
        for _ in range(5):
            next(updates)
        with profile(schedule=schedule(wait=0, warmup=2, active=count, repeat=1)) as profiler:
            for _ in range(2 + count):
                next(updates)
                profiler.step()
        updates.close()
    costliest = sorted(profiler.key_averages(), key=lambda part: -part.self_device_time_total - part.self_cpu_time_total)
    for part in costliest[:12]:
        host, device = (1e-3 * total / count for total in (part.self_cpu_time_total, part.self_device_time_total))
        yield {"what": f"{name}, batch {batch}, profiled: {part.key}", "host_ms": host, "device_ms": device}


def losses(options, _roof):
    """Difference of the losses of the same updates in bf16 and float32."""
    yield "losses in bf16 and float32", partial(loss_rows, options)


def loss_rows(options):
    """Both in one row."""
    model, batch, count = (TINY_UNET, 2, 2) if options.tiny else (UNET, 128, 100)
    found = {}
    for precision in ("no", "bf16"):
        with open_trainer(model, batch, precision) as trainer:
            update = updates_of(trainer)
            for _ in range(count):
                update()
            found[precision] = trainer.log.mean_losses()[0]
    yield {
        "what": f"mean loss of {count} updates",
        "loss": found["no"],
        "loss_bf16": found["bf16"],
        "relative": abs(found["bf16"] / found["no"] - 1),
    }


def make_points(tiny, number, updates=10_000, first_updates=None):
    """Members of a stack on made-up points, SEEDS for each learning rate, as in a study; the first may be shorter."""
    from diffusers_lrlab import TrainingConfig
    from diffusers_lrlab.data.batch import Batch
    from diffusers_lrlab.data.loading import TrainingData
    from diffusers_lrlab.data.points import PointTransform
    from diffusers_lrlab.study.stacked.member import Member
    from diffusers_lrlab.training.plan import make_plan
    from diffusers_lrlab.training.resolve import resolve_config

    model = {**POINTS, "hidden_size": 16, "embedding_size": 8} if tiny else POINTS
    small = {"dataset_name": "circle", "num_validation_images": 0, "log_timestep_bins": 0, "ddpm_num_steps": 100}
    config = resolve_config(TrainingConfig(output_dir="run", max_train_steps=updates, **small))
    points = Batch(torch.randn(10_000, 2, generator=torch.Generator().manual_seed(0)))
    data = TrainingData("random", None, points[:0], "x", "random", PointTransform(2, "x"), in_memory=points)
    members = []
    for place in range(number):
        arm, seed = divmod(place, SEEDS)
        length = first_updates if first_updates and not place else updates
        own = dataclasses.replace(
            config, seed=seed, learning_rate=(1 + arm / 10) * config.learning_rate, max_train_steps=length
        )
        members.append(Member(make_plan(own, data, dict(model)), data, DEVICE))
    return members


def make_stack(members):
    from diffusers_lrlab.study.stacked.stack import Stack

    torch.backends.cuda.matmul.allow_tf32 = False  # as studies compute if not asked otherwise
    return Stack(members, DEVICE, fuse=False)


def stacks(options, _roof):
    """Host and whole time of an update of R networks on points, and of the template's loop."""
    found = {}

    def template():
        loop = plain_updates(torch.randn(10_000, 2), 10_000, DEVICE)
        found["template"], host = seconds(lambda: next(loop), 2 if options.tiny else 200)
        yield {"what": "the template's loop", "ms": 1e3 * found["template"], "host_ms": 1e3 * host}

    def stacked(number):
        stack = make_stack(make_points(options.tiny, number))
        for _ in range(3):
            stack.do_update()
        took, host = seconds(stack.do_update, 2 if options.tiny else 50)
        yield {
            "what": f"stack of {number} on {min(number, SEEDS)} seeds, batch {BATCH}",
            "ms": 1e3 * took,
            "microseconds_per_member": 1e6 * took / number,
            "host_microseconds_per_member": 1e6 * host / number,
            "template_over_member": found.get("template", float("nan")) * number / took,
            "seconds_for_10000_updates": 1e4 * took,
        }

    yield "the template's loop", template
    for number in (1, 2) if options.tiny else (1, 4, 16, 64, 256):
        yield f"stack of {number}", partial(stacked, number)


def members(options, _roof):
    """A stack after a member leaves, and the same after it is resumed."""
    yield "members of a stack", partial(member_rows, options)


def member_rows(options):
    number, short, length = (3, 4, 8) if options.tiny else (16, 40, 80)
    ends = []
    for is_resumed in (False, True):
        runs = make_points(options.tiny, number, length, short)
        stack = make_stack(runs)
        while stack.members:
            stack.do_update()
            if stack.update in (short, length):
                stack._release_done()
            if is_resumed and stack.update == short + 2:
                states = [member.state_dict() for member in runs]
                runs = make_points(options.tiny, number, length, short)
                for member, state in zip(runs, states, strict=True):
                    member.run.update = state["update"]
                stack = make_stack(runs)
                stack.load(dict(zip(runs, states, strict=True)))
        ends.append(torch.stack([torch.nn.utils.parameters_to_vector(member.run.model.parameters()) for member in runs]))
    apart = (ends[0] - ends[1]).abs().max() / ends[0].abs().max()
    yield {"what": "weights of a stack that is resumed", "apart": apart.item()}


def data(options, _roof):
    """JPEGs of 500x375 decoded to 64 pixels by one thread; a source as slow as an update beside updates."""
    yield "decode", partial(decoding_rows, options)
    yield "updates beside a slow source", partial(overlap_rows, options)


def decoding_rows(options):
    """Images a second."""
    from PIL import Image

    from diffusers_lrlab.data.images import ImageTransform

    pixels = torch.nn.functional.interpolate(torch.rand(1, 3, 47, 63), (375, 500), mode="bicubic")[0].clamp(0, 1)
    Image.fromarray((255 * pixels).byte().permute(1, 2, 0).numpy()).save(file := io.BytesIO(), "jpeg", quality=90)
    cell, transform = {"bytes": file.getvalue(), "path": None}, ImageTransform(64, 3, True, False, True, 0)
    took, _ = seconds(lambda: transform.read(cell), 2 if options.tiny else 100)
    yield {"what": "decode 500x375 to 64", "images_per_second": 1 / took}


def overlap_rows(options):
    """An update with its data, read in turn and ahead."""
    from diffusers_lrlab.data.batches import prefetched

    model, batch, count = (TINY_UNET, 2, 2) if options.tiny else (UNET, 128, 30)
    with open_trainer(model, batch, "bf16" if DEVICE.type == "cuda" else "no") as trainer:
        alone, _ = seconds(updates_of(trainer), count)

        def slow():
            for images in trainer.batches(0, range(count + 2)):
                time.sleep(alone)
                yield images

        for how, batches in (("in turn", slow()), ("prefetched", prefetched(slow()))):
            trainer.do_update(next(batches))
            wait()
            start = time.perf_counter()
            for _ in range(count):
                trainer.do_update(next(batches))
            wait()
            each = (time.perf_counter() - start) / count
            batches.close()
            what = f"an update beside a source that takes as long, {how}"
            yield {"what": what, "ms": 1e3 * each, "ms_alone": 1e3 * alone}


PARTS = (roofs, split, stacks, members, data, losses, unet)  # compiling, at the end of the last, takes minutes


def measured(options):
    """All rows as they are measured; a failure is a row, too."""
    roof = {}
    for name, what, work in ((part.__name__, *pair) for part in PARTS for pair in part(options, roof)):
        try:
            yield from ({"part": name, **row} for row in work())
        except Exception as error:
            if options.tiny:
                raise
            yield {"part": name, "what": what, "error": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def stop(*_):
    raise OutOfTime


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=8, help="after which it stops")
    options, rows = parse(parser), []
    # Nothing here reads a data set or draws a picture, which is what training wants these packages for.
    environment.EXTRAS.update(plots={}, train={}, study={})
    about = {"what": "machine", "torch": torch.__version__, "python": platform.python_version(), "device": str(DEVICE)}
    if DEVICE.type == "cuda":
        about |= {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    print(json.dumps(about), flush=True)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    try:
        for row in measured(options):
            rows.append(row)
            print(json.dumps(row), flush=True)
    except OutOfTime:
        print(json.dumps({"what": "the rest", "error": f"stopped after {options.minutes:g} minutes"}), flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("| what | figures |\n|---|---|")
    for row in rows:
        figures = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
        print(f"| {row['what']} | {row.get('error') or figures} |")


if __name__ == "__main__":
    main()
