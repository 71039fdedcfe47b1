"""Owns a headless Chromium in tests: finding it, and a page that notes every complaint of the browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from playwright.async_api import Page, async_playwright

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NONE = f"no browser: none of {', '.join(_NAMES)} is on PATH (apt-get install chromium-headless-shell)"


def browser_path() -> str | None:
    """A Chromium on this machine."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@dataclass
class Tab:
    """A page, and what the browser's console said of it."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@asynccontextmanager
async def tab(*, width: int = 1200, height: int = 900, dark: bool = False) -> AsyncIterator[Tab]:
    """An empty tab of the Chromium that is on this machine."""
    path = browser_path()
    assert path is not None, NONE
    # Chromium's sandbox cannot be had by root, as whom containers run.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=flags)
        try:
            page = await browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            page.set_default_timeout(60_000)
            made = Tab(page)
            page.on("console", lambda message: made.complaints.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: made.complaints.append(f"error: {error}"))
            yield made
        finally:
            await browser.close()
