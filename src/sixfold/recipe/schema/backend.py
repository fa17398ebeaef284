"""Settings of the program that samples: one class per kind."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from .base import DEVICES, Real, Section, knob

SGLANG = "http://127.0.0.1:30000"
"""Address at which SGLang listens by default."""
SIXFOLD = "http://127.0.0.1:8000"
"""Address at which `sixfold serve` listens by default."""
ADDRESS = "address of the server (by default SGLang's port 30000, or 8000 of sixfold serve)"
KEY_VARIABLE = "SIXFOLD_API_KEY"
"""Environment variable with the API key of a Sixfold server, for the server and its clients."""


def server_address(url: str) -> str:
    """URL of a server without a trailing slash.

    Raises:
        ValueError: if the scheme, the host or the port is missing.
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
    raise PydanticCustomError(
        "unsupported",
        "not the URL of a server. Did you mean '{meant}'?",
        {"meant": f"http://{meant}"},
    )


class EngineBackend(Section):
    """The embedded engine samples."""

    kind: Literal["engine"] = "engine"


class VllmBackend(Section):
    """vLLM samples, in a process that the run starts."""

    kind: Literal["vllm"] = "vllm"
    python: str = knob(
        "", "path of the Python interpreter that has vLLM (empty: the one that runs Sixfold)"
    )
    devices: str = knob(
        "",
        "numbers of the GPUs of the vLLM process, e.g. 1 or 1,2 (empty: the policy's GPU)",
        pattern=DEVICES,
    )
    tensor_parallel: int = knob(
        1,
        "number of GPUs that share each weight matrix; rollout.backend.devices must list as many",
        ge=1,
    )
    memory: Real = knob(
        0.0,
        "share of each GPU's memory that vLLM may use (0: enough for its weights and KV cache)",
        ge=0,
        le=1,
    )
    sleep: bool = knob(
        False, "move vLLM's weights to host memory and free its KV cache while the trainer works"
    )


class SglangBackend(Section):
    """An SGLang server that is already running samples."""

    kind: Literal["sglang"] = "sglang"
    url: Annotated[str, AfterValidator(server_address)] = knob(SGLANG, ADDRESS)


class SixfoldBackend(Section):
    """A running `sixfold serve` samples."""

    kind: Literal["sixfold"] = "sixfold"
    url: Annotated[str, AfterValidator(server_address)] = knob(SIXFOLD, ADDRESS)


Backend = EngineBackend | VllmBackend | SglangBackend | SixfoldBackend
