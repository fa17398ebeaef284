"""`sixfold serve MODEL`: its options, and what can be checked before torch is imported."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Literal

from sixfold.cli.parsing import (
    DEVICE_HELP,
    PRECISION_HELP,
    Device,
    NonNegativeInt,
    PositiveInt,
    Precision,
    VerbParser,
    argument,
    at_least,
    option,
)
from sixfold.errors import UserError
from sixfold.recipe.schema.backend import KEY_VARIABLE

PURPOSE = "serve a model with an OpenAI-compatible HTTP API"


def _port(text: str) -> int:
    port = at_least(0)(text)
    if port > 65535:
        raise ArgumentTypeError(f"expected a port from 0 to 65535, got '{text}'")
    return port


def _named_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ArgumentTypeError(f"expected NAME=FOLDER, got '{text}'")
    return name, folder


NamedFolder = Annotated[tuple[str, str], _named_folder, "NAME=FOLDER"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: str = argument("a run, a checkpoint, or a Hugging Face model", metavar="MODEL_OR_RUN")
    host: str = option(
        "address to listen on (default 127.0.0.1: this machine only)",
        "127.0.0.1",
        metavar="ADDRESS",
        group="address and access",
    )
    port: Annotated[int, _port, "N"] = option(
        "port to listen on; 0 takes any free port (default 8000)", 8000
    )
    api_key: str = option(
        f"key that every request must send; safer in the variable {KEY_VARIABLE}", "", metavar="KEY"
    )
    insecure: bool = option("allow other machines to use the server without an API key", False)
    allow_host: tuple[str, ...] = option(
        "accept this name in the Host header, for a proxy on this machine; repeatable",
        (),
        action="append",
        metavar="NAME",
    )
    allow_weight_updates: bool = option(
        "allow POST /v1/weights to load another checkpoint while the server runs", False
    )
    name: str = option(
        "name of the model in requests (default: MODEL_OR_RUN as given)", "", group="model"
    )
    adapter: tuple[NamedFolder, ...] = option(
        "serve a LoRA adapter under this name; repeatable", (), action="append"
    )
    device: Device = option(DEVICE_HELP, "auto")
    precision: Precision = option(PRECISION_HELP, "auto")
    kv_tokens: Annotated[int, at_least(16), "N"] = option(
        "size of the KV cache in tokens (default 32768)", 32768, group="engine"
    )
    kv_dtype: Literal["auto", "int8"] = option(
        "dtype of the KV cache: the model's dtype (auto) or int8 (default auto)", "auto"
    )
    max_running: PositiveInt = option("most completions sampled at the same time (default 64)", 64)
    speculation: Literal["none", "ngram"] = option(
        "speculative decoding; ngram guesses tokens from repeated text (default none)", "none"
    )
    draft: str = option(
        "propose tokens with this smaller model, which has the same tokenizer",
        "",
        metavar="MODEL_OR_RUN",
    )
    max_tokens: PositiveInt = option(
        "longest completion in tokens if the request sets no limit (default 1024)",
        1024,
        group="requests",
    )
    max_queue: PositiveInt = option(
        "most prompts that may wait; further requests get status 429 (default 256)", 256
    )
    scorer: str = option(
        "outcome or process reward model that chooses among completions, for requests with best_of"
        " or search; POLICY,REFERENCE: an implicit process reward model",
        "",
        metavar="MODEL",
    )
    record: str = option(
        "write every request and its completions to this folder, as trajectories for training",
        "",
        metavar="FOLDER",
    )
    grace: NonNegativeInt = option(
        "time for running requests to finish when the server is stopped (default 10)",
        10,
        metavar="SECONDS",
    )


PARSER = VerbParser("serve", "Serve a model over HTTP, with OpenAI's interface.", ServeOptions)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    if given.draft and given.speculation != "none":
        raise UserError(
            "sixfold serve: --draft and --speculation ngram both propose tokens; give one of them"
        )
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"sixfold serve needs {' and '.join(missing)}: pip install 'sixfold[serve]'"
        )
    from .serve import serve

    key = given.api_key or os.environ.get(KEY_VARIABLE, "")
    return serve(replace(given, name=given.name or given.model, api_key=key))
