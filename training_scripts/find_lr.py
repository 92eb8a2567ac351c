"""Find a learning rate for a training run: short tests in which the rate rises.

    accelerate launch training_scripts/find_lr.py
    accelerate launch training_scripts/find_lr.py --dataset_name dino --optimizer sgd --repeats 5

Takes the options of train_ddpm.py, and writes lr_finder.json and lr_finder.png into lrlab/ of --output_dir.
`lrlab find-lr` is the same program, where there is no clone.
"""

import sys

from diffusers_lrlab.cli.training import find_lr_main as main

if __name__ == "__main__":
    sys.exit(main())
