"""Parse `rollout.backend`, which names the program that samples. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ..errors import UserError, nearest

FORMS = "'engine', 'vllm', 'vllm:/path/to/python', 'sglang:http://host:port'"


@dataclass(frozen=True)
class Backend:
    """Program that samples.

    Attributes:
        kind: the program.
        python: Python interpreter that has vLLM. Empty: this one.
        url: URL of the SGLang server, without a trailing slash.
    """

    kind: Literal["engine", "vllm", "sglang"]
    python: str = ""
    url: str = ""


def parse_backend(text: str) -> Backend:
    """Parse the text of `rollout.backend`.

    Raises:
        UserError: if the text has none of FORMS. The message suggests the nearest valid form.
    """
    kind, colon, rest = text.partition(":")
    if kind == "engine" and not colon:
        return Backend("engine")
    if kind == "vllm" and bool(rest) == bool(colon):
        return Backend("vllm", python=rest)
    if kind == "sglang":
        return Backend("sglang", url=_server(text, rest))
    hint = (
        f" Did you mean '{kind}'?"
        if kind in ("engine", "vllm")
        else nearest(kind, ["engine", "vllm", "sglang"])
    )
    raise UserError(f"rollout.backend = '{text}' is none of {FORMS}.{hint}")


def _server(text: str, url: str) -> str:
    """Address of the server. It needs a host and a port.

    Raises:
        UserError: if either is missing.
    """
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # the port is not a number
        known = None
    if known:
        return url.rstrip("/")
    bare = url.removeprefix("http:").removeprefix("https:").strip("/")
    meant = bare if ":" in bare else f"{bare or '127.0.0.1'}:30000"
    raise UserError(
        f"rollout.backend = '{text}' names no server. Did you mean 'sglang:http://{meant}'?"
    )
