"""`sixfold serve MODEL`."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from ..recipe.schema.backend import KEY_VARIABLE
from .parsing import Options, VerbParser, add_device, at_least


def parser() -> VerbParser:
    """Arguments of the verb, in groups."""
    arguments = VerbParser("serve", "Serve a model over HTTP, with OpenAI's interface.")
    arguments.add_argument(
        "model", metavar="MODEL_OR_RUN", help="a run, a checkpoint, or a Hugging Face model"
    )
    _add_address(arguments.add_argument_group("address and access"))
    _add_model(arguments.add_argument_group("model"))
    _add_engine(arguments.add_argument_group("engine"))
    _add_requests(arguments.add_argument_group("requests"))
    return arguments


def _add_address(group: Options) -> None:
    """Options for where the server listens and who may use it."""
    group.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine only)",
    )
    group.add_argument(
        "--port",
        metavar="N",
        type=_port,
        default=8000,
        help="port to listen on; 0 takes any free port (default 8000)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default="",
        help=f"key that every request must send; safer in the variable {KEY_VARIABLE}",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="allow other machines to use the server without an API key",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="accept this name in the Host header, for a proxy on this machine; repeatable",
    )
    group.add_argument(
        "--allow-weight-updates",
        action="store_true",
        help="allow POST /v1/weights to load another checkpoint while the server runs",
    )


def _add_model(group: Options) -> None:
    """Options for what is served, on which device."""
    group.add_argument(
        "--name",
        metavar="NAME",
        default="",
        help="name of the model in requests (default: MODEL_OR_RUN as given)",
    )
    group.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        type=_named_folder,
        action="append",
        default=[],
        help="serve a LoRA adapter under this name; repeatable",
    )
    add_device(group)


def _add_engine(group: Options) -> None:
    """Options for the engine's memory and speed."""
    group.add_argument(
        "--kv-tokens",
        metavar="N",
        type=at_least(16),
        default=32768,
        help="size of the KV cache in tokens (default 32768)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="dtype of the KV cache: the model's dtype (auto) or int8 (default auto)",
    )
    group.add_argument(
        "--max-running",
        metavar="N",
        type=at_least(1),
        default=64,
        help="most completions sampled at the same time (default 64)",
    )
    group.add_argument(
        "--speculation",
        choices=("none", "ngram"),
        default="none",
        help="speculative decoding; ngram guesses tokens from repeated text (default none)",
    )
    group.add_argument(
        "--draft",
        metavar="MODEL_OR_RUN",
        default="",
        help="propose tokens with this smaller model, which has the same tokenizer",
    )


def _add_requests(group: Options) -> None:
    """Options for how requests are handled."""
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=at_least(1),
        default=1024,
        help="longest completion in tokens if the request sets no limit (default 1024)",
    )
    group.add_argument(
        "--max-queue",
        metavar="N",
        type=at_least(1),
        default=256,
        help="most prompts that may wait; further requests get status 429 (default 256)",
    )
    group.add_argument(
        "--record",
        metavar="FOLDER",
        default="",
        help="write every request and its completions to this folder, as trajectories for training",
    )
    group.add_argument(
        "--grace",
        metavar="SECONDS",
        type=at_least(0),
        default=10,
        help="time for running requests to finish when the server is stopped (default 10)",
    )


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


def run(argv: Sequence[str]) -> int:
    """Parse and serve."""
    given, _ = parser().parse(argv)
    if given.draft and given.speculation != "none":
        raise UserError(
            "sixfold serve: --draft and --speculation ngram both propose tokens; give one of them"
        )
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"sixfold serve needs {' and '.join(missing)}: pip install 'sixfold[serve]'"
        )
    from ..commands.serve import ServeOptions, serve_command

    return serve_command(
        ServeOptions(
            model=given.model,
            host=given.host,
            port=given.port,
            name=given.name or given.model,
            key=given.api_key or os.environ.get(KEY_VARIABLE, ""),
            max_queue=given.max_queue,
            record=Path(given.record) if given.record else None,
            max_tokens=given.max_tokens,
            kv_tokens=given.kv_tokens,
            kv_dtype=given.kv_dtype,
            max_running=given.max_running,
            speculation=given.speculation,
            draft=given.draft,
            device=given.device,
            precision=given.precision,
            grace=given.grace,
            adapters=tuple(given.adapter),
            allow_weight_updates=given.allow_weight_updates,
            allow_hosts=tuple(given.allow_host),
            insecure=given.insecure,
        )
    )
