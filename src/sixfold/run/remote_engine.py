"""Set up an engine in another process: start vLLM or connect to a server, and send the weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..backends.samplers import Samplers
from ..backends.sglang_server import SglangServer
from ..backends.sixfold_server import SixfoldServer
from ..backends.visible_gpus import visible_devices
from ..backends.vllm_memory import memory_share
from ..backends.vllm_process import Published, VllmProcess, published, vllm_config
from ..backends.weight_files import FileForm, model_folder, streamed_file
from ..errors import UserError
from ..model.device import free_memory
from ..model.loading import Policy
from ..ranks import Ranks, together
from ..recipe.schema import (
    EngineConfig,
    Placement,
    ProcessPlacement,
    RayPlacement,
    Recipe,
    SamplersApart,
    SglangBackend,
    SixfoldBackend,
    VllmBackend,
)
from ..recipe.schema.backend import KEY_VARIABLE
from ..renderer.renderer import Renderer
from ..rollout.generator import Generator, wait_for
from ..sizing.kv_cache import whole_blocks
from ..sizing.model_size import cached_numbers, model_size
from ..sync.ranks import RanksSync
from ..sync.sync import SyncError
from ..sync.versioned import VersionedSync, Wait
from ..trainer.parity import parity_limits
from .checkpoint_form import checkpoint_form
from .kv_size import reserved_bytes, text_config
from .samplers import on_ray, warn
from .shared_generator import GeneratorOfRanks, SharedGenerator
from .vllm_setup import VllmSetup

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
    dtype = _dtype(recipe.run.precision)
    limit = parity_limits(recipe.run.precision, str(policy.model.device), outside=True).mean
    engine: Generator
    if isinstance(backend, VllmBackend):
        device, placement = policy.model.device, recipe.placement
        if isinstance(placement, RayPlacement):
            arguments = vllm_arguments(recipe.engine, backend, policy, longest, dtype, None)
            given = config, dtype, arguments, renderer, backend.python, placement.threads
            shards, silence_s = backend.tensor_parallel, recipe.run.silence_s
            on = placement, VllmSetup(*given), device.type, silence_s, ending, shards
            engine = Samplers(*on_ray(*on), placement.samplers, placement.restarts, warn, limit)
        else:
            reserved = partial(reserved_bytes, recipe, policy, text_config(policy.model), longest)
            of_model = dtype, policy, renderer, longest
            start = _vllm_start(recipe.engine, backend, *of_model, reserved)
            engine = _vllm(placement, backend, start, device, dtype, limit)
    else:
        engine = _server(backend, policy, config, dtype, renderer, limit, recipe.run.silence_s)
    ending.callback(engine.close)
    sync = VersionedSync(policy.model, engine, recipe.sync.every, limit, longest, policy.lora, wait)
    first_sync(sync, backend.kind)
    return engine, sync


def first_sync(sync: VersionedSync | RanksSync, kind: str) -> None:
    """Pass the weights to a new engine, and check that it computes what the policy computes.

    Args:
        kind: `rollout.backend.kind`.

    Raises:
        UserError: if its log-probs differ.
    """
    try:
        sync.refresh()
    except SyncError as error:
        raise UserError(
            f"rollout.backend.kind = '{kind}': {error}. This model cannot be trained with it: use"
            " 'engine'"
        ) from error


def start_vllm_of_ranks(
    placement: Placement,
    backend: VllmBackend,
    engine: EngineConfig,
    precision: Literal["float32", "bfloat16"],
    silence_s: float,
    policy: Policy,
    renderer: Renderer,
    longest: int,
    ending: ExitStack,
    ranks: Ranks,
) -> GeneratorOfRanks:
    """Start the vLLM processes of a machine, which its ranks share. They have no weights yet.

    The first rank of the machine starts them. All ranks must call this, before they shard the
    policy.

    Args:
        placement: how many processes.
        backend: settings of vLLM.
        engine: `[engine]`.
        precision: `run.precision`.
        silence_s: longest time without a sign of life, in seconds.
        policy: the trainer's model.
        renderer: decodes completions.
        longest: longest sequence, in tokens.
        ending: receives the callbacks that end them.
        ranks: the ranks of the run.

    Raises:
        UserError: if vLLM is not available, or lacks GPUs of its own.
    """
    dtype, device = _dtype(precision), policy.model.device
    count, threads, restarts = 1, torch.get_num_threads(), 0
    setting = "with placement.kind = 'local', restarts"
    if isinstance(placement, SamplersApart):
        count, threads, restarts = placement.samplers, placement.threads, placement.restarts
        setting = "placement.restarts"
    if device.type != "cpu":
        check_own_gpus(backend, isinstance(placement, RayPlacement), count)
    form = checkpoint_form(policy.plain)
    start = _vllm_start(engine, backend, dtype, policy, renderer, longest)

    def of_machine() -> SharedGenerator | None:
        if os.environ["LOCAL_RANK"] != "0":
            return None
        publish = partial(_streamed, form, dtype)
        limit = parity_limits(precision, str(device), outside=True).mean
        every = Samplers(
            lambda number: start(number, threads), publish, count, restarts, warn, limit, setting
        )
        ending.callback(every.close)
        shared = SharedGenerator(every)
        ending.callback(shared.close)
        return shared

    shared = together(ranks, of_machine)
    machine = os.environ.get("GROUP_RANK", os.uname().nodename)
    places = ranks.gather((machine, shared.path if shared else ""))
    path = next(path for where, path in places if where == machine and path)
    own = together(ranks, lambda: GeneratorOfRanks(path, silence_s, shared))
    ending.callback(own.close)
    return own


@contextmanager
def _streamed(
    form: FileForm, dtype: torch.dtype, weights: Mapping[str, Tensor], version: int
) -> Iterator[Published]:
    """As `published`, of weights that are gathered one after the other."""
    size = form.numbers * dtype.itemsize
    with streamed_file(size, weights, version, dtype=dtype, form=form) as path:
        yield Path(path).parent, {}


def check_own_gpus(backend: VllmBackend, by_ray: bool, count: int) -> None:
    """Check that vLLM has GPUs of its own beside those of the ranks.

    Args:
        backend: settings of vLLM.
        by_ray: Ray starts the ranks.
        count: vLLM processes of a machine.

    Raises:
        UserError: it has not.
    """
    if by_ray:
        raise UserError(
            "placement.kind = 'ray' with several ranks gives vLLM no GPUs. Start the ranks by"
            " torchrun, with placement.kind = 'local' or 'processes'"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    listed = backend.devices.split(",") if backend.devices else []
    needed = count * backend.tensor_parallel
    if not len({*listed}) == len(listed) == needed or any(int(gpu) < here for gpu in listed):
        raise UserError(
            f"rollout.backend.devices = '{backend.devices}' must list {needed} GPUs of each machine"
            f" for vLLM, beside the GPUs 0 to {here - 1} of its ranks"
        )


def _dtype(precision: str) -> torch.dtype:
    """Dtype of an engine outside."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def _vllm_start(
    engine: EngineConfig,
    backend: VllmBackend,
    dtype: torch.dtype,
    policy: Policy,
    renderer: Renderer,
    longest: int,
    reserved: Callable[[], int] = lambda: 0,
) -> Callable[[int, int], VllmProcess]:
    """Starts the vLLM process with a number and so many CPU threads. For `reserved` see
    `_memory_share`.
    """
    config = vllm_config(policy.model.config, type(policy.model).__name__)

    def arguments(own: VllmBackend) -> dict[str, Any]:
        return vllm_arguments(engine, own, policy, longest, dtype, reserved)

    return partial(_vllm_process, backend, config, dtype, arguments, renderer, policy)


