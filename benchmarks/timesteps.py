"""The cost of diagnostics by noise level, and the variance that stratified timesteps save.

    python benchmarks/timesteps.py        four minutes on 2 cores, which should have nothing else to do

(a) An update with and without the diagnostics, two trainers taking turns in one process, and the diagnostics alone.
(b) The variance over batches of the loss and of the gradient, at a model trained for a while, when timesteps are drawn in
    different ways; images and noise are random too, and are all of what is left when timesteps are no longer.
"""

import statistics
import tempfile

import torch
from common import machine, make_parser, make_trainer, milliseconds, parse, updates_in_turns

from diffusers_lrlab import get_timestep_sampler
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.batches import RowOrder

DRAWS = ("uniform", "stratified", "antithetic", "loss_second_moment", "clts_static:unbiased=true")


def compare_updates(rounds, batch):
    """Milliseconds of an update, means over rounds, without diagnostics and with them."""
    with tempfile.TemporaryDirectory() as base:
        common = [f"--train_batch_size={batch}", f"--max_train_steps={rounds + 20}", "--num_validation_images=0"]
        loops = {
            bins: make_trainer(f"{base}/{bins}", [*common, f"--log_timestep_bins={bins}"]).updates() for bins in (0, 10)
        }
        times = updates_in_turns(loops, rounds)
    ratio = statistics.median(on / off for off, on in zip(times[0], times[10], strict=True))
    return statistics.median(times[0]), ratio


def cost_alone(trainer, batch, repeats=300):
    """Median milliseconds of the diagnostics in an update and at a logging point."""
    observer, losses = trainer.log.observer, torch.rand(batch)
    timesteps = [trainer.run.objective.draw(update)[:batch] for update in range(repeats)]
    adding = statistics.median(milliseconds(observer.add, part, losses) for part in timesteps)
    expected = trainer.run.objective.sampler.probabilities(0).numpy()
    reading = statistics.median(milliseconds(observer.add_row, update, expected) for update in range(repeats))
    return adding, reading


def variances(trainer, num_losses, num_gradients):
    """The variance of the batch's loss and the trace of its gradient's covariance, by sampling scheme."""
    pixels, batch = trainer.run.data.in_memory.data, trainer.run.config.train_batch_size
    order, generator = RowOrder(len(pixels), 1), torch.Generator().manual_seed(0)
    model, parameters = trainer.run.model.eval(), list(trainer.run.model.parameters())
    found = {}
    for spec in DRAWS:
        sampler = get_timestep_sampler(spec, noise_scheduler=trainer.run.process.scheduler)

        def batch_losses(number, sampler=sampler):
            images = pixels[order.rows(list(range(number * batch, (number + 1) * batch)))]
            timesteps = sampler.sample(batch, number, generator)
            noise = torch.randn(images.shape, generator=generator)
            losses = trainer.run.process.losses(model, Batch(images), noise, timesteps)
            weights = sampler.loss_weights(timesteps, number)
            return timesteps, losses, losses if weights is None else losses * weights

        with torch.no_grad():
            if sampler.follows_losses:
                while sampler.state.counts.min() < 10:
                    sampler.observe(*batch_losses(0)[:2])
            means = torch.stack([batch_losses(number)[2].mean() for number in range(num_losses)])
        gradients = []
        for number in range(num_gradients):
            parts = torch.autograd.grad(batch_losses(number)[2].mean(), parameters)
            gradients.append(torch.cat([part.flatten() for part in parts]))
        found[spec] = means.var().item(), torch.stack(gradients).var(dim=0).sum().item()
    return found


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="updates that are timed")
    parser.add_argument("--updates", type=int, default=500, help="of training before (b)")
    parser.add_argument("--losses", type=int, default=500, help="batches for the variance of the loss")
    parser.add_argument("--gradients", type=int, default=100, help="batches for that of the gradient")
    parser.add_argument("--timesteps", type=int, default=1000, help="of the noise schedule of (b)")
    options = parse(parser, rounds=2, updates=2, losses=2, gradients=2, timesteps=20)
    print(machine())
    print("\n| batch | update without, ms | ratio with 10 bins | an update's sums, ms | a logging point, ms | together |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        steps = f"--ddpm_num_steps={options.timesteps}"
        trainer = make_trainer(folder, [f"--max_train_steps={options.updates}", "--timestep_grad_every=1000000", steps])
        for batch in (64, 16):
            plain, ratio = compare_updates(options.rounds, batch)
            adding, reading = cost_alone(trainer, batch)
            share = (adding + reading / trainer.run.config.logging_steps) / plain
            print(
                f"| {batch} | {plain:.1f} | {ratio:.3f} | {adding:.3f} | {reading:.3f} | {100 * share:.2f} % |", flush=True
            )
        for _ in trainer.updates():
            pass
        gradients = min(milliseconds(trainer.log.measure_gradients) for _ in range(3))
        print(f"\na measurement of gradients in 10 bins: {gradients:.0f} ms")
        found = variances(trainer, options.losses, options.gradients)
    base = found["uniform"]
    print("\n| timesteps | variance of the loss | over uniform's | variance of the gradient | over uniform's |")
    print("|---|---|---|---|---|")
    for spec, (loss, gradient) in found.items():
        print(f"| `{spec}` | {loss:.3g} | {loss / base[0]:.3f} | {gradient:.3g} | {gradient / base[1]:.3f} |")


if __name__ == "__main__":
    main()
