"""The cost of a sampling step over that of training an item: `sampling_cost` of the kinds of data.

    python benchmarks/sampling_cost.py

Previews of a run may take a twentieth of it, by this figure. Seconds of the processor, on one thread.
"""

import statistics
import tempfile
import time
from pathlib import Path

from common import machine, make_parser, make_trainer, parse


def seconds(call):
    started = time.process_time()
    call()
    return time.process_time() - started


def main():
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=100, help="that are timed, after ten others")
    parser.add_argument("--steps", type=int, default=100, help="of sampling")
    options = parse(parser, updates=3, steps=2)
    from diffusers_lrlab.training.samples import draw_samples

    print(machine())
    print("| data | training, us an item | a step of sampling, us an item | ratio | taken as |\n|---|---|---|---|---|")
    for name in ("digits", "dino"):
        length = f"--max_train_steps={options.updates + 11}"
        arguments = [f"--dataset_name={name}", length, "--num_validation_images=0", "--distance_samples=0"]
        arguments += ["--save_images_epochs=1000000", f"--num_inference_steps={options.steps}"]
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(Path(folder) / "run", arguments)
            updates = trainer.updates(show_progress=False)
            times = [seconds(lambda updates=updates: next(updates)) for _ in range(10 + options.updates)][10:]
            num = trainer.run.config.eval_batch_size
            step = seconds(lambda trainer=trainer, num=num: draw_samples(trainer.run, num)) / num / options.steps
            item = statistics.median(times) / trainer.run.plan.layout.global_batch
            updates.close()
        print(f"| {name} | {1e6 * item:.1f} | {1e6 * step:.1f} | {step / item:.2f} | {trainer.run.kind.sampling_cost} |")


if __name__ == "__main__":
    main()
