"""One sequence ended between two steps, as a stop string does: its blocks are free, its siblings go
on as if it had run to its end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.drain import drain
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams


def test_one_sequence_may_be_ended_with_a_reason_and_its_siblings_go_on(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine, whole = (Engine(CausalLM(tiny("qwen3")), kv_tokens=200, block_size=4) for _ in range(2))
    for e in (engine, whole):
        e.add("t", [2, 3, 4, 5, 6], SamplingParams(max_tokens=9), [0, 1, 2])
    engine.step()
    engine.step()
    first = engine.scheduler.running[0]
    engine.end(first, "stop")
    assert (first.finish_reason, len(first.logp), first.blocks) == ("stop", 2, [])
    with pytest.raises(ValueError, match="already ended: stop"):
        engine.end(first, "aborted")
    expected = {s.sample: s.tokens for s in whole.run()}
    assert {s.sample: s.tokens for s in drain(engine)} == {
        k: t for k, t in expected.items() if k != first.sample
    }
    assert first.tokens == expected[first.sample][:7]
    blocks = engine.scheduler.blocks
    assert (
        blocks.used == 0
        and blocks.free + blocks.idle == blocks.count
        and engine.scheduler.reservation.reserved == 0
    )
