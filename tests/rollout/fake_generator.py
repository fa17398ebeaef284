"""A generator without a model: a token is a hash of everything that it may depend on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from torch import Tensor

from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import GeneratorClosed, Sampled, SampleKey
from sixfold.rollout.stop_watch import cut_at_stop
from sixfold.types import FinishReason, SamplingParams

Script = Callable[[Sequence[int], SamplingParams, SampleKey], Sequence[int]]


class FakeGenerator:
    """Samples one token per turn of the event loop.

    Args:
        renderer: decodes completions for stop strings. Needed if a call has stop strings.
        script: completion of each call, cut at stop tokens, stop strings and the token limit. None:
            a hash of the tokens so far, the version of the weights and the noise.
        vocabulary: upper bound of the ids of hashed tokens.
        context: maximum number of tokens of a prompt with its completion.
        max_running: maximum number of calls that are served at the same time.

    Attributes:
        version: version of the weights.
        calls: tokens, parameters and key of every call, in order.
        running: number of calls being served.
    """

    def __init__(
        self,
        renderer: Renderer | None = None,
        script: Script | None = None,
        *,
        vocabulary: int = 61,
        context: int = 4096,
        max_running: int = 1 << 30,
    ) -> None:
        self.version = 0
        self.calls: list[tuple[tuple[int, ...], SamplingParams, SampleKey]] = []
        self.running = 0
        self._renderer = renderer
        self._script = script
        self._vocabulary = vocabulary
        self._context = context
        self._max_running = max_running
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._closed = ""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        self._check_open()
        origin = len(tokens) if key.origin is None else key.origin
        if not tokens or params.max_tokens < 1 or not 0 <= origin <= len(tokens):
            raise ValueError(f"impossible request: {len(tokens)} tokens, {params}, {key}")
        if len(tokens) + params.max_tokens > self._context:
            raise ValueError(f"{len(tokens) + params.max_tokens} tokens exceed {self._context}")
        self.calls.append((tuple(tokens), params, key))
        script = None if self._script is None else list(self._script(tokens, params, key))
        await self._enter(priority)
        try:
            return await self._sample(list(tokens), params, key, origin, stops, script)
        finally:
            self._leave()

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        self._check_open()
        return [self._logp(tokens[:i], tokens[i]) for i in range(1, len(tokens))]

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        self._check_open()
        if version <= self.version:
            raise ValueError(f"version = {version} must be greater than {self.version}")
        self.version = version
        return self.running

    async def sleep(self) -> None:
        self._check_open()

    def close(self) -> None:
        self.fail("the generator is closed")

    def fail(self, reason: str) -> None:
        """End all calls with GeneratorClosed."""
        self._closed = self._closed or reason
        while self._queue:
            waiter = heappop(self._queue)[2]
            if not waiter.done():
                waiter.set_result(None)

    async def _sample(
        self,
        tokens: list[int],
        params: SamplingParams,
        key: SampleKey,
        origin: int,
        stops: Sequence[str],
        script: list[int] | None,
    ) -> Sampled:
        prompt, logp, version = len(tokens), [], []
        reason: FinishReason | None = None
        text: str | None = None
        while reason is None:
            await asyncio.sleep(0)
            self._check_open()
            if script is None:
                noise = (params.seed, key.name, key.sample, len(tokens) - origin)
                drawn = self._hash(tokens, noise if params.temperature > 0 else ()) % (
                    self._vocabulary
                )
            else:
                drawn = script[len(logp)]
            logp.append(self._logp(tokens, drawn))
            version.append(self.version)
            tokens.append(drawn)
            if drawn in params.stop_token_ids:
                reason = "stop"
            elif len(logp) == params.max_tokens or len(logp) == len(script or tokens):
                reason = "length"
            if stops:
                assert self._renderer is not None
                found = cut_at_stop(tokens[prompt:], self._renderer, stops)
                # Before the end, text that may become a stop string is held back.
                if found is not None:
                    reason, text = "stop", found[1]
        return Sampled(tokens[prompt:], logp, version, reason, 0, 0.0, text=text)

    def _logp(self, before: Sequence[int], token: int) -> float:
        return -(self._hash([*before, token], ()) % 1000 + 1) / 100

    def _hash(self, tokens: Sequence[int], noise: tuple[object, ...]) -> int:
        text = repr((self.version, tuple(tokens), noise))
        return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little")

    async def _enter(self, priority: int) -> None:
        if self.running >= self._max_running:
            waiter = asyncio.get_running_loop().create_future()
            heappush(self._queue, (-priority, len(self.calls), waiter))
            await waiter
            self._check_open()
        self.running += 1

    def _leave(self) -> None:
        self.running -= 1
        while self._queue and self.running < self._max_running:
            waiter = heappop(self._queue)[2]
            if not waiter.cancelled():
                waiter.set_result(None)
                return

    def _check_open(self) -> None:
        if self._closed:
            raise GeneratorClosed(self._closed)
