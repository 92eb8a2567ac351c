"""Scripts under the launcher in the process of a test, where what they leave behind can be seen."""

import contextlib
import os
import sys
from unittest import mock

from diffusers_lrlab import launch


@contextlib.contextmanager
def restored_afterwards():
    """Puts back what the launcher leaves to the script until the process ends; accelerate begins as in a new process."""
    forget_accelerate()  # another test may have left a state that compiles
    main, own = sys.modules["__main__"], {"argv": [*sys.argv], "path": [*sys.path]}
    with mock.patch.multiple(sys, **own), mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            forget_accelerate()


def forget_accelerate():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def script_of(folder, text):
    """A script with this text, as the launcher reads it."""
    from diffusers_lrlab.diffusers_plugin.host.source import HostScript

    (folder / "script.py").write_text(text)
    return HostScript(str(folder / "script.py"))


def launch_here(script, *arguments, options=()):
    """The exit status of the launcher, which runs a script in this process."""
    with restored_afterwards():
        sys.argv = ["launch", *map(str, options), str(script), *map(str, arguments)]
        try:
            launch.main()
        except SystemExit as end:
            return end.code
        return 0
