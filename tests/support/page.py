"""A visit to the gateway's page, and all that a browser complains of meanwhile.

Owns how the page's parts are found, and what may not happen. Must not know what a test asks.
"""

import json
import re
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect

_NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""
_FAILED = "Failed to load resource"


class Visit:
    """A page in a profile of its own, as a context manager.

    At the end nothing may have gone wrong: no error in the console, no exception, no request to
    another host, no violation of the policy.

    Args:
        url: of the gateway. wait_s: for what must come. options: of Playwright's `new_context`.

    Attributes:
        bodies: of the requests for text, in order. may_fail: parts of the paths whose answers may
            be errors, which Chromium's console reports.
    """

    def __init__(self, browser: Browser, url: str, wait_s: float, **options: Any) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.may_fail: set[str] = set()
        self._wrong: list[str] = []
        self._failed: list[str] = []
        self._context = browser.new_context(**options)
        self._wait_ms = wait_s * 1000
        self._context.set_default_timeout(self._wait_ms)
        self._context.add_init_script(_NOTE_VIOLATIONS)
        self.page: Page = self._context.new_page()
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self._wrong.append(f"exception: {error}"))
        self.page.on("request", self._note_request)

    def open(self) -> None:
        """Go to the page, and wait for the model's name."""
        self.page.goto(self.url)
        expect(self.page).to_have_title(re.compile("·"), timeout=self._wait_ms)

    def violations(self) -> list[str]:
        """Return the page's violations of its policy."""
        found: list[str] = self.page.evaluate("window.violations")
        return found

    @property
    def prompt(self) -> Locator:
        """Field of the prompt."""
        return self.page.locator("#prompt")

    @property
    def turns(self) -> Locator:
        """The turns of the conversation."""
        return self.page.locator(".turn")

    @property
    def send(self) -> Locator:
        """The button that sends, or stops."""
        return self.page.locator("#send")

    def ask(self, text: str) -> None:
        """Send a prompt."""
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def wait_idle(self) -> None:
        """Wait until nothing runs."""
        expect(self.send).to_have_text("Send", timeout=self._wait_ms)

    def answer(self, index: int = -1) -> str:
        """The text of an answer."""
        return self.turns.nth(index).locator(".answer").inner_text()

    def fact(self, name: str, index: int = -1) -> str:
        """A measure of an answer."""
        term = self.page.locator("dt", has_text=re.compile(rf"^{re.escape(name)}$"))
        return self.turns.nth(index).locator(".facts > div", has=term).locator("dd").inner_text()

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        said = f"{message.type}: {message.text} {message.location.get('url', '')}"
        (self._failed if _FAILED in message.text else self._wrong).append(said)

    def _note_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self._wrong.append(f"a request to {request.url}")
        if request.method == "POST" and request.post_data:
            self.bodies.append(json.loads(request.post_data))

    def check(self) -> None:
        """Assert that nothing went wrong so far."""
        failed = [one for one in self._failed if not any(part in one for part in self.may_fail)]
        wrong = self._wrong + failed + self.violations()
        assert not wrong, wrong

    def __enter__(self) -> "Visit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self._context.close()
