"""Runs diffusers' scripts, with or without torchvision: `run_script.py [--launcher] [options of it] SCRIPT.py ...`."""

import importlib.util
import sys
from pathlib import Path

# These look for torchvision when they are imported, and would use more of it than the stand-in has.
import diffusers  # noqa: F401
import transformers

try:
    import peft  # noqa: F401
except ImportError:
    pass

_STAND_IN = []
if importlib.util.find_spec("torchvision") is None:
    _ = transformers.CLIPTokenizer  # its module too is imported before there is one
    _STAND_IN = [str(Path(__file__).parent / "standin")]


def start(arguments: list[str]) -> None:
    from accelerate.utils import set_seed

    from diffusers_lrlab.launch import main, run_script

    sys.path += _STAND_IN
    set_seed(0)  # train_unconditional.py cannot be given one
    if arguments[0] == "--launcher":
        sys.argv[1:] = arguments[1:]
        main()
    else:
        run_script(arguments[0], arguments[1:])


if __name__ == "__main__":
    start(sys.argv[1:])
