"""Processes that do not import torch and diffusers again, which takes longer than most of what tests do with them.

Python's own fork server imports them once for each worker of pytest (`preloaded`), and every process is forked from it.
Commands are those of `python`: a script, `-m MODULE` or `-c CODE`, with arguments.
"""

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import weakref
from pathlib import Path

from blank_pictures import leave_pictures_blank


def run(*command, timeout=300, **how):
    """Exit status, stdout and stderr of `python command...`."""
    process = Started(*command, **how)
    stdout, stderr = process.communicate(timeout)
    return process.returncode, stdout, stderr


def run_ranks(*command, processes, timeout=300, **how):
    """Like `run`, in as many processes as `torchrun` would start; the output is that of all."""
    ranks = start_ranks(*command, processes=processes, **how)
    try:
        status = _wait_for_all(ranks, timeout)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate() for rank in ranks]
    return status, *map("".join, zip(*outputs, strict=True))


def start_ranks(*command, processes, env, **how):
    """As many processes as `torchrun` would start, with what it tells them."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    told |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    of_ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [Started(*command, env={**env, **told, **of_rank}, **how) for of_rank in of_ranks]


def _wait_for_all(ranks, timeout):
    """Until all have ended or one has failed, for which the others would wait in vain; returns its exit status."""
    deadline = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed:
            return failed[0]
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.send_signal(signal.SIGABRT)  # says where it is
            time.sleep(1)
            told = "\n".join(f"--- rank {number}\n{rank.error()}" for number, rank in enumerate(ranks))
            raise TimeoutError(f"{ranks[0].command} took more than {timeout} s.\n{told}")
        time.sleep(0.01)
    return max((rank.returncode for rank in ranks), key=abs)


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Started:
    """`python command...`, used like a `subprocess.Popen` whose output goes to files.

    What is read of the environment at import is that of the first one, but for what is about the Hub. `before` is called
    in the process, first. Pictures are those of [`blank_pictures`], unless they are wanted.
    """

    def __init__(self, *command, env, cwd=None, before=None, pictures=False):
        self.command = [str(part) for part in command]
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._streams = [folder / name for name in ("stdout", "stderr")]
        how = (self.command, dict(env), cwd and str(cwd), before, pictures, *self._streams)
        self._process = _server(env).Process(target=_be, args=how)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=300):
        self._process.join(timeout)
        if self.poll() is None:
            self.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.command, timeout, stderr=self.error())
        return self.returncode

    def error(self):
        return self._streams[1].read_text() if self._streams[1].exists() else ""

    def communicate(self, timeout=300):
        """What it wrote to stdout and stderr until its end."""
        self.wait(timeout)
        return tuple(stream.read_text() if stream.exists() else "" for stream in self._streams)


def fork_what_is_run():
    """For `before`: Python that the process runs by `subprocess.run` is forked from the same server as the process is."""
    run_really, program = subprocess.run, sys.executable
    server = multiprocessing.forkserver
    # It runs, and its address is known here; without this, another one would be started.
    server.ensure_running = server._forkserver.ensure_running = lambda: None
    sys.path.append(str(Path(__file__).parent))  # where the new process finds this module

    def run_here(command, *, cwd=None, env=None, check=False, capture_output=False, stdout=None, text=False, **how):
        if str(command[0]) != program:
            streams = {"capture_output": capture_output} if capture_output else {"stdout": stdout}
            return run_really(command, cwd=cwd, env=env, check=check, text=text, **streams, **how)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # which the new process would import
        try:
            status, out, err = run(*command[1:], cwd=cwd or os.getcwd(), env=os.environ if env is None else env)
        finally:
            sys.modules["__main__"] = main
        if check and status:
            raise subprocess.CalledProcessError(status, command, out, err)
        return subprocess.CompletedProcess(command, status, out, err)

    subprocess.run = run_here


def _server(environment):
    """Python's fork server, started under this environment if it does not run yet, since what is imported reads it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = dict(os.environ)
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH")]
    _set_environment({**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def _set_environment(environment):
    os.environ.clear()
    os.environ.update(environment)


def _be(command, env, cwd, before, pictures, out, err):
    """What the forked process does: all that starting python does after its imports, and not in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell would have ignored
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        stream.flush()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    at_import = dict(os.environ)
    _set_environment(env)
    if _of_the_hub(at_import) != _of_the_hub(env):
        _read_the_environment_again()
    faulthandler.enable()
    if cwd is not None:
        os.chdir(cwd)
    if not pictures:
        leave_pictures_blank()
    if before is not None:
        before()
    with contextlib.ExitStack() as stack:
        stack.callback(atexit._run_exitfuncs)  # a forked process would not
        _execute(*command)


def _of_the_hub(environment):
    return {key: value for key, value in environment.items() if key.startswith("HF_")}


def _read_the_environment_again():
    """What the clients of the Hub have read at import: its address, the cache, the token, whether to be offline."""
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if "huggingface_hub.file_download" in sys.modules:  # which has copies of constants in older versions
        constants, copies = (
            vars(sys.modules["huggingface_hub.constants"]),
            vars(sys.modules["huggingface_hub.file_download"]),
        )
        copies |= {name: constants[name] for name in copies if name.isupper() and name in constants}
    if "huggingface_hub.hf_api" in sys.modules:
        sys.modules["huggingface_hub.hf_api"].api.endpoint = sys.modules["huggingface_hub.constants"].ENDPOINT


def _execute(first, *arguments):
    if first == "-m":
        sys.argv, sys.path[0] = list(arguments), os.getcwd()
        sys.modules.pop(arguments[0], None)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [first, *arguments], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
