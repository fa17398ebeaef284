"""An update that is torn, altered or out of order is refused, and the old weights stay in force."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_programs import fork_programs
from torch import Tensor

from sixfold.backends.sampler_process import SamplerProcess
from sixfold.backends.weight_deltas import WeightFiles
from sixfold.backends.weight_files import sealed_bytes, streamed_file
from sixfold.model.empty import Architecture
from sixfold.model.loading import Policy
from sixfold.recipe.schema import EngineConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import SampleKey
from sixfold.run.sampler_actor import SamplerActor
from sixfold.run.sampler_worker import Setup
from sixfold.types import SamplingParams

TOKENS = [7, 9, 11, 6, 30, 8]
Weights = dict[str, Tensor]


def flipped(data: bytes) -> bytes:
    """One bit of a mantissa in the last tensor."""
    return data[:-4] + bytes([data[-4] ^ 1]) + data[-3:]


def truncated(data: bytes) -> bytes:
    return data[:-4]


def exchanged(data: bytes) -> bytes:
    """The first two tensors of the same shape have each other's names."""
    name = "self_attn.%s_proj.weight"
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = data[:start]
    for old, new in (("k", "X"), ("v", "k"), ("X", "v")):
        header = header.replace((name % old).encode(), (name % new).encode())
    return header + data[start:]


FAULTS: list[tuple[Callable[[bytes], bytes], int, int, str]] = [
    (flipped, 5, 5, "weights of version 5 are torn or altered: '.*' differs from its checksum"),
    (truncated, 5, 5, "weights of version 5 are torn or altered"),
    (lambda data: data[:4], 5, 5, "weights of version 5 are torn or altered"),
    (lambda data: data, 4, 5, "weights of version 5 were announced, but 4 arrived"),
    (lambda data: data, 4, 4, "version = 4 must be greater"),
    (lambda data: data, 3, 3, "version = 3 must be greater"),
]
"""(fault, version of the weights, announced version, refusal)."""


class OfProcess:
    """Weights are a file, announced over a pipe."""

    def __init__(self, setup: Setup) -> None:
        self.sampler = SamplerProcess(0, "sixfold.run.sampler_worker", setup, 1, 60.0)
        self.sampler.ready()
        self.close = self.sampler.close

    async def stage(
        self, weights: Weights, version: int, announced: int, fault: Callable[[bytes], bytes]
    ) -> None:
        with streamed_file(1 << 20, weights, version) as path:
            Path(path).write_bytes(fault(Path(path).read_bytes()))
            await self.sampler.stage(path, announced)

    async def ask(self, what: str, *given: Any) -> Any:
        return await getattr(self.sampler, what)(*given)


class OfChanges(OfProcess):
    """As of a process. Only the first file is whole."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.files, self.used = WeightFiles(1 << 20, 9), ExitStack()

    async def stage(
        self, weights: Weights, version: int, announced: int, fault: Callable[[bytes], bytes]
    ) -> None:
        with ExitStack() as published:
            path = published.enter_context(self.files.publish(weights, version))
            Path(path).write_bytes(fault(Path(path).read_bytes()))
            await self.sampler.stage(path, announced)
            self.used.callback(published.pop_all().close)


class OfActor:
    """Weights are an object of Ray's store: bytes. The actor runs without Ray."""

    def __init__(self, setup: Setup) -> None:
        self.sampler = SamplerActor(setup)

    async def stage(
        self, weights: Weights, version: int, announced: int, fault: Callable[[bytes], bytes]
    ) -> None:
        await self.sampler.stage(fault(sealed_bytes(weights, version)), announced)

    async def ask(self, what: str, *given: Any) -> Any:
        if what == "generate":
            names = ("tokens", "params", "key")
            await self.sampler.submit([{"id": 1, **dict(zip(names, given, strict=True))}])
            what, given = "result", (1,)
        return (await getattr(self.sampler, what)(*given))[0]

    def close(self) -> None:
        self.sampler._generator.close()


@contextmanager
def started(transport: Any, policy: Policy) -> Iterator[Any]:
    model = policy.model
    setup = Setup(
        Architecture.of(model),
        dict(model.named_buffers()),
        {name: p.dtype for name, p in model.named_parameters()},
        "cpu",
        1,
        EngineConfig(),
        128,
        None,
        None,
        Renderer(policy.tokenizer, policy.stop_token_ids),
        60.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        sampler = transport(setup)
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.mark.parametrize("transport", [OfProcess, OfChanges, OfActor])
def test_a_damaged_update_is_refused(transport: Any, policy: Policy) -> None:
    """R-180, R-182. The order of versions is enforced too."""
    old = {name: p.detach() for name, p in policy.model.named_parameters()}
    new = {name: p if "embed" in name else p * 1.5 for name, p in old.items()}
    params = SamplingParams(max_tokens=4, seed=1)

    async def play(sampler: Any) -> None:
        await sampler.stage(old, 4, 4, lambda data: data)
        await sampler.ask("swap", 4)
        before = await sampler.ask("score", TOKENS, 1.0)
        for fault, version, announced, refusal in [*FAULTS, (exchanged, 5, 5, "checksum")]:
            with pytest.raises(ValueError, match=refusal):
                await sampler.stage(new, version, announced, fault)
            with pytest.raises(ValueError, match=f"version {announced} have not been staged"):
                await sampler.ask("swap", announced)
        await sampler.stage(new, 6, 6, lambda data: data)
        with pytest.raises(ValueError, match="version 7 have not been staged"):
            await sampler.ask("swap", 7)
        assert await sampler.ask("score", TOKENS, 1.0) == before
        sampled = await sampler.ask("generate", TOKENS, params, SampleKey("t"))
        assert set(sampled.version) == {4}
        await sampler.stage(new, 6, 6, lambda data: data)
        await sampler.ask("swap", 6)
        after = await sampler.ask("score", TOKENS, 1.0)
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 1e-3

    with started(transport, policy) as sampler, torch.no_grad():
        asyncio.run(play(sampler))
