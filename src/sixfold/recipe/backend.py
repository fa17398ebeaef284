"""Which program samples: the text of `rollout.backend`, read in this one place. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ..errors import UserError, nearest

FORMS = "'engine', 'vllm', 'vllm:/path/to/python', 'sglang:http://host:port'"


@dataclass(frozen=True)
class Backend:
    """kind: who samples. python: the interpreter that has vLLM, empty for this one. url: of the SGLang server, without a slash at its end."""

    kind: Literal["engine", "vllm", "sglang"]
    python: str = ""
    url: str = ""


def parse_backend(text: str) -> Backend:
    """`rollout.backend` in parts. Raises UserError, with the nearest right form, for anything else than one of FORMS."""
    kind, colon, rest = text.partition(":")
    if kind == "engine" and not colon:
        return Backend("engine")
    if kind == "vllm" and bool(rest) == bool(colon):
        return Backend("vllm", python=rest)
    if kind == "sglang":
        return Backend("sglang", url=_server(text, rest))
    hint = f" Did you mean '{kind}'?" if kind in ("engine", "vllm") else nearest(kind, ["engine", "vllm", "sglang"])
    raise UserError(f"rollout.backend = '{text}' is none of {FORMS}.{hint}")


def _server(text: str, url: str) -> str:
    """The server's address. A server is on some port of some host, so both must be there."""
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # a port that is no number
        known = None
    if known:
        return url.rstrip("/")
    bare = url.removeprefix("http:").removeprefix("https:").strip("/")
    meant = bare if ":" in bare else f"{bare or '127.0.0.1'}:30000"
    raise UserError(f"rollout.backend = '{text}' names no server. Did you mean 'sglang:http://{meant}'?")
