"""Constrained decoding: what is not allowed is never drawn, and the log-prob is that of the
renormalised distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

VOCABULARY, END = 61, 1


class Rising:
    """Each token is larger than the one before, up to the last, behind which the
    completion ends.
    """

    def start(self) -> Rising:
        return self

    def allowed(self, completion: Sequence[int]) -> Tensor:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        last = max(completion, default=10)
        mask[last + 1 :] = True
        mask[END] = not mask.any()
        return mask


def sampled(model: PreTrainedModel, **more: Any) -> list[Any]:
    engine = Engine(CausalLM(model), kv_tokens=900, **more)
    for i in range(3):
        params = SamplingParams(30, 1.0, seed=i, stop_token_ids=(END,), top_logprobs=2)
        engine.add(
            f"{i}", [5, 6, 7, 5, 6, 7, 5], params, [0, 1], constraint=Rising() if i != 1 else None
        )
    return sorted(engine.run(), key=lambda s: (s.request.key, s.sample))


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    "more",
    [{}, dict(max_running=2), dict(speculation=Speculation(k=3)), dict(preemption="recompute")],
)
def test_completions_follow_the_constraint_and_record_its_distribution(
    tiny: Callable[[str], PreTrainedModel], more: dict[str, Any]
) -> None:
    model = tiny("qwen3")
    for s in sampled(model, **more):
        completion = s.tokens[7:]
        if s.request.key == "1":
            assert completion != sorted(completion)
            continue
        rising = completion[:-1] if completion[-1] == END else completion
        assert rising == sorted(set(rising)) and all(t > 10 for t in rising)
        with torch.no_grad():
            logits = model(torch.tensor([s.tokens])).logits[0].float()
        for i, (token, logp) in enumerate(zip(completion, s.logp, strict=True)):
            row = (
                logits[6 + i]
                .masked_fill(~Rising().allowed(completion[:i]), -torch.inf)
                .log_softmax(-1)
            )
            assert logp == pytest.approx(float(row[token]), abs=1e-4)
            assert all(Rising().allowed(completion[:i])[t] for t in s.top[i])


def test_others_draw_what_they_draw_without_a_constraint_beside_them(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    model = tiny("qwen3")
    engine = Engine(CausalLM(model), kv_tokens=900)
    engine.add(
        "1",
        [5, 6, 7, 5, 6, 7, 5],
        SamplingParams(30, 1.0, seed=1, stop_token_ids=(END,), top_logprobs=2),
        [0, 1],
    )
    alone = sorted(engine.run(), key=lambda s: s.sample)
    beside = [s for s in sampled(model) if s.request.key == "1"]
    assert [(s.tokens, s.logp) for s in alone] == [(s.tokens, s.logp) for s in beside]


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    "more", [dict(max_running=1), dict(preemption="recompute"), dict(speculation=Speculation(k=2))]
)
def test_constrained_tokens_do_not_depend_on_batching(
    tiny: Callable[[str], PreTrainedModel], more: dict[str, Any]
) -> None:
    model = tiny("qwen3")
    assert [s.tokens for s in sampled(model, **more)] == [s.tokens for s in sampled(model)]
