"""Load a model and serve it over HTTP until a signal arrives (`sixfold serve`)."""

from __future__ import annotations

import gc
import logging
import socket
from dataclasses import fields
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import uvicorn
from starlette.types import ASGIApp
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.checkpoint.model_source import is_reward_model, model_folder
from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.device import resolve_device
from sixfold.model.loading import Policy, from_disk, vocabulary_hash
from sixfold.model.lora import read_adapter
from sixfold.model.stop_tokens import saved_stop_strings
from sixfold.recipe.adapter_folder import folder_hash
from sixfold.recipe.schema import ProcessScoringConfig, RewardScoringConfig
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.model import load_reward_model
from sixfold.reward_model.scorer import Scorer
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.rollout.engine_thread import EngineThread
from sixfold.rollout.kv_probe import check_int8_kv
from sixfold.run.sampling_model import (
    load_draft,
    load_for_sampling,
    sampling_dtype,
    stored_precision,
)
from sixfold_search.scorers import OutcomeScorer, load_scorer, scorer_folders

from .app import Served, make_app
from .connections import BoundedHeaders, listener
from .hosts import AllowedHosts, is_loopback
from .record import Recorder
from .requests import Limits
from .reward_app import ServedReward, make_reward_app
from .search import Searches
from .sessions import Sessions
from .structured import Grammars

if TYPE_CHECKING:
    from .verb import ServeOptions

log = logging.getLogger("sixfold_serving")

