"""A generator behind a `Link`: the other side of `generator_server.py`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ..processes.child import ChildError, Peer
from ..rollout.generator import Activity, EngineLost, Sampled, SampleKey
from ..types import SamplingParams
from .process_link import Link


class LinkedSampler:
    """Samples in another process.

    Args:
        name: of the process, for messages.
        silence_s: longest time without a heartbeat, in seconds.

    Attributes:
        activity: counters of its engine at its last reply. None: unknown.
    """

    def __init__(self, name: str, silence_s: float) -> None:
        self.activity: Activity | None = None
        self._name = name
        self._silence_s = silence_s
        self._link: Link | None = None

    def _connect(self, peer: Peer) -> None:
        """Send requests to a peer from now on."""
        self._link = Link(
            self._name,
            peer,
            lambda: self._silence_s,
            self._lost,
            lambda requests: [pickle.dumps(list(requests))],
            pickle.loads,
        )

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """As `Generator.generate`. Calls of one iteration of the event loop arrive together."""
        request = {
            "tokens": list(tokens),
            "params": params,
            "key": key,
            "stops": tuple(stops),
            "priority": priority,
        }
        sampled: Sampled = (await self._ask("generate", request))["sampled"]
        return sampled

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        request = {"tokens": list(tokens), "temperature": temperature}
        return list((await self._ask("score", request))["logp"])

    async def _ask(self, do: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._link is None:
            raise RuntimeError(f"{self._name} is not ready")
        async with self._link.call({"do": do, **request}) as call:
            reply = await call.reply()
            self.activity = reply["activity"]
            return reply

    def _lost(self, error: ChildError) -> EngineLost:
        """Error for callers once the process has ended."""
        raise NotImplementedError
