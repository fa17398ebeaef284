"""`echo` with `logprobs`: log-probs of a given text, as lm-eval requests them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from serving import Running, running

from sixfold.model.loading import Policy

ASKED: dict[str, Any] = dict(model="tiny", logprobs=2, echo=True, temperature=0)


def truth(server: Running, tokens: list[int]) -> torch.Tensor:
    """[T - 1, V] log-probs at temperature 1, by the module alone."""
    with torch.no_grad():
        return (
            server.engine.runner.model.module(torch.tensor([tokens]))
            .logits[0, :-1]
            .float()
            .log_softmax(-1)
        )


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored_exactly(server: Running, max_tokens: int) -> None:
    texts = ["the sum of 1 and 2 is 3", "x", "a" * 300]
    tokens = [server.served.encoders[0].encode_text(text) for text in texts]
    by_text = server.client().completions.create(prompt=texts, max_tokens=max_tokens, **ASKED)
    by_token = server.client().completions.create(prompt=tokens, max_tokens=max_tokens, **ASKED)
    for answer in (by_text, by_token):
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice, text, prompt in zip(answer.choices, texts, tokens, strict=True):
            logprobs = choice.logprobs
            assert (
                logprobs is not None
                and logprobs.token_logprobs is not None
                and logprobs.top_logprobs is not None
            )
            assert choice.text.startswith(text) and choice.finish_reason in ("length", "stop")
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            expected = truth(server, prompt)
            found = torch.tensor(logprobs.token_logprobs[1 : len(prompt)])
            torch.testing.assert_close(
                found,
                expected.gather(-1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0],
                atol=2e-5,
                rtol=0,
            )
            for token, logp, top, row in zip(
                logprobs.tokens or (),
                logprobs.token_logprobs,
                logprobs.top_logprobs,
                [None, *expected],
                strict=False,
            ):
                if row is not None:
                    assert top[token] == logp and max(top.values()) == pytest.approx(
                        float(row.max()), abs=2e-5
                    )
            assert len(logprobs.token_logprobs) == len(prompt) + max_tokens
    assert by_text.usage is not None and by_text.usage.completion_tokens == 3 * max_tokens
    server.idle()


@pytest.mark.slow
def test_echo_without_logprobs_and_no_tokens_without_echo(server: Running) -> None:
    create = server.client().completions.create
    assert create(model="tiny", prompt="hi", max_tokens=0, echo=True).choices[0].text == "hi"
    assert create(model="tiny", prompt="hi", max_tokens=0).choices[0].text == ""
    echoed = create(model="tiny", prompt="hi", max_tokens=4, echo=True, seed=1, n=2)
    plain = create(model="tiny", prompt="hi", max_tokens=4, seed=1, n=2)
    assert [c.text for c in echoed.choices] == ["hi" + c.text for c in plain.choices]


def test_a_stream_echoes_once(server: Running) -> None:
    asked: dict[str, Any] = dict(
        model="tiny", prompt="hello", max_tokens=9, echo=True, logprobs=1, seed=4
    )
    whole = server.client().completions.create(**asked).choices[0]
    parts = [
        choice
        for chunk in server.client().completions.create(**asked, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(part.text for part in parts) == whole.text
    assert [p for part in parts if part.logprobs for p in part.logprobs.token_logprobs or ()] == (
        whole.logprobs and whole.logprobs.token_logprobs
    )


def test_a_text_as_long_as_the_context_is_scored(server: Running) -> None:
    answer = server.client().completions.create(prompt="ab" * 256, max_tokens=0, **ASKED)
    assert (
        answer.choices[0].logprobs is not None
        and len(answer.choices[0].logprobs.token_logprobs or ()) == 512
    )


@pytest.mark.slow
def test_a_client_that_leaves_while_its_text_is_scored_is_forgotten(
    chat_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sixfold.engine.scoring.PIECE", 8)
    with running(chat_policy) as server:
        with pytest.raises(httpx.TimeoutException):
            body = ASKED | {"prompt": ["ab" * 250] * 60, "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
        answer = server.client().completions.create(model="tiny", prompt="hi", max_tokens=3)
        assert answer.choices[0].finish_reason in ("stop", "length")
        server.idle()
        assert server.metric("aborted_total") == 1
