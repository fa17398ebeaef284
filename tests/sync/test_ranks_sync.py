"""Sync of several ranks: what is gathered when, with stand-ins for ranks and samplers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sixfold.sync.ranks import Probe, RanksSync
from sixfold.sync.sync import SyncError, WeightsNotFinite


class Gathered(dict[str, Tensor]):
    """Weights that note which of them are gathered."""

    def __init__(self) -> None:
        super().__init__({name: torch.zeros(2) for name in "abc"})
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)


class Samplers:
    """Samplers that read all weights, or refuse them after the first."""

    version = 0

    def __init__(self) -> None:
        self.refuses = False
        self.loads: list[int] = []
        self.told: list[int] = []

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        for name in weights:
            weights[name]
            if self.refuses:
                raise ValueError("they do not fit")
        self.loads.append(version)
        self.version = version
        return 0


def made(weights: Gathered, samplers: Samplers, probe: Probe | None = None) -> RanksSync:
    def agree(error: Exception | None) -> None:
        if error:
            raise error

    def loaded() -> None:
        samplers.told.append(samplers.version)

    return RanksSync(lambda: weights, cast(Any, samplers), agree, asyncio.run, loaded, probe)


def test_a_rank_that_fails_gathers_what_the_others_gather() -> None:
    weights, samplers = Gathered(), Samplers()
    samplers.refuses = True
    with pytest.raises(SyncError, match="they do not fit"):
        made(weights, samplers).sync(1)
    assert weights.read == ["a", "b", "c"] and samplers.loads == samplers.told == []


def test_an_evaluation_before_the_first_update_passes_no_weights_again() -> None:
    """Groups may run then, and their engine refuses version 0 a second time."""
    samplers = Samplers()
    sync = made(Gathered(), samplers)
    with sync.policy_weights(0):  # SFT has changed the weights
        assert samplers.loads == [0]
    with sync.policy_weights(0):
        assert samplers.loads == [0, 0]
    sync.sync(0)  # the first step made no update
    with sync.policy_weights(0):
        assert samplers.loads == [0, 0]
    with sync.policy_weights(1):
        assert samplers.loads == samplers.told == [0, 0, 1]


def test_a_weight_that_is_not_finite_is_refused_by_every_rank() -> None:
    """Also by one whose samplers check nothing. The other ranks gather the rest too."""
    weights, samplers = Gathered(), Samplers()
    dict.__getitem__(weights, "b")[0] = torch.inf
    with pytest.raises(WeightsNotFinite, match="weight 'b' is not finite"):
        made(weights, samplers).sync(1)
    assert weights.read == ["a", "b", "c"] and samplers.loads == []


@pytest.mark.parametrize(("theirs", "wrong"), [(-1.05, False), (-1.2, True), (float("nan"), True)])
def test_the_probe_is_compared_after_every_sync(theirs: float, wrong: bool) -> None:
    """And after a trained adapter, by what scores it. R-174."""
    samplers, scored = Samplers(), list[str]()

    def score(by: str, tokens: Sequence[int]) -> list[float]:
        scored.append(by)
        return [-1.0 for _ in tokens[1:]]

    async def asked(tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return [theirs for _ in tokens[1:]]

    cast(Any, samplers).score = asked
    sync = made(Gathered(), samplers, Probe([3, 4, 5], partial(score, "policy"), 0.1))
    for attempt in (
        lambda: sync.sync(1),
        lambda: sync.adapt(cast(Any, SimpleNamespace(merged=Gathered)), partial(score, "adapter")),
    ):
        if wrong:
            with pytest.raises(SyncError, match=r"score the probe differently.*\(limit 0.1\)"):
                attempt()
        else:
            attempt()
    assert scored == ["policy", "adapter"]
