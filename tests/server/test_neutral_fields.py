"""Fields that clients send by default: accepted if they change nothing, otherwise refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Running

from sixfold_serving.neutral import IGNORED, NEUTRAL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {
    CHAT: {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "seed": 1,
    },
    TEXT: {"model": "tiny", "prompt": "hi", "max_tokens": 4, "seed": 1},
}
EMPTY_CALL = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]


def said(server: Running, path: str, **more: Any) -> tuple[int, Any]:
    answer = httpx.post(server.url + path, json=BODY[path] | more, timeout=30)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["param"]
    choice = answer.json()["choices"][0]
    return 200, choice["text"] if path == TEXT else choice["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_neutral_values_change_nothing_and_others_are_refused_by_name(
    server: Running, path: str
) -> None:
    plain = said(server, path)
    everything = {key: values[0] for key, values in NEUTRAL.items()} | {
        key: None for key in IGNORED
    }
    assert said(server, path, **everything) == plain
    for field in (
        "min_tokens",
        "best_of",
        "ignore_eos",
        "logit_bias",
        "suffix",
        "length_penalty",
        "skip_special_tokens",
    ):
        assert said(server, path, **{field: {"x": 1}}) == (400, field)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    "more",
    [
        dict(reasoning_effort="low", store=True, user="me", service_tier="auto", verbosity="high"),
        dict(parallel_tool_calls=False, tools=[], tool_choice="none", stop=[]),
        dict(
            min_tokens=0,
            skip_special_tokens=True,
            presence_penalty=0,
            frequency_penalty=0.0,
            n=1,
            best_of=1,
            top_k=-1,
        ),
        dict(response_format={"type": "text"}, metadata={}, logprobs=False, top_logprobs=0),
    ],
)
def test_what_clients_send_by_default(server: Running, more: dict[str, Any]) -> None:
    assert said(server, CHAT, **more) == said(server, CHAT)


def test_a_past_call_without_arguments(server: Running) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": EMPTY_CALL},
    ]
    turns += [
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    ]
    assert said(server, CHAT, messages=[*turns, {"role": "user", "content": "and"}])[0] == 200


@pytest.mark.slow
def test_penalties_change_the_answer(server: Running) -> None:
    """With a large frequency penalty no token occurs twice, except the end token."""
    answer = httpx.post(
        server.url + TEXT,
        json=BODY[TEXT]
        | dict(max_tokens=60, temperature=0.01, presence_penalty=2, frequency_penalty=2),
    ).json()
    text = answer["choices"][0]["text"]
    plain = httpx.post(
        server.url + TEXT, json=BODY[TEXT] | dict(max_tokens=60, temperature=0.01)
    ).json()["choices"][0]["text"]
    assert len(set(text)) > len(set(plain))
