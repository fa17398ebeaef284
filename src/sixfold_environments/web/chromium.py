"""Browser backend that drives Chromium with Playwright. Needs the extra `web`.

One browser serves all episodes of the process. Each episode has its own browser context. The
browser's event loop runs in a separate thread, so it does not depend on the loop of an episode. The
only proxy of a context is the server of its episode, so every request goes through `Site.fetch`.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from sixfold.errors import UserError, one_line

from .browser import BrowserFault
from .dom import Document, Element, Text
from .html_parser import MOST_DEPTH, MOST_NODES, parse_page
from .serve import SiteServer
from .site import Site, decode_response, error_page, refusal

T = TypeVar("T")

DEADLINE_S = 30.0
"""Time limit of one action, in seconds. A browser that takes longer counts as dead."""

_ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=HttpsUpgrades,HttpsFirstBalancedModeAutoEnable",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

INSTALL = (
    "pip install 'sixfold[web]', and install Chromium: apt-get install chromium, or"
    " playwright install chromium"
)


class ChromiumBrowser:
    """A tab of Chromium."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._server: SiteServer | None = None
        self._context: Any = None
        self._page: Any = None
        self._number = 0
        self._status, self._posted = 200, False

    async def open(self, url: str) -> None:
        """Go to an address. The first call opens the tab."""
        await self._run(lambda: self._open(url))

    async def document(self) -> Document:
        return await self._run(self._read)

    async def click(self, element: Element) -> None:
        await self._run(lambda: self._act("click", element.key))

    async def fill(self, field: Element, text: str) -> None:
        await self._run(lambda: self._act("fill", [field.key, text]))

    async def choose(self, select: Element, option: Element) -> None:
        await self._run(lambda: self._act("choose", [select.key, option.key]))

    async def submit(self, form: Element) -> None:
        await self._run(lambda: self._act("submit", form.key))

    async def cookies(self) -> dict[str, str]:
        found = await self._run(lambda: self._context.cookies())
        return {cookie["name"]: cookie["value"] for cookie in found}

    async def close(self) -> None:
        context, server = self._context, self._server
        self._context = self._page = self._server = None
        if server is not None:
            await asyncio.to_thread(server.close)
        if context is not None:
            await _HOST.run(lambda: _close(context))

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on the browser's loop and return its result.

        Raises:
            BrowserFault: if the browser fails.
            SiteFault: if the site cannot be reached.
        """

        async def limited() -> T:
            return await asyncio.wait_for(work(), DEADLINE_S)

        try:
            given = await _HOST.run(limited)
        except (BrowserFault, UserError):
            raise
        except Exception as error:
            raise BrowserFault(f"Chromium failed: {one_line(error)}") from error
        if self._server is not None and self._server.fault is not None:
            raise self._server.fault
        return given

    async def _open(self, url: str) -> None:
        if self._page is None:
            await self._start()
        await self._wait_for_page(self._page.goto(url, wait_until="load"))

    async def _start(self) -> None:
        browser = await _HOST.browser()
        self._server = SiteServer(self._site)
        self._context = await browser.new_context(
            proxy={"server": self._server.url}, accept_downloads=False, bypass_csp=True
        )
        await self._context.add_init_script(_script())
        await self._context.route(lambda url: not self._site.holds(url), _refuse)
        self._page = await self._context.new_page()
        self._page.on("response", self._note)
        self._page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.dismiss()))

    def _note(self, response: Any) -> None:
        """Record the method of the request for the page, and the status of the response."""
        request = response.request
        if request.is_navigation_request() and request.frame == self._page.main_frame:
            self._status, self._posted = response.status, request.method == "POST"

    async def _act(self, name: str, argument: Any) -> None:
        """Run an action of the page script. If it navigates, wait for the new page."""
        page = self._page
        arrived = asyncio.ensure_future(
            page.wait_for_event("framenavigated", lambda frame: frame == page.main_frame)
        )
        try:
            leaves = await page.evaluate(f"x => window.__sixfold.{name}(x)", argument)
            if leaves:
                await self._wait_for_page(arrived)
        finally:
            arrived.cancel()
            await asyncio.gather(arrived, return_exceptions=True)
        await self._wait_for_page(page.wait_for_load_state("load"))

    async def _wait_for_page(self, arriving: Awaitable[Any]) -> None:
        """Wait for a page. If it fails to load, `_read` returns an error page."""
        from playwright.async_api import Error

        try:
            await arriving
        except Error as error:
            if not _HOST.is_alive or "net::" not in str(error):
                raise

    async def _read(self) -> Document:
        given = await self._page.evaluate(
            "most => window.__sixfold ? window.__sixfold.read(most) : null", MOST_NODES
        )
        if given is None:  # an internal page of Chromium: nothing was loaded
            self._number += 1
            url = self._page.url
            page = error_page(502, "the page cannot be loaded")
            if not self._site.holds(url):
                page = refusal(url)
            return Document(url, parse_page(decode_response(page)), page.status, self._number)
        self._number += bool(given["fresh"])
        root = _elements(given["root"])
        return Document(given["url"], root, self._status, self._number, self._posted)


async def _close(context: Any) -> None:
    """Close a context. The browser may be dead, or not answer."""
    from playwright.async_api import Error

    with suppress(Error, TimeoutError):
        await asyncio.wait_for(context.close(), DEADLINE_S)


async def _refuse(route: Any) -> None:
    """Answer a request for an address outside the site."""
    page = refusal(route.request.url)
    await route.fulfill(status=page.status, headers=dict(page.headers), body=page.body)


def _elements(given: list[Any]) -> Element:
    """Build the elements from the nested lists of the page script."""
    root: Element | None = None
    stack: list[tuple[Any, Element | None, int]] = [(given, None, 0)]
    while stack:
        node, parent, depth = stack.pop()
        if isinstance(node, str):
            if parent is not None:
                parent.children.append(Text(node))
            continue
        tag, attributes, (value, checked, selected, display, visible), key, children = node
        made = Element(tag, attributes, [], parent, value, checked, selected, display, visible, key)
        if parent is not None:
            parent.children.append(made)
        root = root or made
        below = made if depth < MOST_DEPTH or parent is None else parent
        stack.extend((child, below, depth + 1) for child in reversed(children))
    assert root is not None
    return root


@lru_cache(1)
def _script() -> str:
    return (resources.files(__package__) / "chromium.js").read_text("utf-8")


def chromium_path() -> str:
    """Path of an installed Chromium, or "" if there is none outside Playwright's own folder."""
    return next((path for name in _NAMES if (path := shutil.which(name))), "")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Host:
    """The browser of the process, with its event loop in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Any = None
        self._browser: Any = None
        self._starting: asyncio.Lock | None = None

    @property
    def is_alive(self) -> bool:
        """True if the browser is running."""
        return self._browser is not None and self._browser.is_connected()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on the loop of the thread and return its result."""

        async def here() -> T:
            return await work()

        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(here(), self._ensure_loop())
        )

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._starting = asyncio.Lock()
                threading.Thread(
                    target=_run_loop, args=(self._loop,), name="chromium", daemon=True
                ).start()
                atexit.register(self.close)
            return self._loop

    async def browser(self) -> Any:
        """Return the browser. Start it if it is not running. Called on the loop of the thread."""
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError as error:
            raise UserError(
                f"environment.web.browser = 'chromium' needs Playwright: {INSTALL}"
            ) from error
        assert self._starting is not None
        async with self._starting:
            if not self.is_alive:
                if self._driver is None:
                    self._driver = await async_playwright().start()
                own = Path(self._driver.chromium.executable_path)
                path = None if own.is_file() else chromium_path()
                try:
                    self._browser = await self._driver.chromium.launch(
                        executable_path=path or None, args=list(_ARGUMENTS)
                    )
                except Error as error:
                    raise UserError(
                        f"environment.web.browser = 'chromium': Chromium does not start"
                        f" ({one_line(error)}). {INSTALL}"
                    ) from error
        return self._browser

    def close(self) -> None:
        """End the browser and the thread. A later use starts both again."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        ended = asyncio.run_coroutine_threadsafe(self._end(), loop)
        try:
            ended.result(10.0)
        finally:
            loop.call_soon_threadsafe(loop.stop)

    async def _end(self) -> None:
        driver, browser, self._driver, self._browser = self._driver, self._browser, None, None
        if browser is not None:
            await browser.close()
        if driver is not None:
            await driver.stop()


_HOST = _Host()
