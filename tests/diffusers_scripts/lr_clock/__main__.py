"""`python -m tests.diffusers_scripts.lr_clock CHECKOUT [NAME ...]`."""

import sys
from pathlib import Path

from . import main

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
