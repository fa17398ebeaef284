"""Preempted sequences in host memory: what lies there, what goes first when it is full, how many
bytes move, and that the bits come back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.conftest import VOCABULARY
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.kv_cache import KVCache
from sixfold.engine.offload import HostBlocks, HostPools
from sixfold.engine.quantised_cache import Int8KVCache
from sixfold.engine.sequence import Request, Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams


def _sequence(request: Request, length: int, blocks: list[int]) -> Sequence:
    import numpy as np

    return Sequence(request, 0, np.zeros(1), list(range(length)), blocks, 0.0)


def test_block_accounting_by_hand() -> None:
    """Blocks of 4. Two samples of a prompt of 9 tokens (2 full blocks) with 12 tokens each, 11 of
    them computed: blocks 0 and 1 are the prompt's.
    """
    request = Request("t", list(range(9)), SamplingParams(max_tokens=20), [0, 1])
    first, second = _sequence(request, 12, [10, 11, 12]), _sequence(request, 12, [10, 11, 22])
    host = HostBlocks(5, 4)
    assert sorted(host.put(first).values()) == [10, 11, 12]
    assert list(host.put(second).values()) == [22]  # the prompt is there already
    assert len(host._free) == 1
    slots = host.find(first, 0)
    assert (
        len(set(slots)) == 3
        and host.find(first, 1) == slots[1:]
        and host.find(second, 0)[:2] == slots[:2]
    )
    host.drop(first)
    assert len(host._free) == 2 and len(host.find(first, 0)) == 2 and len(host.find(second, 0)) == 3
    first.blocks = [30, 31, 32]
    assert list(host.put(first).values()) == [32]
    first.tokens.append(8)  # and went on while it was there: the block holds less than is asked for
    assert len(host.find(first, 0)) == 2
    host.drop(first)
    host.drop(second)
    host.drop(request)
    assert len(host._free) == 5


def test_full_host_memory_drops_least_recently_used_blocks_from_the_end() -> None:
    one, two = (
        _sequence(Request(key, [1], SamplingParams(max_tokens=20), [0]), 13, blocks)
        for key, blocks in (("a", [0, 1, 2]), ("b", [3, 4, 5]))
    )
    host = HostBlocks(4, 4)
    host.put(one)
    host.find(one, 0)
    assert len(host.put(two)) == 3
    assert len(host.find(one, 0)) == 1 and len(host.find(two, 0)) == 3
    assert list(HostBlocks(2, 4).put(one).values()) != [] and HostBlocks(0, 4).put(one) == {}
    small = HostBlocks(2, 4)
    assert sorted(small.put(one).values()) == [0, 1] and len(small.find(one, 0)) == 2


@pytest.mark.parametrize("kind", [KVCache, Int8KVCache])
def test_blocks_come_back_bit_for_bit(kind: type[KVCache]) -> None:
    torch.manual_seed(0)
    cache = kind(6, 4)
    for layer in range(2):
        cache.write(layer, torch.randn(2, 24, 8), torch.randn(2, 24, 6), torch.arange(24))
    before = [side.clone() for side in cache.tensors()]
    host = HostPools(cache)
    numbers = 2 * 2 * 4 * (8 + 6)  # layers, heads, tokens of a block, dimensions
    scales = 2 * 2 * 4 * 2
    block = numbers * 4 if kind is KVCache else numbers + scales * 4
    host.take_out({2: 0, 0: 5}, slots=3)
    for side in cache.tensors():
        side[:, :6].zero_()
    host.bring_back([(0, 1), (2, 4)])
    assert host.taken_out == host.brought_back == 2 * block
    for side, was in zip(cache.tensors(), before, strict=True):
        assert (
            torch.equal(side[:, 1], was[:, 5])
            and torch.equal(side[:, 4], was[:, 0])
            and not side[:, [0, 2, 3, 5]].any()
        )


def test_swapping_computes_nothing_again_and_counts_its_bytes(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    def draw(**sizes: object) -> tuple[dict[str, tuple[list[int], list[float]]], Engine]:
        engine = Engine(
            CausalLM(tiny("qwen3")), **{"block_size": 4, "prefix_cache": "none", **sizes}
        )  # type: ignore[arg-type]
        for i in range(6):
            engine.add(
                str(i),
                [(3 * i + j) % VOCABULARY for j in range(9)],
                SamplingParams(max_tokens=24, seed=1),
                [0],
            )
        return {s.request.key: (s.tokens, s.logp) for s in engine.run()}, engine

    expected, _ = draw(kv_tokens=2000)
    drawn, again = draw(kv_tokens=80, preemption="recompute")
    assert drawn == expected and again.stats.recomputed_tokens > 0
    drawn, engine = draw(kv_tokens=80, preemption="swap", host_tokens=400)
    stats = engine.stats
    assert drawn == expected and stats.preemptions > 1 and stats.recomputed_tokens == 0
    block = 2 * 2 * 2 * 16 * 4 * 4  # layers, sides, heads, dimensions, tokens, bytes
    assert stats.taken_out_bytes == stats.brought_back_bytes and stats.taken_out_bytes % block == 0
    assert stats.taken_out_bytes >= stats.preemptions * 3 * block
    drawn, tight = draw(kv_tokens=80, preemption="swap", host_tokens=16)
    assert drawn == expected
    assert 0 < tight.stats.recomputed_tokens < again.stats.recomputed_tokens
    assert 0 < tight.stats.brought_back_bytes < stats.brought_back_bytes
    assert sum(pool.nbytes for pool in tight.runner.host._pools) == 4 * block  # the bound
    engine.release_memory()
    assert engine.runner.host._pools == []
