"""`sixfold serve MODEL`."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from .parsing import VerbParser, add_device, at_least

KEY_VARIABLE = "SIXFOLD_API_KEY"


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser("serve", "Answer OpenAI-compatible requests for a model.")
    arguments.add_argument(
        "model", metavar="MODEL_OR_RUN", help="a run, a checkpoint, or a Hugging Face model"
    )
    arguments.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="where to listen (default 127.0.0.1: this machine only)",
    )
    arguments.add_argument(
        "--insecure",
        action="store_true",
        help="listen on an address that other machines reach, without an API key",
    )
    arguments.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name by which a proxy on this machine may ask (Host header); repeatable",
    )
    arguments.add_argument(
        "--port", metavar="N", type=_port, default=8000, help="0: any free one (default 8000)"
    )
    arguments.add_argument(
        "--name",
        metavar="NAME",
        default="",
        help="what requests call the model (default: MODEL_OR_RUN as given)",
    )
    arguments.add_argument(
        "--api-key",
        metavar="KEY",
        default="",
        help=f"ask every request for it; better in the variable {KEY_VARIABLE}",
    )
    arguments.add_argument(
        "--max-queue",
        metavar="N",
        type=at_least(1),
        default=256,
        help="prompts that may wait; beyond it: 429 (default 256)",
    )
    arguments.add_argument(
        "--record",
        metavar="FOLDER",
        default="",
        help="keep every exchange there, as trajectories that can be trained on",
    )
    arguments.add_argument(
        "--max-tokens",
        metavar="N",
        type=at_least(1),
        default=1024,
        help="of a completion that names no limit (default 1024)",
    )
    arguments.add_argument(
        "--kv-tokens",
        metavar="N",
        type=at_least(16),
        default=32768,
        help="tokens that the KV cache holds (default 32768)",
    )
    arguments.add_argument(
        "--kv-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="of the KV cache: the model's own, or int8 (default auto)",
    )
    arguments.add_argument(
        "--max-running",
        metavar="N",
        type=at_least(1),
        default=64,
        help="completions sampled together (default 64)",
    )
    arguments.add_argument(
        "--speculation",
        choices=("none", "ngram"),
        default="none",
        help="guess tokens from what the text repeats; same tokens (default none)",
    )
    arguments.add_argument(
        "--draft",
        metavar="MODEL_OR_RUN",
        default="",
        help="guess tokens with this smaller model, of the same tokenizer",
    )
    add_device(arguments)
    arguments.add_argument(
        "--grace",
        metavar="SECONDS",
        type=at_least(0),
        default=10,
        help="for running requests to end when stopped (default 10)",
    )
    arguments.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        type=_named_folder,
        action="append",
        default=[],
        help="a LoRA adapter, asked for by its name; repeatable",
    )
    arguments.add_argument(
        "--allow-weight-updates",
        action="store_true",
        help="let POST /v1/weights load another checkpoint while it serves",
    )
    return arguments


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
            "sixfold serve: --draft and --speculation ngram are two ways to guess; give one of them"
        )
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"sixfold serve needs {' and '.join(missing)}: pip install 'sixfold[serve]'"
        )
    from ..run.serve import ServeOptions, serve_command

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
