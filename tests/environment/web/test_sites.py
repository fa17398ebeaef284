"""Error pages for sites that fail, hang, send too much, redirect without end or lead away."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from browsing import BACKENDS, ORIGIN, Pages, seen, session

from sixfold.errors import UserError
from sixfold_environments.web.browser import Browser
from sixfold_environments.web.html_browser import HtmlBrowser
from sixfold_environments.web.serve import SiteServer
from sixfold_environments.web.session import Session
from sixfold_environments.web.site import Limits, Request, Site, SiteFault, origin_of
from sixfold_environments.web.wsgi import http_answer, wsgi_answer

Backend = Callable[[Site], Browser]
LIMITS = Limits(seconds=0.5, size=100_000, redirects=5)


def _failing(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    raise RuntimeError("secret /etc/passwd")


def _endless(environ: dict[str, Any], start: Callable[..., Any]) -> Iterator[bytes]:
    start("200 OK", [("Content-Type", "text/html")])
    while True:
        yield b"<p>more</p>" * 1000


def _slow(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    time.sleep(1.5)
    start("200 OK", [("Content-Type", "text/html")])
    return [b"late"]


def _trickling(environ: dict[str, Any], start: Callable[..., Any]) -> Iterator[bytes]:
    start("200 OK", [("Content-Type", "text/html")])
    for _ in range(30):
        time.sleep(0.05)
        yield b"x"


def _redirecting(to: str) -> Callable[..., Any]:
    return lambda environ, start: (start("302 Found", [("Location", to)]) and None) or [b""]


def _sending(status: str, kind: str, body: bytes) -> Callable[..., Any]:
    def app(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        start(status, [("Content-Type", kind), ("Content-Disposition", "attachment")])
        return [body]

    return app


HTML = "text/html"
CASES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "fails": (_failing, ["status 500", 'heading "Error"', "the site failed"]),
    "answers nothing": (lambda e, s: [], ["status 500", 'heading "Error"', "the site failed"]),
    "large": (_endless, ["status 502", 'heading "Error"', "the answer has more than 100000 bytes"]),
    "slow": (_slow, ["status 504", 'heading "Error"', "no answer within 0.5 s"]),
    "trickles": (_trickling, ["status 504", 'heading "Error"', "no answer within 0.5 s"]),
    "loops": (_redirecting("/"), ["status 508", 'heading "Error"', "more than 5 redirects"]),
    "leaves": (
        _redirecting("http://evil.test/x?secret"),
        ["status 403", 'heading "Error"', "refused: http://evil.test:80 is outside this site"],
    ),
    "500 of its own": (
        _sending("500 Oh", HTML, b"<title>Oh</title><h1>No</h1>"),
        ["status 500", 'heading "No"'],
    ),
    "text": (_sending("200 OK", "text/plain", b"a <b>\nc"), ["a <b> c"]),
    "a download": (
        _sending("200 OK", "application/pdf", b"%PDF"),
        ["status 415", 'heading "Error"', "application/pdf is not a page"],
    ),
    "latin-1": (_sending("200 OK", "text/html; charset=latin-1", b"caf\xe9"), ["café"]),
    "meta": (_sending("200 OK", HTML, b"<meta charset=latin-1>caf\xe9"), ["café"]),
    "empty": (_sending("200 OK", HTML, b""), ["the page is empty"]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_pages_of_bad_sites(backend: Backend, name: str) -> None:
    app, lines = CASES[name]

    async def first() -> str:
        one, browser = session(backend, app, limits=LIMITS)
        try:
            return await one.open(f"{ORIGIN}/")
        finally:
            await browser.close()

    shown = [line for line in asyncio.run(first()).split("\n") if not line.startswith("page ")]
    assert shown == lines


def test_malformed_addresses_and_charsets_are_shown_as_pages() -> None:
    pages: dict[str, Any] = {
        "/": "<link rel=stylesheet href='http://['><a href=/away>a</a><a href=/idna>b</a>",
        "/away": (302, [("Location", "http://[")], b""),
        "/idna": (200, [("Content-Type", "text/html; charset=idna")], b"tea \xe9"),
    }
    steps = (lambda s: s.click(1), Session.back, lambda s: s.click(2))
    first, away, _, idna = asyncio.run(seen(HtmlBrowser, Pages(pages), *steps))
    assert first == '[1] link "a"\n[2] link "b"'
    assert "refused: this address is outside this site" in away
    assert idna == "tea \ufffd"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_outside_the_site_is_requested(backend: Backend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        outside.settimeout(0.2)
        evil = f"http://127.0.0.1:{outside.getsockname()[1]}"
        page = f"""<img src={evil}/i><link rel=stylesheet href={evil}/c>
        <script src={evil}/s></script>
        <a href={evil}/a>a</a><form method=post action={evil}/f><button>b</button></form>
        <iframe src={evil}/x></iframe><a href='https://example.com/'>c</a>"""
        clicks = [lambda s, n=n: s.click(n) for n in (1, 2, 3)]
        steps = [step for click in clicks for step in (click, Session.back)]
        first, *found = asyncio.run(seen(backend, Pages({"/": page}), *steps))
        refusals, returns = found[::2], found[1::2]
        assert returns == [first] * 3
        assert all("refused" in text and "status 403" in text for text in refusals)
        with pytest.raises(TimeoutError):
            outside.accept()


def test_origins() -> None:
    assert origin_of("http://a.test/x") == origin_of("http://A.test:80") == "http://a.test:80"
    assert origin_of("https://a.test") == "https://a.test:443" != origin_of("http://a.test:443")
    assert {origin_of(u) for u in ("", "x", "ftp://a", "http://", "http://a:x", "http://[")} == {""}
    site = Site(ORIGIN, wsgi_answer(_failing))
    for url in ("http://site.test.evil.test/", "http://evil.test@site.test.evil.test/", "//x"):
        assert not site.holds(url)


def test_a_site_at_an_address_and_a_site_that_is_down() -> None:
    class Quiet(WSGIRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    app = Pages({"/": "<form method=post action=/to><input name=a><button>b</button></form>"})
    app.pages["/to"] = lambda environ: f"<p>{environ['REQUEST_METHOD']}</p>"
    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            one = Session(HtmlBrowser(Site(url, http_answer(url))), 4000)
            assert asyncio.run(_posted(one, url)) == "POST"
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(SiteFault):
        asyncio.run(one.open(f"{url}/"))
    for wrong in (
        "http://example.com",
        "https://127.0.0.1:8000",
        "http://10.0.0.1",
        "http://",
        "http://[",
    ):
        with pytest.raises(UserError, match=r"environment\.web\.site"):
            http_answer(wrong)


async def _posted(one: Session, url: str) -> str:
    await one.open(f"{url}/")
    return await one.type(1, "x", True)


def test_a_site_served_over_http() -> None:
    """A user may open the site in any browser."""
    import http.client

    server = SiteServer(Site(ORIGIN, wsgi_answer(Pages({"/": "<h1>Hello</h1>"}))))
    try:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=5)
        connection.request("GET", "/")
        assert b"Hello" in connection.getresponse().read()
        connection.request("GET", "http://evil.test/")
        assert connection.getresponse().status == 403
    finally:
        server.close()
    answer = server.answer(Request("GET", f"{ORIGIN}/none"))
    assert answer.status == 404
