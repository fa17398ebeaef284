"""Start the samplers that [placement] asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..backends.sampler_process import SamplerProcess
from ..backends.samplers import Publish, Sampler, Samplers, Start
from ..backends.visible_gpus import visible_devices
from ..backends.vllm_process import START_S
from ..backends.weight_deltas import WeightFiles
from ..engine.speculative import Speculation
from ..errors import UserError
from ..model.empty import Architecture
from ..model.loading import Policy
from ..ranks import ALONE, Ranks
from ..recipe.schema import (
    EngineConfig,
    NgramSpeculation,
    ProcessPlacement,
    RayPlacement,
    SamplersApart,
)
from ..renderer.renderer import Renderer
from .sampler_worker import Setup
from .vllm_setup import VllmSetup

PROGRAM = "sixfold.run.sampler_worker"


def start_samplers(
    placement: SamplersApart,
    engine: EngineConfig,
    kv_tokens: int,
    policy: Policy,
    renderer: Renderer,
    autocast: torch.dtype | None,
    silence_s: float,
    ending: ExitStack,
    ranks: Ranks = ALONE,
) -> Samplers:
    """Start processes with engines for the policy. They have no weights yet.

    Args:
        placement: the processes.
        engine: settings of their engines.
        kv_tokens: tokens that each KV cache holds.
        policy: the trainer's model.
        renderer: decodes completions.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        silence_s: longest silence of a process, in seconds.
        ending: receives the callback that ends them.
        ranks: the ranks of the run. Each has samplers of its own.

    Raises:
        EngineLost: if a process does not start.
        UserError: if the Ray cluster is not there or has too few resources, or placement.devices
            lists other GPUs than the machine has, or too few or too many.
    """
    model, own = policy.plain, engine.speculation
    speculation = None
    if isinstance(own, NgramSpeculation):
        speculation = Speculation(own.tokens, None, own.shortest, own.longest)
    setup = Setup(
        architecture=Architecture.of(model),
        buffers={name: buffer.cpu() for name, buffer in model.named_buffers()},
        dtypes={name: parameter.dtype for name, parameter in model.named_parameters()},
        device=str(model.device),
        threads=placement.threads,
        engine=engine,
        kv_tokens=kv_tokens,
        autocast=autocast,
        speculation=speculation,
        renderer=renderer.copy(),
        silence_s=silence_s,
    )
    if isinstance(placement, RayPlacement) and ranks.size == 1:
        # Ray shows an actor its own GPUs only.
        placed = setup if setup.device == "cpu" else replace(setup, device="cuda")
        parts = on_ray(placement, placed, setup.device, silence_s, ending)
    else:
        whole_every, devices = 1, ""
        if isinstance(placement, ProcessPlacement):
            whole_every, devices = placement.whole_every, placement.devices
        gpus = _own_gpus(devices, setup.device, placement.samplers, ranks)
        parts = _here(setup, gpus, WeightFiles(4 * model.num_parameters(), whole_every), ranks)
    samplers = Samplers(*parts, placement.samplers, placement.restarts, warn, shared=ranks.size > 1)
    ending.callback(samplers.close)
    return samplers


def _own_gpus(devices: str, device: str, samplers: int, ranks: Ranks) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each process of this rank. None: unchanged.

    Args:
        devices: `placement.devices`.
        device: of the policy.
        samplers: processes of each rank.

    Raises:
        UserError: if the list is not one GPU for each process of this machine.
    """
    listed, rank, here = devices.split(","), 0, 1
    if ranks.size > 1:
        rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if devices and len(listed) != samplers * here:
        raise UserError(
            f"placement.devices = '{devices}' lists {len(listed)} GPUs, but the ranks of this"
            f" machine have {samplers * here} samplers ({here} x placement.samplers). List as many"
        )
    if device == "cpu":
        if devices and not ranks.rank:
            warn("placement.devices has no effect: the policy is on the CPU, as its samplers are")
        return [None] * samplers
    shares = listed[rank * samplers :][:samplers] if devices else [""] * samplers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [visible_devices(gpu, device, visible, "placement.devices") for gpu in shares]


def _here(
    setup: Setup, gpus: Sequence[str | None], files: WeightFiles, ranks: Ranks
) -> tuple[Start, Publish]:
    """Processes on this machine, which read these files and see these GPUs."""

    def start(number: int) -> Sampler:
        alone = gpus[number]
        own = setup if alone is None else replace(setup, device="cuda")
        return SamplerProcess(number, PROGRAM, own, own.threads, own.silence_s, alone)

    if ranks.size == 1:
        return start, files.publish
    return start, partial(_one_file, files, ranks)


@contextmanager
def _one_file(
    files: WeightFiles, ranks: Ranks, weights: Mapping[str, Tensor], version: int
) -> Iterator[str]:
    """As `WeightFiles.publish`: one file for all ranks of a machine, which gather together."""
    failure: Exception | None = None
    machine, path = os.environ.get("GROUP_RANK", os.uname().nodename), ""
    with ExitStack() as published:
        try:
            if os.environ["LOCAL_RANK"] == "0":
                path = published.enter_context(files.publish(weights, version))
            else:
                for _ in weights.values():
                    pass
        except Exception as error:  # noqa: BLE001  raised on all ranks
            failure = error
        ranks.agree(failure)
        places = ranks.gather((machine, path))
        yield next(path for where, path in places if where == machine and path)


def on_ray(
    placement: RayPlacement,
    setup: Setup | VllmSetup,
    device: str,
    silence_s: float,
    ending: ExitStack,
    gpus: int = 1,
) -> tuple[Start, Publish]:
    """Reserve resources of a Ray cluster for samplers.

    Returns:
        A function that starts the actor with a number, and one that passes weights to all actors.

    Args:
        placement: the cluster, and what each actor gets.
        setup: what they run.
        device: of the policy.
        silence_s: longest wait for them, in seconds.
        ending: receives the callback that gives up their resources.
        gpus: GPUs of each, if the policy is on one.

    Raises:
        UserError: if the cluster is not there or has too few resources.
    """
    try:
        from ..backends import ray_cluster, ray_sampler
    except ImportError as error:
        raise UserError(
            f"placement.kind = 'ray': {error}. Install the version of Ray that this release knows:"
            " pip install -U 'sixfold[ray]'"
        ) from error
    from .rank_agent import versions
    from .sampler_actor import SamplerActor

    if device != "cpu" and not placement.address:
        raise UserError(
            "placement.kind = 'ray' on a GPU needs placement.address: a cluster of the GPUs that"
            " the trainer leaves free, e.g. CUDA_VISIBLE_DEVICES=1,2,3 ray start --head"
        )
    cluster = ray_cluster.reserved(
        placement.address,
        placement.samplers,
        placement.threads,
        gpus * (device != "cpu"),
        silence_s,
    )
    resources = ending.enter_context(cluster)

    start_s = silence_s if isinstance(setup, Setup) else max(silence_s, START_S)

    def start(number: int) -> Sampler:
        actor = partial(resources.start, SamplerActor, number, setup)
        return ray_sampler.RaySampler(number, actor, versions(), silence_s, start_s)

    if isinstance(setup, Setup):
        return start, ray_sampler.stored_weights
    return start, partial(ray_sampler.stored_weights, dtype=setup.dtype, every_name=True)


def warn(line: str) -> None:
    """Print a warning for the user."""
    print(f"WARNING: {line}", file=sys.stderr, flush=True)
