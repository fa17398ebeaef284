"""A verifier of sums that answers after a while, as a judge, a sandbox or a remote tool does."""

from __future__ import annotations

import asyncio
import os
import zlib

from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.types import Task

SECONDS = float(os.environ.get("SLOW_CHECK_S", "2"))


async def slow_sum(completion: str, task: Task) -> float:
    """1 for the right sum, otherwise 0."""
    await asyncio.sleep(SECONDS)
    return float(arithmetic_reward(completion, task))


async def slow_coin(completion: str, task: Task) -> float:
    """0 or 1 by the text alone, so that groups of an untrained model have rewards that differ."""
    await asyncio.sleep(SECONDS)
    return float(zlib.crc32(completion.encode()) % 2)
