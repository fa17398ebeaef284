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


Url = Annotated[str, AfterValidator(server_address)]
_REPLICAS = knob(
    (), "addresses of further servers of the same model; all requests of a task go to one of them"
)
_RESTARTS = knob(
    0,
    "times in a run that a lost server is waited for, at most run.silence_s each; its requests are"
    " sampled again",
    ge=0,
)


class EngineBackend(Section):
    """The embedded engine samples."""

    kind: Literal["engine"] = "engine"


class VllmBackend(Section):
    """vLLM samples, in processes that the run starts: one, or those of [placement]."""

    kind: Literal["vllm"] = "vllm"
    python: str = knob(
        "", "path of the Python interpreter that has vLLM (empty: the one that runs Sixfold)"
    )
    devices: str = knob(
        "",
        "numbers of the GPUs of the vLLM process, or of all of them if placement.kind ="
        " 'processes', e.g. 1 or 1,2 (empty: the policy's GPU); with several ranks those of each"
        " machine",
        pattern=DEVICES,
    )
    tensor_parallel: int = knob(
        1,
        "number of GPUs of a process, which share each weight matrix; rollout.backend.devices must"
        " list as many for each",
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
    url: Url = knob(SGLANG, ADDRESS)
    replicas: tuple[Url, ...] = _REPLICAS
    restarts: int = _RESTARTS


class SixfoldBackend(Section):
    """A running `sixfold serve` samples."""

    kind: Literal["sixfold"] = "sixfold"
    url: Url = knob(SIXFOLD, ADDRESS)
    replicas: tuple[Url, ...] = _REPLICAS
    restarts: int = _RESTARTS


Backend = EngineBackend | VllmBackend | SglangBackend | SixfoldBackend
