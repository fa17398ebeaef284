"""Real clients get the same greedy completions from the server through every API."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.server.serving import Running

Client = Callable[..., Any]


@pytest.fixture
def greedy(server: Running) -> str:
    """The answer to "hi" in a chat, by the `openai` client of the main environment."""
    say: list[Any] = [{"role": "user", "content": "hi"}]
    return (
        server.client()
        .chat.completions.create(model="tiny", messages=say, max_tokens=12, temperature=0)
        .choices[0]
        .message.content
        or ""
    )


@pytest.fixture
def text(server: Running) -> str:
    """Continuation of a bare text "hi"."""
    return (
        server.client()
        .completions.create(model="tiny", prompt="hi", max_tokens=12, temperature=0)
        .choices[0]
        .text
    )


@pytest.mark.parametrize("version", [2, 3])
def test_openai(client: Client, greedy: str, version: int) -> None:
    found = client("openai", openai=version)
    assert found["models"] == ["tiny"]
    assert found["whole"] == found["stream"] == found["response"] == greedy
    assert found["events"] == ["response.created", "response.incomplete"]
    assert found["errors"] == ["context_length_exceeded", "model_not_found"]


def test_litellm(client: Client, greedy: str, text: str) -> None:
    found = client("litellm")
    assert (found["chat"], found["stream"], found["text"]) == (greedy, greedy, text)
    assert found["overflow"] == "recognised"


def test_lm_eval(client: Client, server: Running, text: str) -> None:
    """Log-likelihoods equal the module's sums over the continuation. `is_greedy` is true if each
    token is the most likely one.
    """
    found = client("lm_eval")
    assert found["greedy"] == [text]
    for (context, continuation), (logp, is_greedy) in zip(
        found["pairs"], found["scored"], strict=True
    ):
        tokens = server.served.encoders[0].encode_text(context + continuation)
        start = len(server.served.encoders[0].encode_text(context))
        with torch.no_grad():
            rows = (
                server.engine.runner.model.module(torch.tensor([tokens]))
                .logits[0, start - 1 : -1]
                .float()
                .log_softmax(-1)
            )
        expected = rows.gather(-1, torch.tensor(tokens[start:])[:, None]).sum()
        assert logp == pytest.approx(float(expected), abs=1e-4)
        assert is_greedy == (rows.argmax(-1).tolist() == tokens[start:])


def test_inspect_ai(client: Client, greedy: str) -> None:
    found = client("inspect_ai", openai=3)
    assert found["status"] == "success", found["error"]
    assert found["text"] == greedy


def test_agents(client: Client, server: Running) -> None:
    if importlib.util.find_spec("llguidance") is None:
        pytest.skip("the forced call needs llguidance")
    found = client("agents")
    say: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    expected = (
        server.client()
        .chat.completions.create(model="tiny", messages=say, max_tokens=12, temperature=0)
        .choices[0]
        .message.content
    )
    assert found["whole"] == expected and found["answer"] in (True, False)
    assert "raw_response_event" in found["kinds"]
    assert found["called"] == 1 and found["outputs"][:2] == [
        "tool_call_item",
        "tool_call_output_item",
    ]


def test_verifiers(client: Client, greedy: str) -> None:
    found = client("verifiers")
    assert found["chat"] == found["response"] == greedy
    assert found["overflow"] is True
