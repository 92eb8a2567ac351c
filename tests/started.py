"""Real processes that do not import torch and diffusers again, which takes longer than most of what tests do with them.

Python's own fork server imports them once for each worker of pytest, and every process is forked from it.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

PRELOADED = (
    "diffusers_lrlab.run.train",
    "diffusers_lrlab.training.trainer",
    "diffusers_lrlab.cli.main",
    "diffusers.models.unets.unet_2d",
)


def run_script(script, arguments, env, timeout=300):
    """Exit status, stdout and stderr of `python script arguments...`; what is read at import is that of the first `env`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        process = _server(env).Process(target=_be, args=(str(script), list(arguments), env, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{script} took more than {timeout} s.\n{err.read_text()}")
        return process.exitcode, out.read_text(), err.read_text()


def _server(environment):
    """Python's fork server, started under this environment if it does not run yet, since what is imported reads it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    before = dict(os.environ)
    _set_environment(environment)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def _set_environment(environment):
    os.environ.clear()
    os.environ.update(environment)


def _be(script, arguments, env, out, err):
    """What the forked process does: all that starting python does after its imports."""
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        stream.flush()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    _set_environment(env)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    with contextlib.ExitStack() as stack:
        stack.callback(atexit._run_exitfuncs)  # a forked process would not
        runpy.run_path(script, run_name="__main__")
