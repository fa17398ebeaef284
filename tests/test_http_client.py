"""The HTTP client, against servers and proxies on this machine that answer with given bytes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sixfold.http_client import HttpClient, Reply

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
NO_HOST = "http://judge.invalid/v1"
"""An address that only a proxy can resolve."""


class Server:
    """Answers the requests of all connections in order, the last answer again and again.

    Attributes:
        connections: number of connections so far.
        requests: heads of the requests so far.
        left: set when a client has closed a connection.
    """

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.requests: list[str] = []
        self.left = asyncio.Event()
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                _, _, length = head.lower().partition("content-length: ")
                await reader.readexactly(int(length.split()[0]) if length else 0)
                self.asked.set()
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer)
                await writer.drain()
                if b"Content-Length" not in answer and b"chunked" not in answer and answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[tuple[Server, str]]:
    """A server and its address. The answer b"" keeps the client waiting."""
    server = Server(*answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def answer_to(*answers: bytes, limit: int = 0, **headers: str) -> tuple[Reply, Server]:
    """One request, and the server that it was sent to."""

    async def ask() -> tuple[Reply, Server]:
        async with serving(*answers) as (server, url):
            return await HttpClient(limit).request("POST", f"{url}/a?b=c", b"{}", headers), server

    return asyncio.run(ask())


def test_a_request_and_its_answer() -> None:
    answer = b"HTTP/1.1 429 Wait\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply, server = answer_to(answer + b"2\r\nok\r\n1;x=y\r\n!\r\n0\r\n\r\n", Authorization="key")
    assert (reply.status, reply.headers["retry-after"], reply.body) == (429, "3", b"ok!")
    lines = server.requests[0].split("\r\n")
    assert lines[0] == "POST /a?b=c HTTP/1.1"
    assert {"Authorization: key", "Content-Length: 2", "Accept-Encoding: identity"} <= set(lines)


def test_requests_share_a_connection_that_is_closed_with_the_event_loop() -> None:
    client = HttpClient()

    async def ask(url: str) -> None:
        for _ in range(3):
            assert (await client.request("POST", url, b"{}", {})).body == b"ok"

    async def serve() -> None:
        async with serving(OK) as (server, url):
            await ask(url)
            assert (server.connections, len(server.requests)) == (1, 3)
            # An event loop of another thread does not use the connections of this one.
            await asyncio.to_thread(asyncio.run, ask(url))
            assert (server.connections, len(server.requests)) == (2, 6)
            await asyncio.wait_for(server.left.wait(), 10)
            await ask(url)
            assert (server.connections, len(server.requests)) == (2, 9)

    asyncio.run(serve())


def test_concurrent_requests_have_connections_of_their_own() -> None:
    async def ask() -> None:
        client = HttpClient()
        async with serving(OK) as (server, url):
            await asyncio.gather(*(client.request("POST", url, b"{}", {}) for _ in range(150)))
            assert (server.connections, len(server.requests)) == (150, 150)

    asyncio.run(ask())


def test_a_server_that_has_closed_an_idle_connection_gets_a_new_one() -> None:
    async def ask() -> None:
        client = HttpClient()
        async with serving(OK, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nlast", OK) as (
            server,
            url,
        ):
            bodies = [(await client.request("GET", url, b"", {})).body for _ in range(4)]
            assert bodies == [b"ok", b"last", b"ok", b"ok"] and server.connections == 2

    asyncio.run(ask())


def test_a_cancelled_request_closes_its_connection() -> None:
    async def ask() -> None:
        client = HttpClient()
        async with serving(b"", OK) as (server, url):
            asking = asyncio.create_task(client.request("POST", url, b"{}", {}))
            await server.asked.wait()
            asking.cancel()
            await asyncio.wait_for(server.left.wait(), 10)
            assert (await client.request("POST", url, b"{}", {})).body == b"ok"
            assert server.connections == 2

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n123456789",
            ValueError,
            "has 9 bytes. At most 8",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n123456789\r\n0\r\n\r\n",
            ValueError,
            "has 9 bytes. At most 8",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n123456789", ValueError, "has 9 bytes. At most 8"),
        (b"220 smtp.example ESMTP\r\n\r\n", ValueError, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", ValueError, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", ValueError, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-", OSError, "closed the connection without an answer"),
    ],
)
def test_answers_that_are_refused(answer: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        answer_to(answer, limit=8)


def test_an_answer_of_the_allowed_length() -> None:
    body = b"HTTP/1.1 200 OK\r\n\r\n12345678"
    assert answer_to(body, limit=8)[0].body == b"12345678"


def test_a_body_is_not_decompressed() -> None:
    """The limit of an answer counts the bytes that were sent."""
    sent = gzip.compress(b"0" * 10_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(sent)}\r\n\r\n"
    assert answer_to(head.encode() + sent)[0].body == sent


def fails(url: str, **headers: str) -> BaseException:
    with pytest.raises((OSError, ValueError)) as error:
        asyncio.run(HttpClient().request("GET", url, b"", headers))
    return error.value


def test_a_connection_that_breaks() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(cut, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            await HttpClient().request("GET", f"http://127.0.0.1:{port}", b"", {})

    with pytest.raises(OSError, match="closed the connection without an answer"):
        asyncio.run(ask())


def test_errors_have_the_reason_of_the_operating_system() -> None:
    refused = fails("http://127.0.0.1:9")
    assert isinstance(refused, OSError) and "Connect call failed ('127.0.0.1', 9)" in str(refused)
    assert isinstance(fails(NO_HOST), OSError) and str(fails(NO_HOST))
    for wrong in ("http://[::1", "judge.invalid", "ftp://judge.invalid"):
        assert str(fails(wrong))


@pytest.mark.parametrize("key", ["secret\nsecret", "secret\0", "secret\n", "s\u00e9cret"])
def test_a_key_is_not_in_the_text_of_an_error(key: str) -> None:
    with pytest.raises(ValueError) as error:
        answer_to(OK, Authorization=f"Bearer {key}")
    assert "cret" not in str(error.value) and error.value.__cause__ is None


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    """No redirect is followed, no cookie kept, and no credentials of the URL are sent."""

    async def ask() -> None:
        client = HttpClient()
        away = b"HTTP/1.1 302 X\r\nLocation: /b\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
        async with serving(away) as (server, url):
            named = url.replace("//", "//user:pass@")
            for _ in range(2):
                reply = await client.request("GET", named, b"", {"Authorization": "Bearer key"})
                assert reply.status == 302
            assert len(server.requests) == 2
            for head in server.requests:
                assert "cookie" not in head.lower() and "Authorization: Bearer key" in head

    asyncio.run(ask())


def through_proxy(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, urls: list[str], **variables: str
) -> tuple[list[Any], Server, str]:
    """Replies or errors of the requests, the proxy, and the address of a server on this machine."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    async def ask() -> tuple[list[Any], Server, str]:
        async with serving(answer) as (proxy, address), serving(OK) as (_, direct):
            for name, value in variables.items():
                monkeypatch.setenv(name, value.replace("PROXY", address.removeprefix("http://")))
            asked: list[Coroutine[Any, Any, Reply]] = [
                HttpClient().request("GET", url.replace("DIRECT", direct), b"", {}) for url in urls
            ]
            return await asyncio.gather(*asked, return_exceptions=True), proxy, direct

    return asyncio.run(ask())


