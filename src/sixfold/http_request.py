"""Asynchronous HTTP requests. Each request has its own connection.

If a request is cancelled, its connection is closed, so the server can stop working on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HEADERS = 256


class Reply(NamedTuple):
    """Answer of a server to a request.

    Attributes:
        status: HTTP status.
        headers: header fields, by lower-case name.
        body: the body, without chunk headers.
    """

    status: int
    headers: dict[str, str]
    body: bytes


async def http_request(
    method: str, url: str, body: bytes, headers: Mapping[str, str], limit: int = 0
) -> Reply:
    """Send a request and return the answer.

    Args:
        method: HTTP method.
        url: address with scheme http or https.
        body: content of the request.
        headers: header fields besides Host, Content-Length and Connection.
        limit: maximum bytes of the body. 0: no limit.

    Raises:
        OSError: if the server cannot be reached, or closes the connection without an answer.
        asyncio.IncompleteReadError: if the connection ends in the middle of the body.
        ValueError: if the answer is not HTTP, or its body is longer than `limit`.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=True if secure else None
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2]
        head = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        head += [f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(head).encode() + body)
        await writer.drain()
        status = _status(await reader.readline())
        found = await _headers(reader)
        return Reply(status, found, await _body(reader, found, limit))
    finally:
        writer.close()


def _status(line: bytes) -> int:
    """Status code in the first line of an answer."""
    if not line:
        raise ConnectionError("the server closed the connection without an answer")
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/") or not code.isdigit():
        raise ValueError(f"the answer is not HTTP: {line[:60]!r}")
    return int(code)


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        found[name.strip().lower()] = value.strip()
        if len(found) > MAX_HEADERS:
            raise ValueError("the answer has too many header fields")
    return found


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str], limit: int) -> bytes:
    """Read the body: in chunks, by its Content-Length, or until the connection is closed."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader, limit)
    if "content-length" in headers:
        length = int(headers["content-length"])
        _check(length, limit)
        return await reader.readexactly(length)
    body = bytearray()
    while part := await reader.read(1 << 16):
        body += part
        _check(len(body), limit)
    return bytes(body)


async def _chunks(reader: asyncio.StreamReader, limit: int) -> bytes:
    body = bytearray()
    while size := int((await reader.readline()).partition(b";")[0], 16):
        _check(len(body) + size, limit)
        body += await reader.readexactly(size)
        await reader.readline()
    return bytes(body)


def _check(length: int, limit: int) -> None:
    if length < 0 or (limit and length > limit):
        raise ValueError(f"the answer has {length} bytes. At most {limit} are allowed")
