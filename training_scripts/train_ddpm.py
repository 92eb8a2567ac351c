"""Train an unconditional diffusion pipeline under a learning-rate schedule that runs as it was asked for.

    accelerate launch training_scripts/train_ddpm.py --lr_scheduler cosine
    accelerate launch training_scripts/train_ddpm.py --dataset_name huggan/flowers-102-categories --resolution 64 \
        --lr_scheduler step:step_size=2000,gamma=0.5 --max_train_steps 10000 --mixed_precision bf16

Without --dataset_name or --train_data_dir it trains on handwritten digits that are part of the package's dependencies.
Every flag of diffusers' examples/unconditional_image_generation/train_unconditional.py works here too.
"""

import sys

from diffusers_lrlab.core.errors import exit_status
from diffusers_lrlab.training.arguments import parse_arguments


def run() -> None:
    """Parses and trains."""
    config = parse_arguments(sys.argv[1:], description=__doc__.partition("\n")[0])
    # Imported after the command line is understood: it takes seconds, and a typing error should not.
    from diffusers_lrlab.run.train import train

    train(config)


def main() -> int:
    """Turns errors that the user can mend into one message and the exit status 2."""
    return exit_status(run, all_ranks=False)


if __name__ == "__main__":
    sys.exit(main())