def test_requests_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HTTP_PROXY": "http://me:secret@PROXY", "NO_PROXY": "example.invalid"}
    urls = [NO_HOST, "http://example.invalid/v1", "DIRECT"]
    (reply, outside, local), proxy, _ = through_proxy(monkeypatch, OK, urls, **variables)
    assert reply.body == local.body == b"ok" and isinstance(outside, OSError)
    assert len(proxy.requests) == 1
    assert proxy.requests[0].startswith(f"GET {NO_HOST} HTTP/1.1\r\nHost: judge.invalid\r\n")
    assert "Proxy-Authorization: Basic bWU6c2VjcmV0" in proxy.requests[0]


def test_https_requests_open_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n"
    variables = {"HTTPS_PROXY": "http://me:secret@PROXY"}
    urls = ["https://judge.invalid/v1"]
    (error,), proxy, _ = through_proxy(monkeypatch, refusal, urls, **variables)
    assert isinstance(error, OSError) and "407" in str(error) and "secret" not in str(error)
    assert proxy.requests[0].startswith("CONNECT judge.invalid:443 HTTP/1.1\r\n")


def test_a_proxy_of_an_unknown_kind_is_an_error_unless_the_server_is_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for address in ("socks5://me:secret@127.0.0.1:9", "gopher://me:secret@127.0.0.1:9"):
        (error, local), _, _ = through_proxy(
            monkeypatch, OK, [NO_HOST, "DIRECT"], ALL_PROXY=address
        )
        assert isinstance(error, (OSError, ValueError)) and "secret" not in str(error)
        assert local.body == b"ok"
