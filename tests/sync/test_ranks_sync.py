"""Sync of several ranks: what is gathered when, with stand-ins for ranks and samplers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sixfold.sync.ranks import RanksSync
from sixfold.sync.sync import SyncError


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


def made(weights: Gathered, samplers: Samplers) -> RanksSync:
    def agree(error: Exception | None) -> None:
        if error:
            raise error

    def loaded() -> None:
        samplers.told.append(samplers.version)

    return RanksSync(lambda: weights, cast(Any, samplers), agree, asyncio.run, loaded)


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
