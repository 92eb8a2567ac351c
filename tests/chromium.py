"""A headless Chromium that is cut off from the network, by Playwright; the program is one of this machine."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
PROGRAM = os.environ.get("LRLAB_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
# Of the theme: the boxes around its buttons beside code are landmarks without names, and the keyboard reaches code that
# scrolls only where there is a mouse, which a headless browser lacks.
NOT_OURS = {"landmark-unique", "scrollable-region-focusable"}


class Chromium:
    """
    A browser with one `page` of Playwright.

    `errors` are messages of the console that are errors or warnings, and exceptions; `requests` the addresses that were
    asked for.
    """

    def __enter__(self):
        from playwright.sync_api import sync_playwright

        self._playwright, self.errors, self.requests = sync_playwright().start(), [], []
        self._browser = self._playwright.chromium.launch(
            executable_path=PROGRAM, args=["--host-resolver-rules=MAP * ~NOTFOUND"]
        )
        self.page = self._browser.new_context(offline=True, no_viewport=True).new_page()
        self._devtools = self.page.context.new_cdp_session(self.page)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        return self

    def __exit__(self, *_):
        self._browser.close()
        self._playwright.stop()

    def _note(self, message):
        if message.type in ("error", "warning", "assert"):
            self.errors.append(message.text)

    def open(self, path, width=1280, height=900, mobile=False):
        """Opens a file in a window of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self._devtools.send("Emulation.setDeviceMetricsOverride", size)
        self._devtools.send("Emulation.setTouchEmulationEnabled", {"enabled": mobile})
        self.page.goto(path.resolve().as_uri())

    def violations(self, of_colors=False):
        """
        What axe-core finds wrong with the page for people who read it in other ways: rules, and the first places.
        `of_colors` looks for too little contrast alone, which is all that another colour scheme can change.
        """
        from axe_core_python.sync_playwright import Axe

        tags = ["color-contrast"] if of_colors else ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        found = Axe().run(self.page, options={"resultTypes": ["violations"], "runOnly": tags})["violations"]
        places = {rule["id"]: [node["failureSummary"] + node["html"] for node in rule["nodes"][:3]] for rule in found}
        return [rule for rule in places.items() if rule[0] not in NOT_OURS]


def needs_chromium(test):
    reason = f"no Chromium: LRLAB_CHROMIUM is not set, and none of {', '.join(NAMES)} is on the PATH"
    return pytest.mark.weekly(pytest.mark.skipif(PROGRAM is None, reason=reason)(test))
