"""Serve a site over HTTP on this machine, as a web server or as the proxy of a browser."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urljoin

from .site import Request, Response, Site, SiteFault, error_page, refusal

_MOST_BODY = 10_000_000
"""Maximum number of bytes of a request's body."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections that the browser has closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class SiteServer:
    """Serves a site on a free port of 127.0.0.1 until `close`.

    A browser may open the port, or use it as its proxy. As a proxy it answers only for the site's
    own origin, so no request of a page leaves this machine.

    Attributes:
        fault: the error if the site could not be reached, else None.
    """

    def __init__(self, site: Site) -> None:
        self.fault: SiteFault | None = None
        self._site = site
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="site server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)

    def answer(self, request: Request) -> Response:
        try:
            return self._site.fetch(request)
        except SiteFault as fault:
            self.fault = fault
            return error_page(502, "the site cannot be reached")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                if self._length() > _MOST_BODY:
                    self.close_connection = True  # the unread body is not the next request
                    message = f"the request has more than {_MOST_BODY} bytes"
                    self._reply(error_page(413, message))
                else:
                    self._reply(server.answer(self._request()))

            do_POST = do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

            def do_CONNECT(self) -> None:
                self._reply(refusal(f"https://{self.path}"))
                self.close_connection = True

            def _length(self) -> int:
                """Bytes of the request's body."""
                size = self.headers.get("content-length", "0")
                return int(size) if size.isdecimal() else 0

            def _request(self) -> Request:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(self._length())
                headers.pop("proxy-connection", None)
                headers["accept-encoding"] = "identity"
                return Request(self.command, urljoin(server._site.origin, self.path), headers, body)

            def _reply(self, given: Response) -> None:
                self.send_response(given.status)
                for name, value in given.headers:
                    self.send_header(name, value)
                self.send_header("content-length", str(len(given.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(given.body)

            def log_message(self, format: str, *args: object) -> None:
                """Write no log to standard error."""

        return Handler
