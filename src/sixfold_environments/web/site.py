"""The site of an episode, with limits on its responses.

Both backends send every request through `Site.fetch`. So both get the same error page from a site
that fails, hangs, sends too much or redirects without end. No address outside the site's origin is
requested.
"""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from .dom import words

HTML = "text/html; charset=utf-8"

MOST_THREADS = 64
"""Maximum number of requests that wait in threads at the same time. A site that hangs keeps its
thread.
"""

_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DROPPED = words(
    "cache-control connection content-disposition content-length content-type expires keep-alive"
    " refresh strict-transport-security transfer-encoding"
)


class SiteFault(Exception):
    """The site cannot be reached. This is a fault of the infrastructure, not of the policy."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        seconds: time limit of the whole response.
        size: maximum number of bytes of a response.
        redirects: maximum number of redirects in a row.
    """

    seconds: float = 5.0
    size: int = 2_000_000
    redirects: int = 10


@dataclass(frozen=True)
class Request:
    """A request to a site.

    Attributes:
        method: such as "GET".
        url: absolute address.
        headers: headers by lower-case name.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_page(self) -> bool:
        """True if the request is for a page, not for an image or a style sheet."""
        return "text/html" in self.headers.get("accept", "")


@dataclass(frozen=True)
class Response:
    """A response of a site.

    Attributes:
        headers: (lower-case name, value).
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def header(self, name: str) -> str:
        """The first header with a name, or ""."""
        return next((value for key, value in self.headers if key == name), "")

    @property
    def is_redirect(self) -> bool:
        """True if the response redirects the browser to another address."""
        return self.status in _REDIRECTS and bool(self.header("location"))


Answer = Callable[[Request, Limits], Response]
"""Sends a request to the site and blocks until it has the response.

Raises:
    TooLarge: if the response exceeds `Limits.size`.
    TimeoutError: if it takes longer than `Limits.seconds`.
    SiteFault: if the site cannot be reached. Any other exception counts as an error of the site.
"""


class TooLarge(Exception):
    """A response is larger than the limit."""


class Site:
    """A site with its limits.

    Args:
        origin: scheme, host and port of its addresses.
        answer: sends a request to the site.
        quick: True if the site answers at once. Requests then run without a thread.
    """

    def __init__(
        self, origin: str, answer: Answer, limits: Limits | None = None, *, quick: bool = False
    ) -> None:
        self.origin = origin_of(origin)
        self.limits = limits or Limits()
        self.quick = quick
        self._answer = answer
        self._redirects = 0

    def holds(self, url: str) -> bool:
        """True if an address belongs to the site."""
        return origin_of(url) == self.origin

    def fetch(self, request: Request) -> Response:
        """Send a request. Returns the response of the site, or an error page.

        Raises:
            SiteFault: if the site cannot be reached.
        """
        if not self.holds(request.url):
            return refusal(request.url)
        made = self._answer_safely(request)
        if not request.is_page:
            return replace(made, headers=_headers(made, made.header("content-type")))
        self._redirects = self._redirects + 1 if made.is_redirect else 0
        if self._redirects > self.limits.redirects:
            self._redirects = 0
            return error_page(508, f"more than {self.limits.redirects} redirects")
        return _page(made)

    def _answer_safely(self, request: Request) -> Response:
        limits = self.limits
        try:
            if self.quick:
                return self._answer(request, limits)
            return _in_thread(lambda: self._answer(request, limits), limits.seconds)
        except SiteFault:
            raise
        except TooLarge:
            return error_page(502, f"the answer has more than {limits.size} bytes")
        except (TimeoutError, LateError):
            return error_page(504, f"no answer within {limits.seconds:g} s")
        except Exception:  # noqa: BLE001  boundary: a site that fails is an observation
            return error_page(500, "the site failed")


def origin_of(url: str) -> str:
    """Scheme, host and port of an address, or "" if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return ""
    default = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{parts.hostname}:{port or default}"


def error_page(status: int, message: str) -> Response:
    """An error page with a message."""
    text = f"<!doctype html><title>Error</title><h1>Error</h1><p>{html.escape(message)}</p>"
    return Response(status, (("content-type", HTML),), text.encode())


def refusal(url: str) -> Response:
    """The error page for an address outside the site."""
    return error_page(403, f"refused: {origin_of(url) or 'this address'} is outside this site")


def _page(made: Response) -> Response:
    """Convert a response to an HTML page in UTF-8. Content that is not text is refused."""
    if made.is_redirect or made.status in (204, 205):
        return replace(made, headers=_headers(made, ""), body=b"")
    kind = made.header("content-type").partition(";")[0].strip().lower()
    if kind in ("", "text/html", "application/xhtml+xml"):
        text = decode_response(made)
    elif kind.startswith("text/") or kind in ("application/json", "application/xml"):
        text = f"<!doctype html><pre>{html.escape(decode_response(made))}</pre>"
    else:
        return error_page(415, f"{kind[:80]} is not a page")
    return replace(made, headers=_headers(made, HTML), body=text.encode(errors="replace"))


def _headers(made: Response, kind: str) -> tuple[tuple[str, str], ...]:
    """Headers without those of the connection. Caching is off: `back` requests the page again."""
    kept = [(name, value) for name, value in made.headers if name not in _DROPPED]
    shown = (("content-type", kind),) if kind else ()
    return (*kept, *shown, ("cache-control", "no-store"))


def decode_response(made: Response) -> str:
    """Decode a response by its byte order mark, header or meta element, or as UTF-8."""
    found = re.search(r"charset=[\"']?([\w.:-]+)", made.header("content-type"), re.IGNORECASE)
    charset = found.group(1) if found else ""
    if made.body.startswith(b"\xef\xbb\xbf"):
        charset = "utf-8-sig"
    elif not charset and (meta := _META_CHARSET.search(made.body[:1024])):
        charset = meta.group(1).decode("ascii", "replace")
    try:
        return made.body.decode(charset or "utf-8", "replace")
    except (LookupError, UnicodeError):  # UnicodeError: codecs such as idna cannot replace
        return made.body.decode("utf-8", "replace")


_threads = threading.BoundedSemaphore(MOST_THREADS)


def _in_thread(ask: Callable[[], Response], seconds: float) -> Response:
    """Run `ask` in a new thread, and wait at most `seconds` for its result."""
    if not _threads.acquire(timeout=seconds):
        raise SiteFault(f"{MOST_THREADS} requests to the site hang")
    done: Future[Response] = Future()

    def run() -> None:
        try:
            done.set_result(ask())
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            done.set_exception(error)
        finally:
            _threads.release()

    try:
        threading.Thread(target=run, name="site", daemon=True).start()
    except RuntimeError as error:
        _threads.release()
        raise SiteFault(f"no thread for a request to the site: {error}") from error
    return done.result(seconds)