def _server(
    backend: SglangBackend | SixfoldBackend,
    policy: Policy,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    renderer: Renderer,
    limit: float,
    silence_s: float,
) -> Generator:
    """The server, or several of them behind one generator.

    Args:
        backend: which servers.
        policy: the trainer's model.
        config: its configuration.
        dtype: dtype of an SGLang server.
        renderer: decodes completions.
        limit: largest mean difference between the scores of two servers, in nats.
        silence_s: longest wait for a lost server, in seconds.
    """
    urls = [backend.url, *backend.replicas]
    reached = set[int]()

    def start(number: int) -> SglangServer | SixfoldServer:
        patience_s = silence_s if number in reached else 0.0  # the first time, a user waits
        reached.add(number)
        if isinstance(backend, SglangBackend):
            return SglangServer(urls[number], config, dtype, renderer, patience_s)
        key = os.environ.get(KEY_VARIABLE, "")
        return SixfoldServer(urls[number], config, policy.tokenizer, key, patience_s)

    if not backend.replicas and not backend.restarts:
        only = start(0)
        only.ready()
        return only
    if isinstance(backend, SglangBackend):
        publish = partial(model_folder, dtype=dtype, parts=[config])
    else:
        publish = partial(model_folder, dtype=torch.float32, parts=[config, policy.tokenizer])
    setting = "rollout.backend.restarts"
    return Samplers(start, publish, len(urls), backend.restarts, warn, limit, setting)


