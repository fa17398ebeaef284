"""Asynchronous HTTP requests to one server, over connections that are kept alive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import ip_address
from typing import NamedTuple

import httpx2

from .errors import one_line

IDLE_S = 1.0
"""Longest time that a connection waits for its next request.

Servers end idle connections too, usually after 2 s (gunicorn) or 5 s (uvicorn). A request that is
sent at that moment gets no answer.
"""

RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529))
"""HTTP statuses after which a request is sent again."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Wait before the first retry, and the longest wait. The wait doubles with each retry."""

tls_settings = lru_cache(httpx2.create_ssl_context)  # reading the certificates takes 0.1 s


class Reply(NamedTuple):
    """Answer of a server to a request.

    Attributes:
        status: HTTP status.
        headers: header fields, by lower-case name.
        body: the body, as it was sent: without chunk headers, and not decompressed.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class HttpClient:
    """Sends requests to one server.

    If a request is cancelled, its connection is closed, so the server can stop working on it. The
    others are closed when the event loop ends. HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY are
    respected, but a server on this machine is never reached through a proxy. Redirects are not
    followed, and cookies are not kept.

    Args:
        limit: maximum bytes of the body of an answer. 0: no limit.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._clients: dict[asyncio.AbstractEventLoop, _Opened] = {}

    async def request(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply:
        """Send a request and return the answer.

        Args:
            method: HTTP method.
            url: address with scheme http or https.
            body: content of the request.
            headers: header fields besides Host and Content-Length.

        Raises:
            OSError: if the server or the proxy cannot be reached, or closes the connection before
                the end of its answer.
            ValueError: if the answer is not HTTP, or its body is longer than `limit`, or the
                address or a header field of the request is not valid.
        """
        try:
            client = await self._client(url)
            async with client.stream(
                method, url, content=body, headers=dict(headers), auth=_unchanged
            ) as answer:
                return Reply(answer.status_code, dict(answer.headers), await self._body(answer))
        except httpx2.LocalProtocolError:
            # Its text has the value of the header field, which may be a key.
            raise ValueError("a header field of the request is not valid") from None
        except httpx2.InvalidURL as error:
            raise ValueError(str(error)) from error
        except httpx2.RemoteProtocolError as error:
            if str(error).startswith(("Server disconnected", "peer closed")):
                raise ConnectionError(
                    "the server closed the connection without an answer"
                ) from error
            raise ValueError(f"the answer is not HTTP: {error}") from error
        except (httpx2.TransportError, ImportError) as error:  # ImportError: a SOCKS proxy
            raise OSError(_reason(error)) from error

    async def _body(self, answer: httpx2.Response) -> bytes:
        body = bytearray()
        async for part in answer.aiter_raw():
            body += part
            length = max(len(body), int(answer.headers.get("content-length", 0)))
            if self._limit and length > self._limit:
                raise ValueError(
                    f"the answer has {length} bytes. At most {self._limit} are allowed"
                )
        return bytes(body)

    async def _client(self, url: str) -> httpx2.AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # An event loop that ends closes its asynchronous generators.
            opened = self._open(loop, not _on_this_machine(url))
            self._clients[loop] = opened, await anext(opened)
        return self._clients[loop][1]

    async def _open(
        self, loop: asyncio.AbstractEventLoop, proxied: bool
    ) -> AsyncGenerator[httpx2.AsyncClient]:
        client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            verify=tls_settings(),
            trust_env=proxied,
            timeout=None,
            limits=httpx2.Limits(keepalive_expiry=IDLE_S),
        )
        try:
            yield client
        finally:
            del self._clients[loop]
            await client.aclose()


class NoReply(RuntimeError):
    """A server has given no usable answer after all attempts."""


class Patience(NamedTuple):
    """How long a caller waits for a server that fails.

    Attributes:
        retries: most repetitions of a request.
        request_s: time limit of one request, in seconds.
        total_s: time limit of all attempts, in seconds.
    """

    retries: int
    request_s: float
    total_s: float


async def request_again(
    client: HttpClient,
    method: str,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    server: str,
    patience: Patience,
    refusal: Callable[[Reply], str],
    repeating: Callable[[], None] = lambda: None,
) -> Reply:
    """Answer to a request, which is sent again while the server fails (`RETRIED`).

    Args:
        client: sends the request.
        method: HTTP method.
        url: address.
        body: content of the request.
        headers: as for `HttpClient.request`.
        server: the server in words, for error messages.
        patience: limits.
        refusal: error message for an answer.
        repeating: called before each repetition.

    Raises:
        NoReply: if all attempts fail.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience.total_s
    for attempt in range(patience.retries + 1):
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.75, 1.25)
        try:
            async with asyncio.timeout(patience.request_s):
                reply = await client.request(method, url, body, headers)
            if reply.status not in RETRIED:
                return reply
            problem = refusal(reply)
            wait = max(wait, _asked_wait(reply))
        except TimeoutError:
            problem = f"{server} did not answer within {patience.request_s:g} s"
        except (OSError, ValueError) as error:
            problem = f"no answer from {server}: {one_line(error)}"
        if attempt == patience.retries or loop.time() + wait > deadline:
            break
        repeating()
        await asyncio.sleep(wait)
    raise NoReply(f"{problem} ({attempt + 1} attempts)")


def _asked_wait(reply: Reply) -> float:
    """Seconds in the Retry-After header. 0 if it is missing or not a number."""
    try:
        return max(0.0, float(reply.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


_Opened = tuple[AsyncGenerator[httpx2.AsyncClient], httpx2.AsyncClient]


def _unchanged(request: httpx2.Request) -> httpx2.Request:
    """No credentials. httpx2 would take those of the URL, and overwrite the key with them."""
    return request


def _on_this_machine(url: str) -> bool:
    host = httpx2.URL(url).host
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _reason(error: BaseException) -> str:
    """Text of the operating system's error behind an error of httpx2, which often has none."""
    found: BaseException | None = error
    while found and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    while found and (cause := found.__cause__):  # one attempt per address of the host
        found = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
    return str(found or error)
