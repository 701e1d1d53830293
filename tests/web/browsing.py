"""A headless Chromium that looks at the page, and an account of all it asked for and complained of.

Needs Chromium itself (Debian's `chromium`) and the package playwright, which drives it. Without them these
tests are skipped, unless REQUIRE_TOOLCHAINS=1.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

from tests.e2e.harness import PATIENCE_S
from tests.lacking import lacking
from tests.web.served import Served

expect.set_options(timeout=PATIENCE_S * 1000)


def chromium() -> str:
    """Its path; skips, or fails, the test that asks where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        lacking("there is no chromium: `apt-get install chromium`")
    return found


@asynccontextmanager
async def a_browser() -> AsyncIterator[Browser]:
    program = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """A page in the browser."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def calls(self) -> list[Request]:
        return [request for request in self.requests if "/api/" in request.url]

    def quiet(self) -> None:
        """Nothing went wrong in it, and it asked nobody but the head."""
        assert self.errors == []
        assert [request.url for request in self.requests if not request.url.startswith(self.origin)] == []

    async def fits(self) -> None:
        """Nothing sticks out to the side."""
        widths = await self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] <= widths[1]

    async def open_story(self, session_id: str) -> None:
        await self.page.locator("#session-rows").get_by_role("link", name=session_id, exact=True).click()
        await expect(self.page.locator("#story-title")).to_have_text(f"Story of {session_id}")

    async def focused(self) -> str:
        """The name of what has the keyboard."""
        return str(
            await self.page.evaluate(
                "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"
            )
        )

    async def tab_to(self, name: str) -> None:
        """By the keyboard alone."""
        for _ in range(100):
            await self.page.keyboard.press("Tab")
            if await self.focused() == name:
                return
        raise AssertionError(f"the Tab key never came to {name}")


@asynccontextmanager
async def a_tab(
    browser: Browser, served: Served, *, width: int = 1280, height: int = 900, color: str = "light"
) -> AsyncIterator[Tab]:
    """The page, opened; at its end it must have been quiet."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if color == "dark" else "light",
    )
    tab = Tab(await context.new_page(), served.url)

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            tab.errors.append(message.text)

    def asked(request: Request) -> None:
        tab.requests.append(request)

    tab.page.on("console", said)
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on("request", asked)
    await tab.page.goto(served.url)
    try:
        yield tab
        tab.quiet()
    finally:
        await context.close()
