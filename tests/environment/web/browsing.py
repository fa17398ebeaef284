"""Sites and sessions for tests of the web environment, on both backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sixfold_environments.web.browser import Browser
from sixfold_environments.web.chromium import ChromiumBrowser, chromium_path
from sixfold_environments.web.html_browser import HtmlBrowser
from sixfold_environments.web.session import Session
from sixfold_environments.web.site import Limits, Site
from sixfold_environments.web.wsgi import wsgi_answer

pytest.importorskip("selectolax", reason="pip install 'sixfold[web]'")

ORIGIN = "http://site.test"

HAS_CHROMIUM = importlib.util.find_spec("playwright") is not None and bool(chromium_path())

needs_chromium = pytest.mark.skipif(not HAS_CHROMIUM, reason="make web runs it")

BACKENDS = [
    pytest.param(HtmlBrowser, id="html"),
    pytest.param(ChromiumBrowser, id="chromium", marks=needs_chromium),
]

Page = str | tuple[int, list[tuple[str, str]], bytes]


class Pages:
    """WSGI application of fixed pages.

    Args:
        pages: answer by path: HTML, or (status, headers, body), or a function of the environment.

    Attributes:
        asked: method, path with query, and body of every request, in order.
    """

    def __init__(self, pages: dict[str, Page | Callable[[dict[str, Any]], Page]]) -> None:
        self.pages = pages
        self.asked: list[tuple[str, str, bytes]] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ["QUERY_STRING"]
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0))
        if path != "/favicon.ico":
            self.asked.append(
                (environ["REQUEST_METHOD"], path + ("?" + query if query else ""), body)
            )
        page = self.pages.get(path, (404, [("Content-Type", "text/html")], b"<h1>none</h1>"))
        if callable(page):
            page = page(environ)
        if isinstance(page, str):
            page = (200, [("Content-Type", "text/html; charset=utf-8")], page.encode())
        status, headers, content = page
        start(f"{status} X", headers)
        return [content]


def session(
    backend: Callable[[Site], Browser],
    app: Callable[..., Any],
    *,
    characters: int = 4000,
    limits: Limits | None = None,
) -> tuple[Session, Browser]:
    """A session on a WSGI application, and its browser, which must be closed."""
    browser = backend(Site(ORIGIN, wsgi_answer(app), limits))
    return Session(browser, characters), browser


async def seen(
    backend: Callable[[Site], Browser], app: Callable[..., Any], *actions: Callable[[Session], Any]
) -> list[str]:
    """What the policy sees on the first page and after each action."""
    one, browser = session(backend, app)
    try:
        found = [await one.open(f"{ORIGIN}/")]
        for action in actions:
            found.append(await action(one))
        return found
    finally:
        await browser.close()