PROBES = 8
"""Number of texts, each sampled from one token, on which an int8 KV cache is tested."""


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code.

    uvicorn raises the signal again once everything is closed.
    """
    listening = listen(options.host, options.port)  # before loading: a port in use must fail fast
    host, port = listening.getsockname()[:2]
    if not options.api_key and not ip_address(host).is_loopback:
        _check_open_to_all(host, options)
    if is_reward_model(options.model):
        app, model = make_reward_served(options)
    else:
        policy = load_for_sampling(options.model, options.device, options.precision, "MODEL")
        app, model = make_app(make_served(policy, options)), policy.model
    config = uvicorn_config(app, options.grace)
    where = f"{model.device}{' in bfloat16' if model.dtype == torch.bfloat16 else ''}"
    print(
        f"serving '{options.name}' on {where} at"
        f" http://{f'[{host}]' if ':' in host else host}:{port}/v1",
        flush=True,
    )
    gc.collect()
    # Objects from imports and loading are never freed. Collecting them would pause every stream for
    # a quarter of a second.
    gc.freeze()
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _check_open_to_all(host: str, options: ServeOptions) -> None:
    """Raise UserError if other machines can reach the server without an API key.

    `insecure` allows it, but never together with weight updates.
    """
    if options.allow_weight_updates:
        raise UserError(
            f"--allow-weight-updates on {host}: anyone who can reach this machine could change the"
            " model; set an --api-key"
        )
    if not options.insecure:
        raise UserError(
            f"--host {options.host}: anyone who can reach this machine could use the model; set an"
            " --api-key, or give --insecure"
        )
    print(
        "warning: no --api-key is set: anyone who can reach this machine can use the model",
        flush=True,
    )


def make_reward_served(options: ServeOptions) -> tuple[ASGIApp, PreTrainedModel]:
    """The application of a reward model, and the model.

    Raises:
        UserError: if it cannot be loaded, or an option does not apply to it.
    """
    kept = {"model", "host", "port", "api_key", "insecure", "allow_host", "name", "device"}
    kept |= {"precision", "grace"}
    default = type(options)(model="")
    for field in fields(options):
        if field.name not in kept and getattr(options, field.name) != getattr(default, field.name):
            raise UserError(
                f"--{field.name.replace('_', '-')} has no effect: '{options.model}' is a reward"
                " model, which samples nothing. Remove it"
            )
    folder = model_folder(options.model, "MODEL", reward_model=True)
    device = resolve_device(options.device, "--device")
    stored = stored_precision(options.model, folder)
    dtype = sampling_dtype(options.precision, device, stored)
    model = load_reward_model(folder, device, dtype, "MODEL")
    identity = folder_hash(Path(folder)) if Path(folder).is_dir() else folder
    scorer = Scorer(model, RewardScoringConfig().max_tokens)
    served = ServedReward(options.name, scorer, identity, options.api_key, allowed_hosts(options))
    return make_reward_app(served), model.model


def allowed_hosts(options: ServeOptions) -> AllowedHosts | None:
    """Names that the Host header may have on a loopback address. None: any."""
    names = options.host, *options.allow_host
    return AllowedHosts(names) if is_loopback(options.host) else None


def uvicorn_config(app: ASGIApp, grace: int) -> uvicorn.Config:
    """Configure uvicorn.

    Args:
        grace: seconds that running requests get to finish when the server is stopped.
    """
    return uvicorn.Config(
        app,
        http=BoundedHeaders,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace,
        lifespan="on",
    )


def make_served(policy: Policy, options: ServeOptions) -> Served:
    """Put model, engine, recorder and limits together."""
    speculation = _speculation(policy, options)
    model, vocabulary = (
        CausalLM(policy.model),
        int(policy.model.config.get_text_config().vocab_size),
    )
    if options.kv_dtype == "int8":
        try:
            moved = check_int8_kv(model, [[i * vocabulary // PROBES] for i in range(PROBES)])
        except ValueError as error:
            raise UserError(f"--kv-dtype int8: {error}") from error
        print(
            f"int8 KV cache: log-probs move by at most {moved:.1g} nats on {PROBES} sampled texts",
            flush=True,
        )
    engine = Engine(
        model,
        kv_tokens=options.kv_tokens,
        max_running=options.max_running,
        kv_dtype=options.kv_dtype,
        speculation=speculation,
    )
    for name, path in options.adapter:
        if name in (options.name, *engine.adapters.names):
            raise UserError(
                f"--adapter {name}={path}: the name '{name}' is taken; choose another name"
            )
        folder = model_folder(path, f"--adapter {name}")
        engine.load_adapter(name, read_adapter(folder, policy.model))
    # A renderer is not shared between threads: each of these parts gets its own copy.
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    grammars = Grammars(renderer.copy(), vocabulary, policy.stop_token_ids)
    reader = renderer.copy()  # for the engine's thread
    recorder = Recorder(Path(options.record), reader) if options.record else None
    thread = EngineThread(engine, reader, options.max_queue)
    context = min(policy.context, options.kv_tokens)
    limits = Limits(vocabulary, context, options.max_tokens, renderer.longest_token)
    own_stops = saved_stop_strings(policy.model.generation_config)
    return Served(
        options.name,
        thread,
        renderer,
        (renderer.copy(), renderer.copy()),
        grammars,
        limits,
        Searches(thread, renderer.copy(), _scorer(options)),
        policy.stop_token_ids,
        options.api_key,
        allowed_hosts(options),
        tuple(engine.adapters.names),
        partial(_read_weights, policy.vocabulary_hash) if options.allow_weight_updates else None,
        own_stops,
        tuple(text for text in policy.stop_strings if text not in own_stops),
        recorder,
        Sessions(renderer.copy(), limits, recorder.reward) if recorder is not None else None,
    )


def _scorer(options: ServeOptions) -> OutcomeScorer | ProcessScorer | None:
    """The reward model that scores for searches, or None."""
    if not options.scorer:
        return None
    machine = RewardScoringConfig(
        device=options.device,
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
    )
    return load_scorer(scorer_folders(options.scorer), ProcessScoringConfig(), machine)


def _read_weights(vocabulary: str, path: str) -> dict[str, Tensor]:
    """Weights of a run, a checkpoint or a model folder."""
    try:
        there = Path(path).is_dir()
    except (OSError, ValueError):  # the name is too long or contains a zero byte
        there = False
    if not there:
        raise UserError("path: no such folder on the server's machine")
    try:
        model, tokenizer = from_disk(model_folder(path), "path")
    except UserError as error:
        log.warning("weights were not loaded: %s", error)
        raise UserError(
            "path: the folder contains no model that can be loaded; see the server's log"
        ) from error
    if vocabulary_hash(tokenizer) != vocabulary:
        raise UserError(
            f"path = '{path}': its tokenizer has another vocabulary than the served model"
        )
    return dict(model.named_parameters())


def _speculation(policy: Policy, options: ServeOptions) -> Speculation | None:
    """Speculation for the options, or None.

    Raises:
        UserError: if the draft model has another vocabulary or a shorter context than the model.
    """
    if not options.draft:
        return Speculation() if options.speculation == "ngram" else None
    precision = str(policy.model.dtype).removeprefix("torch.")
    draft = load_draft(options.draft, policy, precision, policy.context, "--draft")
    return Speculation(draft=CausalLM(draft))


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        UserError: if the address cannot be used.
    """
    try:
        return listener(host, port)
    except (OSError, OverflowError, TypeError, ValueError) as error:
        # Unknown address, port over 65535, invalid name.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"cannot listen on {host}:{port}: {reason or error}. Try another --host or --port"
        ) from error
