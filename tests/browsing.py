"""Pages in a real browser: Chromium, driven by playwright.

Chromium is looked for where Debian's package puts it, or where ZONEOUT_CHROMIUM says. `make
test-browser` installs both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    names = (os.environ.get("ZONEOUT_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@contextmanager
def started() -> Iterator[Any]:
    """Start a browser, or skip the test where playwright or Chromium is missing."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make test-browser"
    )
    path = chromium()
    if path is None:
        pytest.skip(
            "there is no Chromium here: make test-browser installs one, ZONEOUT_CHROMIUM names "
            "another"
        )
    with sync_api.sync_playwright() as playwright:
        # Without its sandbox, which does not work for root or in a container; the pages are ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page opened at a size, and all that it asked for or complained about."""

    def __init__(self, browser: Any, address: str, size: str, scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.trouble: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("requestfailed", lambda request: self.trouble.append(request.url))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
