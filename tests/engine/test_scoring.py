"""Log-probs of given tokens are those of the whole text in one forward, and those that sampling
recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from sixfold.engine import scoring
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPTS = [[5, 9, 11, 7, 3, 3, 8] * 9, [4], [6, 2], list(range(2, 40))]


def scores(
    engine: Engine, prompts: list[list[int]], temperature: float = 1.0, top: int = 0
) -> list[scoring.PromptScore]:
    return [score for score in engine.score(prompts, temperature, top) if score is not None]


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
@pytest.mark.parametrize("piece", [16, 256])
def test_scores_are_those_of_transformers(
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    architecture: str,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "PIECE", piece)
    found = scores(Engine(CausalLM(tiny(architecture)), kv_tokens=64), PROMPTS, 0.7, 3)
    for prompt, score in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logp = (
                plain(architecture)(torch.tensor([prompt])).logits[0].float() / 0.7
            ).log_softmax(-1)
        expected = logp[:-1].gather(-1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logp), expected, atol=2e-5, rtol=0)
        for top, row in zip(score.top, logp[:-1], strict=True):
            assert list(top) == row.topk(3).indices.tolist()


def test_a_completion_scores_as_it_was_sampled_beside_running_sequences(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """And the sequences that run are not disturbed."""
    model = CausalLM(tiny("qwen3"))
    engine = Engine(model, kv_tokens=400)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    engine.add("a", PROMPTS[0], params, [0, 1])
    alone = sorted(engine.run(), key=lambda s: s.sample)
    engine.add("a", PROMPTS[0], params, [0, 1])
    for _ in range(7):
        engine.step()
    (score,) = scores(engine, [alone[0].tokens], 0.8)
    torch.testing.assert_close(
        torch.tensor(score.logp[len(PROMPTS[0]) - 1 :]),
        torch.tensor(alone[0].logp),
        atol=1e-5,
        rtol=0,
    )
    again = sorted(engine.run(), key=lambda s: s.sample)
    assert [(s.tokens, s.logp) for s in again] == [(s.tokens, s.logp) for s in alone]
    assert engine.scheduler.blocks.used == 0
