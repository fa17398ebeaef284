"""Start the samplers that [placement] asks for."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from ..backends.sampler_process import SamplerProcess
from ..backends.samplers import Publish, Sampler, Samplers, Start
from ..backends.weight_files import weights_file
from ..engine.speculative import Speculation
from ..model.empty import Architecture
from ..model.loading import Policy
from ..recipe.schema import EngineConfig, NgramSpeculation, RayPlacement, SamplersApart
from ..renderer.renderer import Renderer
from .sampler_worker import Setup

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

    Raises:
        EngineLost: if a process does not start.
        UserError: if the Ray cluster is not there or has too few resources.
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
    parts = (
        _on_ray(placement, setup, ending) if isinstance(placement, RayPlacement) else _here(setup)
    )
    samplers = Samplers(*parts, placement.samplers, placement.restarts, _say)
    ending.callback(samplers.close)
    return samplers


def _here(setup: Setup) -> tuple[Start, Publish]:
    """Processes on this machine."""

    def start(number: int) -> Sampler:
        return SamplerProcess(number, PROGRAM, setup, setup.threads, setup.silence_s)

    return start, weights_file


def _on_ray(placement: RayPlacement, setup: Setup, ending: ExitStack) -> tuple[Start, Publish]:
    """Actors of a Ray cluster."""
    from ..backends import ray_sampler
    from .sampler_actor import SamplerActor, versions

    gpus, silence_s = int(setup.device != "cpu"), setup.silence_s
    cluster = ray_sampler.reserved(
        placement.address, placement.samplers, placement.threads, gpus, silence_s
    )
    resources = ending.enter_context(cluster)
    if gpus:
        setup = replace(setup, device="cuda")  # Ray shows an actor its own GPUs only

    def start(number: int) -> Sampler:
        actor = partial(resources.start, SamplerActor, number, setup)
        return ray_sampler.RaySampler(number, actor, versions(), silence_s)

    return start, ray_sampler.stored_weights


def _say(line: str) -> None:
    print(f"WARNING: {line}", file=sys.stderr, flush=True)
