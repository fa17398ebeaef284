"""Paged, incremental decoding against the full forward of the same weights by transformers' own
attention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.conftest import ARCHITECTURES, END, VOCABULARY
from torch import Tensor
from transformers import PreTrainedModel

import sixfold.engine.engine as engine_module
from sixfold.engine.engine import Engine
from sixfold.engine.noise import uniforms
from sixfold.engine.sampler import sample
from sixfold.engine.sequence import Sequence as EngineSequence
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPTS = [
    [(7 * i + 3 * j + 2) % VOCABULARY for j in range(n)]
    for i, n in enumerate((1, 3, 7, 8, 9, 15, 16, 17, 24, 31))
]
"""Around the borders of blocks of 8 and of a sliding window of 8."""
Seen = list[tuple[list[int], Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every row of logits that the engine sampled from, with the tokens before it."""
    rows: Seen = []

    def spy(
        logits: Tensor,
        params: Sequence[SamplingParams],
        noise: Sequence[float],
        history: Sequence[list[int]],
    ) -> Any:
        rows.extend(
            (list(tokens), row.clone()) for tokens, row in zip(history, logits, strict=True)
        )
        return sample(logits, params, noise, history)

    monkeypatch.setattr(engine_module, "sample", spy)
    return rows


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gpt_oss"])
def test_decoding_with_the_cache_gives_the_logits_of_the_full_forward(
    name: str,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    seen: Seen,
) -> None:
    # Few blocks and few at a time: samples start late, copy a prompt's last block, and blocks are
    # used again.
    engine = Engine(
        CausalLM(tiny(name)), kv_tokens=120, block_size=8, max_running=6, prefill_tokens=40
    )
    params = SamplingParams(max_tokens=20, temperature=0.9, stop_token_ids=(END,), seed=1)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, params, [0, 1])
    finished = engine.run()
    assert (
        len(finished) == 2 * len(PROMPTS) and len(seen) == sum(len(s.logp) for s in finished) > 200
    )
    by_history = {tuple(tokens): row for tokens, row in seen}
    for s in finished:
        start = len(s.request.prompt)
        with torch.no_grad():
            full = plain(name)(torch.tensor([s.tokens]), use_cache=False).logits[0].float()
        ours = torch.stack([by_history[tuple(s.tokens[:t])] for t in range(start, s.length)])
        torch.testing.assert_close(ours, full[start - 1 : -1], rtol=0, atol=1e-5)
        drawn = torch.tensor(s.tokens[start:])
        expected = (full[start - 1 : -1] / 0.9).log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(s.logp), expected, rtol=0, atol=1e-5)
        noise = uniforms(1, s.request.key, s.sample, len(drawn)).tolist()
        again, _, _ = sample(full[start - 1 : -1], [params] * len(drawn), noise, [[0]] * len(drawn))
        assert torch.equal(again, drawn)  # each position its own noise


def _assert_full_forward(
    model: PreTrainedModel, finished: Sequence[EngineSequence], seen: Seen
) -> None:
    by_history = {tuple(tokens): row for tokens, row in seen}
    for s in finished:
        with torch.no_grad():
            full = model(torch.tensor([s.tokens]), use_cache=False).logits[0].float()
        start = len(s.request.prompt)
        ours = torch.stack([by_history[tuple(s.tokens[:t])] for t in range(start, s.length)])
        torch.testing.assert_close(ours, full[start - 1 : -1], rtol=0, atol=1e-5)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gpt_oss"])
@pytest.mark.parametrize("batch", [1, 13, 256])
def test_any_batch_on_shuffled_blocks_gives_them_too(
    name: str,
    batch: int,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    seen: Seen,
) -> None:
    """Prompts behind cached beginnings, tables of blocks in no order."""
    engine = Engine(
        CausalLM(tiny(name)),
        kv_tokens=batch * 24,
        block_size=8,
        max_running=batch,
        prefill_tokens=50,
    )
    random.Random(batch).shuffle(engine.scheduler.blocks._free)
    for i in range(batch):
        prompt = [*[5, 4, 3, 2, 5, 4, 3, 2, 6][: 9 - i % 3], i % VOCABULARY, i // VOCABULARY]
        engine.add(str(i), prompt, SamplingParams(max_tokens=5, seed=1), [0])
    most, finished = 0, []
    while engine.busy:
        finished += engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == batch
    assert engine.stats.reused_tokens > 0 or batch == 1
    _assert_full_forward(plain(name), finished[:40], seen)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gpt_oss"])
def test_prompts_in_pieces_and_preempted_sequences_give_them_too(
    name: str,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    seen: Seen,
) -> None:
    engine = Engine(
        CausalLM(tiny(name)),
        kv_tokens=76,
        block_size=4,
        prefill_tokens=40,
        chunked_prefill=True,
        preemption="recompute",
    )
    random.Random(0).shuffle(engine.scheduler.blocks._free)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, SamplingParams(max_tokens=12, seed=1), [0])
    finished = engine.run()
    assert engine.stats.preemptions > 1 and engine.stats.recomputed_tokens > 20
    _assert_full_forward(plain(name), finished, seen)


@pytest.mark.slow
def test_greedy_decoding_is_that_of_transformers(
    tiny: Callable[[str], PreTrainedModel], plain: Callable[[str], PreTrainedModel]
) -> None:
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=2000, block_size=4)
    for i, prompt in enumerate(PROMPTS):
        engine.add(
            str(i),
            prompt,
            SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(END,)),
            [0],
        )
    for s in engine.run():
        prompt = torch.tensor([s.request.prompt])
        theirs = plain("qwen3").generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        assert s.tokens == theirs[0].tolist()


def test_new_weights_are_used_at_once(
    plain: Callable[[str], PreTrainedModel], tiny: Callable[[str], PreTrainedModel]
) -> None:
    """Nothing computed by old weights outlives them: no prompt is kept between runs."""
    import copy

    model = copy.deepcopy(tiny("llama"))
    engine, params = (
        Engine(CausalLM(model), kv_tokens=400, block_size=8),
        SamplingParams(max_tokens=6, seed=5),
    )
    engine.add("t", PROMPTS[5], params, [0, 1])
    before = [s.tokens for s in engine.run()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2)
    engine.set_version(1)
    engine.add("t", PROMPTS[5], params, [0, 1])
    after = [s.tokens for s in engine.run()]
    fresh = Engine(CausalLM(model), kv_tokens=400, block_size=8)
    fresh.add("t", PROMPTS[5], params, [0, 1])
    assert after == [s.tokens for s in fresh.run()] != before
