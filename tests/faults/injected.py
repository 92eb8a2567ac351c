"""What goes wrong in a process before its operation number k on the files of a folder."""

import atexit
import fcntl
import itertools
import os
import resource
import signal
import sys
from pathlib import Path

FULL_DISK = "full disk"
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, FULL_DISK: None}
# What may happen to the bytes of a file.
DAMAGE = {
    "bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": None,
}
_ROOM_AGAIN = ("os.remove", "os.rmdir", "os.truncate")
_CHANGES = {"os.rename", "os.mkdir", "os.link", "os.symlink", *_ROOM_AGAIN}
_PIPE_BYTES = 1 << 20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def count_and_strike(folder, at, fault, count_file, output=None):
    """
    Called in the process, first: the fault comes before operation number `at` on files of a folder; 0 only counts them.

    On a full disk there is room again once something is removed or cut back. What the process says goes to the pipe `output`
    then, since no file takes it.
    """
    counter, seen, is_full = itertools.count(1), 0, False  # checkpoints are written by another thread
    if output is not None:
        pipe = os.open(output, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(pipe, stream)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))

    def look(event, arguments):
        nonlocal seen, is_full
        if not _is_change(event, arguments, folder):
            return
        seen = number = next(counter)
        if is_full and event in _ROOM_AGAIN:
            is_full = False
            _limit_files(resource.RLIM_INFINITY)
        if number == at and FAULTS[fault] is not None:
            os.kill(os.getpid(), FAULTS[fault])
        elif number == at:
            is_full = True
            _limit_files(0)

    sys.addaudithook(look)
    atexit.register(lambda: (_limit_files(resource.RLIM_INFINITY), Path(count_file).write_text(str(seen))))


def _is_change(event, arguments, folder):
    if event in _CHANGES:
        relative_to_descriptor = any(isinstance(each, int) and each >= 0 for each in arguments[1:])  # as rmtree does
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        relative_to_descriptor = False
    else:
        return False
    path = arguments[0]
    beside = os.path.join(os.path.dirname(folder), ".tmp-lrlab-")  # where it is written first
    return relative_to_descriptor or (not isinstance(path, int) and os.fsdecode(path).startswith((folder, beside)))


def _limit_files(num_bytes):
    """To a writer, a file that may not become longer is a full disk (`ulimit -f`)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Pipe:
    """What a process writes to is read after its end."""

    def __init__(self, path):
        self.path = path
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self._end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def read(self):
        try:
            return os.read(self._end, _PIPE_BYTES).decode()
        except BlockingIOError:  # it said nothing
            return ""
        finally:
            os.close(self._end)
            self.path.unlink()
