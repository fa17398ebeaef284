"""Set up an engine in another process: start vLLM or connect to a server, and send the weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..backends.sglang_server import SglangServer
from ..backends.sixfold_server import SixfoldServer
from ..backends.vllm_memory import memory_share, visible_devices
from ..backends.vllm_process import VllmProcess, vllm_config
from ..errors import UserError
from ..model.device import free_memory
from ..model.loading import Policy
from ..recipe.schema import EngineConfig, Recipe, SglangBackend, SixfoldBackend, VllmBackend
from ..recipe.schema.backend import KEY_VARIABLE
from ..renderer.renderer import Renderer
from ..rollout.generator import Generator, wait_for
from ..sizing.kv_cache import whole_blocks
from ..sizing.model_size import cached_numbers, model_size
from ..sync.sync import SyncError
from ..sync.versioned import VersionedSync, Wait
from ..trainer.parity import parity_limits
from .kv_size import reserved_bytes, text_config

VLLM_BLOCK = 128
"""Tokens per block of vLLM's KV cache on a CPU. Blocks are smaller on other devices."""


def start_remote_engine(
    recipe: Recipe,
    backend: VllmBackend | SglangBackend | SixfoldBackend,
    policy: Policy,
    renderer: Renderer,
    longest: int,
    ending: ExitStack,
    wait: Wait = wait_for,
) -> tuple[Generator, VersionedSync]:
    """Create the engine and its weight sync, and check that it computes what the policy computes.

    Args:
        recipe: the whole run.
        backend: which engine.
        policy: the trainer's model.
        renderer: decodes completions.
        longest: longest sequence, in tokens.
        ending: receives the callback that ends the engine.
        wait: runs a coroutine of the engine to its end.

    Raises:
        UserError: if the engine is not available, or if its log-probs differ.
    """
    config = vllm_config(policy.model.config, type(policy.model).__name__)
    dtype = torch.bfloat16 if recipe.run.precision == "bfloat16" else torch.float32
    reserved = partial(reserved_bytes, recipe, policy, text_config(policy.model), longest)
    engine: Generator
    if backend.kind == "sglang":
        engine = sglang = SglangServer(backend.url, config, dtype, renderer)
        wait(sglang.check())
    elif backend.kind == "sixfold":
        key = os.environ.get(KEY_VARIABLE, "")
        engine = server = SixfoldServer(backend.url, config, policy.tokenizer, key)
        wait(server.connect())
    else:
        engine = VllmProcess(
            config,
            dtype,
            _vllm_arguments(recipe.engine, backend, policy, longest, dtype, reserved),
            renderer,
            backend.python,
            torch.get_num_threads(),
            visible_devices(
                backend.devices, str(policy.model.device), os.environ.get("CUDA_VISIBLE_DEVICES")
            ),
            backend.sleep,
        )
    ending.callback(engine.close)
    limit = parity_limits(recipe.run.precision, str(policy.model.device), outside=True).mean
    sync = VersionedSync(policy.model, engine, recipe.sync.every, limit, longest, policy.lora, wait)
    try:
        sync.refresh()
    except SyncError as error:
        raise UserError(
            f"rollout.backend.kind = '{backend.kind}': {error}. This model cannot be trained with"
            " it: use 'engine'"
        ) from error
    return engine, sync


def _vllm_arguments(
    settings: EngineConfig,
    vllm: VllmBackend,
    policy: Policy,
    longest: int,
    dtype: torch.dtype,
    reserved: Callable[[], int],
) -> dict[str, Any]:
    """The [engine] settings as arguments of vLLM. reserved: as for `_memory_share`."""
    arguments: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": max(
            settings.prefill_tokens_per_step, settings.max_running, longest
        ),
        "enable_prefix_caching": settings.prefix_cache != "none",
    }
    if vllm.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = vllm.tensor_parallel
    if vllm.sleep:
        arguments["enable_sleep_mode"] = True
    config = text_config(policy.model)
    cached = cached_numbers(config, padded=True)
    if cached is not None:  # otherwise vLLM takes all free memory
        size = model_size(config)
        numbers = cached.numbers
        if size is not None and size.latent:  # vLLM caches latent attention compressed
            numbers = size.layers * (size.latent + size.rotary)
        asked = whole_blocks(settings.kv_tokens, VLLM_BLOCK)
        tokens = asked or settings.max_running * whole_blocks(longest, VLLM_BLOCK)
        # vLLM keeps one block empty, so ask for one more.
        arguments["kv_cache_memory_bytes"] = (
            (tokens + VLLM_BLOCK) * numbers * dtype.itemsize // vllm.tensor_parallel
        )
    kv = arguments.get("kv_cache_memory_bytes", 0)
    if share := _memory_share(vllm, policy, kv, dtype, reserved):
        arguments["gpu_memory_utilization"] = share
    return arguments


def _memory_share(
    vllm: VllmBackend, policy: Policy, kv: int, dtype: torch.dtype, reserved: Callable[[], int]
) -> float | None:
    """vLLM's share of its GPU's memory. None lets vLLM decide, as on a CPU.

    On the policy's GPU, the bytes that training has yet to allocate (`reserved`) are left free.
    """
    device = policy.model.device
    if vllm.memory:
        return vllm.memory
    own = bool(vllm.devices) and str(device.index or 0) not in vllm.devices.split(",")
    memory = free_memory(torch.device("cuda", int(vllm.devices.split(",")[0])) if own else device)
    if memory is None or (own and not kv):
        return None
    weights = (
        sum(p.numel() for p in policy.model.parameters()) * dtype.itemsize // vllm.tensor_parallel
    )
    # A sleeping vLLM frees its memory for training, so nothing is reserved for training then.
    training = 0 if own or vllm.sleep else reserved()
    return memory_share(*memory, weights, kv, training)
