"""Guarantees of the engine about a completion: how it ends, which version it is stamped with, and
when weights may change.
"""

from __future__ import annotations

import errno
import mmap
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import END
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams


@pytest.fixture
def engine(tiny: Callable[[str], PreTrainedModel]) -> Engine:
    return Engine(CausalLM(tiny("qwen3")), kv_tokens=2000, block_size=8)


def answer(engine: Engine) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of one sample of a prompt."""
    engine.add("t", [2, 3, 4], SamplingParams(max_tokens=6), [0])
    (s,) = engine.run()
    return s.tokens, s.logp


def test_a_completion_ends_with_its_stop_token_and_nothing_after_it(engine: Engine) -> None:
    stops = (END, 5, 6, 7)
    engine.add("t", [9, 8, 2], SamplingParams(max_tokens=25, stop_token_ids=stops), list(range(40)))
    finished = engine.run()
    for s in finished:
        completion = s.tokens[3:]
        assert len(completion) == len(s.logp) == len(s.version)
        assert not set(completion[:-1]) & set(stops)
        stopped = completion[-1] in stops
        assert s.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion) == 25
    assert {s.finish_reason for s in finished} == {"stop", "length"}


def test_a_stop_token_in_the_last_place_is_a_stop(engine: Engine) -> None:
    """Every token stops: the first one does, at the limit of one token too."""
    engine.add("t", [9, 8, 2], SamplingParams(max_tokens=1, stop_token_ids=tuple(range(61))), [0])
    (s,) = engine.run()
    assert (s.finish_reason, len(s.logp)) == ("stop", 1)


def test_tokens_carry_the_version_that_sampled_them(engine: Engine) -> None:
    for version in (0, 3, 4):
        if version:
            engine.set_version(version)
        engine.add("t", [2, 3], SamplingParams(max_tokens=4), [0])
        (s,) = engine.run()
        assert s.version == [version] * 4


def test_a_version_must_grow(engine: Engine) -> None:
    engine.set_version(2)
    for version in (2, 1):
        with pytest.raises(RuntimeError, match=f"must increase: 2 -> {version}"):
            engine.set_version(version)
    assert engine.version == 2


@pytest.mark.parametrize("stepped", [False, True])
def test_weights_and_memory_stay_while_sequences_are_in_flight(
    engine: Engine, stepped: bool
) -> None:
    engine.add("t", [2, 3], SamplingParams(max_tokens=4), [0])
    if stepped:
        engine.step()
    with pytest.raises(RuntimeError, match="in flight"):
        engine.set_version(1)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.release_memory()
    engine.run()
    engine.set_version(1)


def test_freed_cache_is_allocated_again_on_use(engine: Engine) -> None:
    first = answer(engine)
    cache = engine.runner.cache
    # Two layers, keys and values, 2 heads of 16 float32 numbers a slot; one block of scratch.
    assert (
        sum(side.nbytes for side in cache.tensors()) == 2 * 2 * 2 * 16 * 4 * (cache.blocks + 1) * 8
    )
    engine.release_memory()
    assert cache.tensors() == []
    assert answer(engine) == first


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc; elsewhere PyTorch makes the cache"
)
def test_cache_memory_is_allocated_on_use_and_freed_immediately(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """A cache is made as large as it may become. statm: pages of the process that there are, and
    that have been touched.
    """

    def size() -> np.ndarray:
        return (
            np.array(Path("/proc/self/statm").read_text().split()[:2], dtype=np.int64)
            * resource.getpagesize()
        )

    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=2**20)
    before = size()
    answer(engine)
    pools = sum(side.nbytes for side in engine.runner.cache.tensors())
    whole, touched = size() - before
    assert pools > 2**29 and whole >= pools and touched < pools / 4
    engine.release_memory()
    assert (size() - before)[0] < pools / 4


class NoHugePages(mmap.mmap):
    """As under a kernel that was built without."""

    def madvise(self, *_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("without", ["the kernel", "the system"])
def test_huge_pages_are_optional(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    first = answer(engine)
    engine.release_memory()
    if without == "the kernel":
        monkeypatch.setattr(mmap, "mmap", NoHugePages)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert answer(engine) == first


def test_the_cache_keeps_its_buffers_for_the_engines_life(engine: Engine) -> None:
    def buffers() -> list[int]:
        return [side.data_ptr() for pool in engine.runner.cache.pools.values() for side in pool]

    engine.add("t", [2, 3, 4], SamplingParams(max_tokens=3), [0])
    engine.run()
    before = buffers()
    engine.add("u", [2] * 50, SamplingParams(max_tokens=30), list(range(9)))
    engine.run()
    assert buffers() == before


def test_stale_blocks_do_not_leak_into_a_sequence(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Blocks are not wiped when they are freed: what an earlier sequence left in them must count
    for nothing.
    """
    params = SamplingParams(max_tokens=5)
    fresh, used = (Engine(CausalLM(tiny("qwen3")), kv_tokens=64, block_size=16) for _ in range(2))
    used.add("filler", [3] * 17, SamplingParams(max_tokens=40), [0])
    used.run()
    with torch.inference_mode():
        for pools in used.runner.cache.pools.values():
            for side in pools:
                side.fill_(1e4)
    results = []
    for engine in (fresh, used):
        engine.add("t", [2, 3, 4], params, [0])
        (s,) = engine.run()
        results.append((s.tokens, s.logp))
    assert results[0] == results[1]


def test_bfloat16_samples_in_bfloat16_and_records_float32(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=64, autocast=torch.bfloat16)
    engine.add("t", [2, 3, 4], SamplingParams(max_tokens=12, seed=1), [0])
    (s,) = engine.run()
    assert {side.dtype for pool in engine.runner.cache.pools.values() for side in pool} == {
        torch.bfloat16
    }
    exact = Engine(CausalLM(tiny("qwen3")), kv_tokens=64)
    exact.add("t", s.tokens[:-1], SamplingParams(max_tokens=1, seed=1), [0])
    with torch.no_grad():
        full = tiny("qwen3")(torch.tensor([s.tokens]), use_cache=False).logits[0].log_softmax(-1)
    expected = full[2:-1].gather(-1, torch.tensor(s.tokens[3:])[:, None])[:, 0]
    gap = (torch.tensor(s.logp) - expected).abs().max()
    assert 1e-6 < gap < 0.2
