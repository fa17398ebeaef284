"""Send requests to a WSGI application in this process, or to a server on this machine."""

from __future__ import annotations

import http.client
import io
import ipaddress
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from sixfold.errors import UserError

from .site import Answer, Limits, Request, Response, SiteFault, TooLarge, origin_of

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_CHUNK = 65_536


def wsgi_answer(app: WsgiApp) -> Answer:
    """Make the function that sends requests to a WSGI application."""

    def answer(request: Request, limits: Limits) -> Response:
        status: list[str] = []
        headers: list[tuple[str, str]] = []
        written: list[bytes] = []

        def start_response(
            line: str,
            fields: list[tuple[str, str]],
            exc_info: tuple[type[BaseException], BaseException, TracebackType] | None = None,
        ) -> Callable[[bytes], None]:
            status[:], headers[:] = [line], fields
            return written.append

        chunks = app(_environ(request), start_response)
        try:
            body = _read(chunks, limits, written)
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
        fields = tuple((name.lower(), value) for name, value in headers)
        return Response(int(status[0].split()[0]), fields, body)

    return answer


def _environ(request: Request) -> dict[str, Any]:
    """Environment of a WSGI call (PEP 3333)."""
    parts = urlsplit(request.url)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(parts.path or "/").decode("latin-1"),
        "QUERY_STRING": parts.query,
        "SERVER_NAME": parts.hostname or "",
        "SERVER_PORT": str(parts.port or {"https": 443}.get(parts.scheme, 80)),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "HTTP_HOST": parts.netloc,
        "CONTENT_TYPE": request.headers.get("content-type", ""),
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": parts.scheme,
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in request.headers.items():
        if name not in ("content-type", "content-length", "host"):
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    return environ


def _read(chunks: Iterable[bytes], limits: Limits, written: list[bytes]) -> bytes:
    """Read the body. Raises TooLarge or TimeoutError at the limits."""
    ends, size, parts = time.monotonic() + limits.seconds, 0, written
    for chunk in chunks:
        size += len(chunk)
        parts.append(chunk)
        if size > limits.size:
            raise TooLarge
        if time.monotonic() > ends:
            raise TimeoutError
    body = b"".join(parts)
    if len(body) > limits.size:
        raise TooLarge
    return body


def http_answer(url: str) -> Answer:
    """Make the function that sends requests to a server on this machine.

    Raises:
        UserError: if the address is not on this machine.
    """
    check_loopback(url)
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80

    def answer(request: Request, limits: Limits) -> Response:
        ends = time.monotonic() + limits.seconds
        connection = http.client.HTTPConnection(host, port, timeout=limits.seconds)
        target = urlsplit(request.url)
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        try:
            connection.connect()
        except OSError as error:
            raise SiteFault(f"environment.web.site = {url!r} does not answer: {error}") from error
        try:
            connection.request(request.method, path, request.body or None, dict(request.headers))
            given = connection.getresponse()
            chunks: list[bytes] = []
            size = 0
            while chunk := given.read1(_CHUNK):
                chunks.append(chunk)
                size += len(chunk)
                if size > limits.size:
                    raise TooLarge
                if time.monotonic() > ends:
                    raise TimeoutError
            fields = tuple((name.lower(), value) for name, value in given.getheaders())
            return Response(given.status, fields, b"".join(chunks))
        finally:
            connection.close()

    return answer


def check_loopback(url: str) -> None:
    """Raise UserError unless the address is plain HTTP on this machine."""
    try:
        host = urlsplit(url).hostname or ""
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not (local and origin_of(url).startswith("http://")):
        raise UserError(
            f"environment.web.site = {url!r} is not an address of this machine. Use"
            " http://127.0.0.1:PORT, or module:app for a WSGI application"
        )
