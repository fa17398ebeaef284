"""Contract of generators: from token ids to sampled token ids, for many callers at once.

A generator owns an inference engine. Rollout, evaluation, the server, `sixfold generate` and the
checks of an engine all sample through this contract, so they work with every engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..errors import UserError
from ..types import FinishReason, Kept, Routes, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class SampleKey:
    """Name of the sampling noise of one sequence, together with `SamplingParams.seed`.

    The noise of a token depends on the seed, the name, the sample index and the position of the
    token relative to `origin`. Later turns of an episode keep the `origin` of the first turn, so
    each position draws its own noise, and a replay of the same tokens draws the same noise.

    Attributes:
        name: name of the task.
        sample: index of the sample within the task.
        origin: position of the first token that has noise. None: the length of the given tokens.
    """

    name: str
    sample: int = 0
    origin: int | None = None

    def offset(self, tokens: int) -> int:
        """Position of the next token relative to the origin.

        Args:
            tokens: number of given tokens.

        Raises:
            ValueError: the origin is not within the given tokens.
        """
        origin = tokens if self.origin is None else self.origin
        if not 0 <= origin <= tokens:
            raise ValueError(
                f"origin = {origin}: there are {tokens} tokens. Give the length of the episode's"
                " first prompt"
            )
        return tokens - origin


@dataclass(frozen=True)
class Peers:
    """Calls that were sampled as one request, at the moment when one of them ended.

    Attributes:
        count: number of calls.
        ended: number of calls that had ended, including the one that just did.
        floor: smallest number of tokens that any of the others had sampled. 0: unknown.
    """

    count: int = 1
    ended: int = 1
    floor: int = 0


ALONE = Peers()
"""A call whose peers are unknown."""


@dataclass(frozen=True)
class Sampled:
    """One completion. `tokens`, `logp` and `version` have the same length.

    Attributes:
        tokens: sampled token ids, including the stop token.
        logp: log-prob of each token under the distribution that it was sampled from.
        version: version of the weights that sampled each token, as reported by the engine.
        finish_reason: why sampling ended.
        reused: prompt tokens that came from the prefix cache.
        seconds: time from admission to the last token.
        kept: kept set of each token under truncated sampling, or None.
        text: the completion as text if a stop string ended it; the text ends before the stop
            string. None: decode the tokens.
        peers: the calls that were sampled together with this one.
        routes: experts that computed each token of prompt and completion. None unless the engine
            records them.
        started: time of admission (`time.perf_counter()`). 0: unknown.
        sampler: number of the process that sampled it.
    """

    tokens: list[int]
    logp: list[float]
    version: list[int]
    finish_reason: FinishReason
    reused: int
    seconds: float
    kept: Kept | None = None
    text: str | None = field(default=None, compare=False)
    peers: Peers = field(default=ALONE, compare=False)
    routes: Routes | None = None
    started: float = field(default=0.0, compare=False)
    sampler: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Activity:
    """Counters of an engine since it was made.

    Attributes:
        made: when it was made (`time.perf_counter()`, as all times).
        at: when the counters were read.
        busy_s: seconds in which the engine computed, because a request was open. Weight loads and
            other commands between its steps do not count.
        tokens: sampled tokens.
        loaded: start and end of the last weight load, while nothing was sampled.
    """

    made: float
    at: float
    busy_s: float = 0.0
    tokens: int = 0
    loaded: tuple[float, float] = (0.0, 0.0)


class GeneratorClosed(RuntimeError):
    """The generator has been closed, or its engine has failed. The message says which."""


class EngineLost(UserError, GeneratorClosed):
    """The engine in another process has ended, or its server cannot be reached."""


class Generator(Protocol):
    """Samples completions for concurrent callers in one event loop.

    - **Results.** The tokens depend on (weights, tokens, params, key) only, never on other calls.
    - **Cancellation.** Cancelling a call frees everything that the engine holds for it. No other
      call is affected.
    - **Back-pressure.** A call waits without blocking the event loop while the engine is full.
    - **Priorities.** Calls with a larger priority leave the queue first.
    - **Weights.** `load` may be called while requests run. Tokens sampled later are stamped with
      the new version.
    - **Errors.** A request that can never run raises ValueError. After a failure of the engine or
      `close`, every call raises GeneratorClosed; none waits for ever.
    """

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        ...

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """Sample one completion.

        Args:
            tokens: token ids to continue, at least one.
            params: sampling parameters.
            key: names the sampling noise.
            stops: stop strings. The completion ends with the token that completes one.
            priority: larger values are served first.
        """
        ...

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs [len(tokens) - 1] of all tokens but the first."""
        ...

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Replace all weights, between two engine steps.

        Args:
            weights: tensors named as in a checkpoint.
            version: version of these weights, greater than the current one.

        Returns:
            Number of running sequences that continue with the new weights.
        """
        ...

    async def sleep(self) -> None:
        """Free accelerator memory until the next call, if the recipe asks for it.

        Called between rollouts, while no request runs.
        """
        ...

    def close(self) -> None:
        """End the engine. Calls that are waiting raise GeneratorClosed.

        A second call does nothing.
        """
        ...


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, from code that is not asynchronous.

    If this thread already runs an event loop, as in a notebook, another thread runs the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, work).result()
