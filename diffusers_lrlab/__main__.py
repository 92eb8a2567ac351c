"""`python -m diffusers_lrlab COMMAND` is `lrlab COMMAND`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