def _vllm(
    placement: Placement,
    backend: VllmBackend,
    start: Callable[[int, int], VllmProcess],
    device: torch.device,
    dtype: torch.dtype,
    limit: float,
) -> Generator:
    """The vLLM process, or several of them behind one generator.

    Args:
        placement: the processes.
        backend: settings of vLLM.
        start: starts the process with a number. It has so many CPU threads.
        device: device of the policy.
        dtype: dtype of the engines.
        limit: largest mean difference between the scores of two processes, in nats.
    """
    if isinstance(placement, ProcessPlacement) and device.type != "cpu" and not backend.devices:
        raise UserError(
            "placement.kind = 'processes' with rollout.backend.kind = 'vllm' on a GPU needs"
            " rollout.backend.devices: list the GPUs of the vLLM processes, e.g. '1,2'"
        )
    if not isinstance(placement, ProcessPlacement):
        only = start(0, torch.get_num_threads())
        only.ready()
        return only
    publish = partial(published, dtype=dtype, shards=backend.tensor_parallel)
    return Samplers(
        lambda number: start(number, placement.threads),
        publish,
        placement.samplers,
        placement.restarts,
        warn,
        limit,
    )


def _vllm_process(
    backend: VllmBackend,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    arguments: Callable[[VllmBackend], dict[str, Any]],
    renderer: Renderer,
    policy: Policy,
    number: int,
    threads: int,
) -> VllmProcess:
    """Start a vLLM process, on its share of the GPUs that the backend lists.

    Args:
        backend: settings of vLLM.
        config: configuration of the policy.
        dtype: dtype of the engine.
        arguments: returns arguments of `vllm.LLM`, for a backend that lists only this share.
        renderer: decodes completions.
        policy: the trainer's model.
        number: number of the process.
        threads: its CPU threads.
    """
    shards = backend.tensor_parallel
    share = backend.devices.split(",")[number * shards :][:shards]
    own = backend.model_copy(update={"devices": ",".join(share)})
    device, visible = str(policy.model.device), os.environ.get("CUDA_VISIBLE_DEVICES")
    return VllmProcess(
        config,
        dtype,
        arguments(own),
        renderer,
        backend.python,
        threads,
        visible_devices(own.devices, device, visible, "rollout.backend.devices"),
        backend.sleep,
    )


def vllm_arguments(
    settings: EngineConfig,
    vllm: VllmBackend,
    policy: Policy,
    longest: int,
    dtype: torch.dtype,
    reserved: Callable[[], int] | None,
) -> dict[str, Any]:
    """The [engine] settings as arguments of vLLM.

    Args:
        settings: `[engine]`.
        vllm: settings of vLLM.
        policy: the trainer's model.
        longest: longest sequence, in tokens.
        dtype: dtype of the engine.
        reserved: as for `_memory_share`. None: Ray chooses the GPUs, so vLLM computes its share.
    """
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
    own = vllm.memory if reserved is None else _memory_share(vllm, policy, kv, dtype, reserved)
    if own:
        arguments["gpu_memory_utilization"] = own
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
