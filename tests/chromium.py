"""A headless Chromium, driven by its DevTools protocol over a pipe: nothing is needed but the program itself."""

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
_ALONE = ("--no-first-run", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-gpu")


def find_chromium():
    """The program that `LRLAB_CHROMIUM` names, else one on the PATH, else `None`."""
    return os.environ.get("LRLAB_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """
    A browser with one page, cut off from the network.

    `errors` are messages of the console that are errors or warnings, and exceptions; `requests` the addresses that were
    asked for.
    """

    def __init__(self, program):
        self.errors, self.requests, self._buffer, self._last = [], [], b"", 0
        self._folder = tempfile.mkdtemp()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads from 3 and writes to 4, so that neither may be where the pipes are now.
        far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
        roots = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root otherwise
        command = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={self._folder}", *_ALONE, *roots]
        actions = [(os.POSIX_SPAWN_DUP2, far[0], 3), (os.POSIX_SPAWN_DUP2, far[1], 4)]
        actions += [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        self._pid = os.posix_spawnp(program, command, os.environ, file_actions=actions)
        for end in (theirs_in, theirs_out, *far):
            os.close(end)
        self._in, self._out, self._session = ours_in, ours_out, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method, **parameters):
        """The answer to one command; what happens in the meantime is noted."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self, timeout=60):
        deadline = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"No answer from Chromium within {timeout} seconds.")
            read = os.read(self._in, 2**20)
            if not read:
                raise OSError("Chromium closed its pipe.")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, about):
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(about["args"]))

    def open(self, path, width=1280, height=900, mobile=False):
        """Opens a file in a window of this size, in pixels, and waits until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script):
        """The value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition, timeout=20):
        """Waits until an expression is true."""
        deadline = time.monotonic() + timeout
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Not true within {timeout} seconds: {condition}")
            time.sleep(0.02)

    def set_scheme(self, scheme):
        """As if the reader preferred "light" or "dark"; "" for neither."""
        features = [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []
        self.call("Emulation.setEmulatedMedia", features=features)

    def violations(self, of_colors=False):
        """
        What axe-core finds wrong with the page for people who read it in other ways: rules, and the first places.
        `of_colors` looks for too little contrast alone, which is all that another colour scheme can change.
        """
        self.evaluate(f"{AXE.read_text(encoding='utf-8')}; 0")
        tags = ["color-contrast"] if of_colors else ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        found = self.evaluate(
            f"axe.run(document, {{resultTypes: ['violations'], runOnly: {tags}}}).then(all => all.violations.map("
            "rule => [rule.id, rule.nodes.slice(0, 3).map(node => node.failureSummary + node.html)]))"
        )
        return [rule for rule in found if rule[0] not in NOT_OURS]


def find_axe():
    """The program of axe-core, which `axe-core-python` carries; `None` if that is not installed."""
    spec = importlib.util.find_spec("axe_core_python")
    return None if spec is None else Path(spec.origin).with_name("axe.min.js")


PROGRAM, AXE = find_chromium(), find_axe()
# Of the theme: the boxes around its buttons beside code are landmarks without names, and the keyboard reaches code that
# scrolls only where there is a mouse, which a headless browser lacks.
NOT_OURS = {"landmark-unique", "scrollable-region-focusable"}


def _weekly(is_missing, reason):
    skip = pytest.mark.skipif(is_missing, reason=reason)
    return lambda test: pytest.mark.weekly(skip(test))


needs_chromium = _weekly(
    PROGRAM is None, f"no Chromium: LRLAB_CHROMIUM is not set, and none of {', '.join(NAMES)} is on the PATH"
)
needs_axe = _weekly(
    PROGRAM is None or AXE is None, "no Chromium, or no axe-core: pip install axe-core-python, and see LRLAB_CHROMIUM"
)
