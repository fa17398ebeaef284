"""The table of a batch that decodes is appended to, and is at any time what a fresh one
would be.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import VOCABULARY
from transformers import PreTrainedModel

from sixfold.engine import block_tables, model_runner
from sixfold.engine.block_tables import DecodeTable, block_table
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

SIZES: list[dict[str, Any]] = [
    {},
    dict(kv_tokens=130, preemption="recompute"),
    dict(kv_tokens=130, preemption="swap"),
    dict(prefix_cache="none", max_running=3),
    dict(continuous=False),
]


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_step_has_the_table_that_a_fresh_one_would_be(
    sizes: dict[str, Any], tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences start, end at different times, are preempted and come back with other blocks."""
    checked: list[int] = []
    update = DecodeTable.update

    def checking(
        table: DecodeTable, batch: list[Any], revision: int, rows: int, shape_of: Any
    ) -> np.ndarray:
        array = update(table, batch, revision, rows, shape_of)
        blocks = [s.blocks for s in batch]
        shape = shape_of(rows, max(map(len, blocks)))
        fresh = block_table(blocks, (shape[0], max(shape[1], array.shape[1])), table._scratch)
        np.testing.assert_array_equal(array, fresh)
        checked.append(len(batch))
        return array

    monkeypatch.setattr(DecodeTable, "update", checking)
    engine = Engine(CausalLM(tiny("qwen3")), **{"kv_tokens": 600, "block_size": 4, **sizes})
    for i, length in enumerate((3, 18, 9, 30)):
        prompt = [(i + j) % VOCABULARY for j in range(length)]
        engine.add(str(i), prompt, SamplingParams(max_tokens=9 + 4 * i, seed=i), [0, 1])
    engine.run()
    assert len(checked) > 15
    assert engine.stats.preemptions > 0 or "preemption" not in sizes


@pytest.mark.slow
def test_table_and_shared_prefixes_are_computed_once_per_batch(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences of different lengths: at nearly every step one of them gets a block."""
    filled: list[int] = []
    looked: list[object] = []
    monkeypatch.setattr(
        block_tables, "block_table", lambda *args: filled.append(1) or block_table(*args)
    )
    monkeypatch.setattr(model_runner, "triton_serves", lambda device: True)
    monkeypatch.setattr(
        model_runner.ModelRunner,
        "_decode_hidden",
        _without_triton(model_runner.ModelRunner._decode_hidden),
    )
    find = model_runner.find_shared_prefixes
    monkeypatch.setattr(
        model_runner, "find_shared_prefixes", lambda *args: looked.append(1) or find(*args)
    )
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=4000, block_size=4, prefix_cache="none")
    for i in range(8):
        engine.add(str(i), [i + 2] * (1 + i % 4), SamplingParams(max_tokens=24), [0])
    engine.run()
    assert engine.stats.steps == 24
    assert (len(filled), len(looked)) == (1, 1)


def test_unused_engine_is_freed_immediately(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Without waiting for the garbage collector: its cache may be most of a GPU's memory."""
    for autocast in (None, torch.bfloat16):
        engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=64, autocast=autocast)
        engine.add("t", [3, 4], SamplingParams(max_tokens=3), [0, 1])
        engine.run()
        cache = weakref.ref(engine.runner.cache)
        gc.disable()
        try:
            del engine
            assert cache() is None
        finally:
            gc.enable()


def _without_triton(decode_hidden: Callable[..., Any]) -> Callable[..., Any]:
    """Runs PyTorch's operations on the first four inputs, those besides the shared prefixes."""
    return lambda runner, inputs, *rest: decode_hidden(runner, inputs[:4], *rest)
