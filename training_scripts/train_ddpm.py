"""Train an unconditional diffusion pipeline with a learning rate that follows its schedule at every update.

    accelerate launch training_scripts/train_ddpm.py --lr_scheduler cosine
    accelerate launch training_scripts/train_ddpm.py --dataset_name huggan/flowers-102-categories --resolution 64 \
        --lr_scheduler step:step_size=2000,gamma=0.5 --max_train_steps 10000 --mixed_precision bf16

Without --dataset_name or --train_data_dir it trains on handwritten digits that are part of the package's dependencies.
Every flag of diffusers' examples/unconditional_image_generation/train_unconditional.py works here too.
`lrlab train` and `accelerate launch -m diffusers_lrlab.train` are the same program, where there is no clone.
"""

import sys

from diffusers_lrlab.cli.training import train_main as main

if __name__ == "__main__":
    sys.exit(main())
