"""Start the processes that sample, as [placement] says."""

from __future__ import annotations

import sys

import torch

from ..backends.sampler_process import SamplerProcess
from ..backends.samplers import Samplers
from ..engine.speculative import Speculation
from ..model.empty import Architecture
from ..model.loading import Policy
from ..recipe.schema import EngineConfig, NgramSpeculation, ProcessPlacement
from ..renderer.renderer import Renderer
from .sampler_worker import Setup

PROGRAM = "sixfold.run.sampler_worker"


def start_samplers(
    placement: ProcessPlacement,
    engine: EngineConfig,
    kv_tokens: int,
    policy: Policy,
    renderer: Renderer,
    autocast: torch.dtype | None,
    silence_s: float,
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

    Raises:
        EngineLost: if a process does not start.
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
    return Samplers(
        lambda number: SamplerProcess(number, PROGRAM, setup, placement.threads, silence_s),
        placement.samplers,
        placement.restarts,
        _say,
    )


def _say(line: str) -> None:
    print(f"WARNING: {line}", file=sys.stderr, flush=True)
