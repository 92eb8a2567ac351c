"""The cost of an update on points: the training script beside a plain loop in the shape of the study's template.

    python benchmarks/toy2d.py
    python benchmarks/toy2d.py --rounds 10 --threads 1

The plain loop is what one writes first: a DataLoader, one operation after the other, a loss that is read at every update.
Both train the same network (296,450 parameters) on the same points with the same optimizer, clipping and schedule, and take
turns. Where the time of ours goes, and what the matrix multiplications alone would take, is printed beside.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from common import in_turns, make_parser, make_trainer, milliseconds, parse
from template import BATCH, plain_updates

from diffusers_lrlab.core.environment import describe_environment
from diffusers_lrlab.data.toy2d import toy_points
from diffusers_lrlab.evaluation.distances import knn_kl
from diffusers_lrlab.evaluation.metrics import compare_samples
from diffusers_lrlab.training.pipeline import make_pipeline
from diffusers_lrlab.training.prepare import keep_freed_memory

RECIPE = Path(__file__).parents[1] / "training_scripts" / "recipes" / "lr_study_2d.yaml"


def make_point_trainer(folder, num_updates):
    """A trainer with the study's settings and all logging, without validation and samples, like the plain loop."""
    arguments = ["--dataset_name=dino", f"--config={RECIPE}", "--num_validation_images=0", "--save_images_epochs=1000"]
    return make_trainer(folder, [*arguments, f"--max_train_steps={num_updates}", f"--checkpointing_steps={num_updates}"])


def median_ms(function, repeats):
    """Median milliseconds of a call."""
    return statistics.median([milliseconds(function) for _ in range(repeats)][repeats // 10 :])


def do_updates(loop, num_updates):
    """Some updates of a training loop."""
    for _ in range(num_updates):
        next(loop)


def matmul_limit(repeats):
    """Milliseconds of the matrix multiplications of an update alone, and their GFLOP/s."""
    shapes = [(384, 256), *[(256, 256)] * 3, (256, 2)]
    total, flop = 0.0, 0
    for index, (inputs, outputs) in enumerate(shapes):
        x, w, g = torch.randn(BATCH, inputs), torch.randn(outputs, inputs), torch.randn(BATCH, outputs)
        bias = torch.randn(outputs)
        # Forward, gradient of the weights, gradient of the input; the first layer's input needs none.
        calls = [lambda x=x, w=w, b=bias: torch.addmm(b, x, w.T), lambda x=x, g=g: g.T @ x]
        calls += [lambda g=g, w=w: g @ w] * (index > 0)
        total += sum(median_ms(call, repeats) for call in calls)
        flop += len(calls) * 2 * BATCH * inputs * outputs
    return total, flop / total / 1e6


def breakdown(trainer, repeats):
    """Milliseconds of the parts of an update of ours, each alone."""
    model, objective = trainer.run.model, trainer.run.objective
    batch = trainer.run.data.in_memory[:BATCH].map(torch.clone)
    points = batch.data
    timesteps = objective.draw(0)
    (noise,) = objective.noise(0, points)

    def forward():
        return trainer.run.process.losses(model, batch, noise, timesteps).mean()

    def forward_backward():
        forward().backward()

    both, alone = median_ms(forward_backward, repeats), median_ms(forward, repeats)
    embedding = median_ms(lambda: model.embed(points, timesteps), repeats)
    clip = median_ms(lambda: trainer.accelerator.clip_grad_norm_(trainer.stepper.model.parameters(), 0.5), repeats)
    step = median_ms(trainer.run.optimizer.step, repeats)
    drawing = median_ms(lambda: (objective.draw(0), list(objective.noise(0, points))), repeats)
    return {
        "forward and loss": alone,
        "of that, embeddings": embedding,
        "backward": both - alone,
        "clipping": clip,
        "AdamW": step,
        "timesteps and noise": drawing,
    }


def evaluation_seconds(trainer, num_points, repeats):
    """Seconds of the evaluation of a trained model."""
    real, other = toy_points("dino", 10 * num_points), toy_points("dino", num_points, split="test")
    trainer.run.model.eval()
    pipeline = make_pipeline(trainer.run, trainer.run.process.scheduler)
    pipeline.set_progress_bar_config(disable=True)
    calls = {
        f"KL by nearest neighbours, {len(real):,} against {num_points:,} points": lambda: knn_kl(real, other),
        "all distances of the card": lambda: compare_samples(real, other),
        f"{num_points:,} samples in 100 steps": lambda: pipeline(num_points=num_points, num_inference_steps=100),
    }
    return {name: median_ms(call, repeats) / 1e3 for name, call in calls.items()}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each loop")
    parser.add_argument("--updates", type=int, default=200, help="updates in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.set_defaults(points=10_000, repeats=200, evaluations=3)
    options = parse(parser, rounds=2, updates=2, threads=1, points=100, repeats=2, evaluations=1)
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: turns are compared with each other")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    meta = describe_environment()
    print(f"{meta['processor']}, {options.threads} threads, torch {meta['versions']['torch']}\n")

    num_updates = (options.rounds + 1) * options.updates
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_point_trainer(folder, num_updates + 1)
        loops = {"plain": plain_updates(trainer.run.data.in_memory.data, num_updates), "ours": trainer.updates()}
        turns = {name: partial(do_updates, loop, options.updates) for name, loop in loops.items()}
        times = {name: [ms / options.updates for ms in each] for name, each in in_turns(turns, options.rounds).items()}
        ratios = [plain / ours for plain, ours in zip(times["plain"], times["ours"], strict=True)]
        parts = breakdown(trainer, options.repeats)
        seconds = evaluation_seconds(trainer, options.points, options.evaluations)
    limit, speed = matmul_limit(options.repeats)
    quartiles = statistics.quantiles(ratios, n=4)
    print("\n| | ms per update, median of turns |\n|---|---|")
    print(f"| plain loop | {statistics.median(times['plain']):.2f} |")
    print(f"| training script | {statistics.median(times['ours']):.2f} |")
    print(f"| matrix multiplications alone, {speed:.0f} GFLOP/s | {limit:.2f} |")
    print(f"\nPlain over ours, turn by turn: {statistics.median(ratios):.2f} ({quartiles[0]:.2f} to {quartiles[2]:.2f})\n")
    print("| part of an update of ours, alone | ms |\n|---|---|")
    for name, value in parts.items():
        print(f"| {name} | {value:.3f} |")
    print("\n| evaluation | s |\n|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {value:.2f} |")


if __name__ == "__main__":
    main()
