"""Bad requests: each gets a 4xx in OpenAI's form that names the field, never a 5xx. The server then
answers a good one.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Running, running

from sixfold.cli import main
from sixfold.engine.engine import Engine
from sixfold.model.loading import Policy
from sixfold_serving.bounds import MAX_BODY

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAY = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": SAY, "max_tokens": 4} | changes


def text(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 4} | changes


def without(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != key}


def said(**message: Any) -> dict[str, Any]:
    return chat(messages=[*SAY, message])


def call(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]


# (path, body as JSON or as bytes, status, param, words of the message)
BAD: list[tuple[str, dict[str, Any] | bytes, int, str | None, str]] = [
    (CHAT, b"", 400, None, "not valid JSON"),
    (CHAT, b"{", 400, None, "not valid JSON"),
    (CHAT, b"\xff\xfe{}", 400, None, "not valid JSON"),
    (CHAT, b"[]", 400, None, "must be a JSON object"),
    (CHAT, b"null", 400, None, "must be a JSON object"),
    (CHAT, b'"text"', 400, None, "must be a JSON object"),
    (CHAT, b"[" * 200_000, 400, None, "not valid JSON"),
    (CHAT, b'{"model": "tiny", "temperature": NaN}', 400, None, "NaN is not a JSON number"),
    (CHAT, b'{"model": "tiny", "seed": ' + b"9" * 6000 + b"}", 400, None, "not valid JSON"),
    (
        CHAT,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
        None,
        "not valid JSON",
    ),
    (CHAT, b'{"model": "tiny", "temperature": 1e999}', 400, "temperature", "finite number"),
    (CHAT, {}, 400, "model", "missing parameter 'model'"),
    (CHAT, without(chat(), "messages"), 400, "messages", "missing parameter 'messages'"),
    (TEXT, without(text(), "prompt"), 400, "prompt", "missing parameter 'prompt'"),
    (CHAT, chat(model="gpt-9"), 404, "model", "'gpt-9' does not exist here; 'tiny' is served"),
    (CHAT, chat(model=3), 400, "model", "valid string"),
    (CHAT, chat(messages=[]), 400, "messages", "at least 1 item"),
    (CHAT, chat(messages="hi"), 400, "messages", "valid list"),
    (CHAT, chat(messages=["hi"]), 400, "messages[0]", "valid dictionary"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "content is missing"),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0].role", "missing parameter"),
    (
        CHAT,
        said(role="wizard", content="x"),
        400,
        "messages[1].role",
        "'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    (CHAT, said(role="user", content=7), 400, "messages[1].content", "valid string"),
    (
        CHAT,
        said(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "messages[1].content[0].type",
        "'text'",
    ),
    (
        CHAT,
        said(role="user", content="x", mood="good"),
        400,
        "messages[1].mood",
        "unknown parameter",
    ),
    (
        CHAT,
        said(role="user", content="\u4f60"),
        400,
        "messages",
        "characters that the model's tokenizer does not know",
    ),
    (CHAT, said(role="tool", content="x"), 400, "messages[1].tool_call_id", "missing"),
    (
        CHAT,
        said(role="user", content="x", tool_calls=call("{}")),
        400,
        "messages[1].tool_calls",
        "only allowed with role 'assistant'",
    ),
    (
        CHAT,
        said(role="assistant", tool_calls=call("{")),
        400,
        "messages[1].tool_calls[0].function.arguments",
        "must be a JSON object",
    ),
    (
        CHAT,
        said(role="assistant", tool_calls=call("[1]")),
        400,
        "messages[1].tool_calls[0].function.arguments",
        "must be a JSON object",
    ),
    (
        CHAT,
        said(role="assistant", tool_calls=[{"id": "c"}]),
        400,
        "messages[1].tool_calls[0].function",
        "missing parameter",
    ),
    (CHAT, chat(temperature=-1), 400, "temperature", "greater than or equal to 0"),
    (CHAT, chat(temperature=2.5), 400, "temperature", "less than or equal to 2"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "valid number"),
    (
        CHAT,
        chat(temprature=1),
        400,
        "temprature",
        "unknown parameter 'temprature'. Did you mean 'temperature'?",
    ),
    (CHAT, chat(top_p=0), 400, "top_p", "greater than 0"),
    (CHAT, chat(top_p=1.5), 400, "top_p", "less than or equal to 1"),
    (CHAT, chat(top_k=-2), 400, "top_k", "greater than or equal to -1"),
    (CHAT, chat(top_k=1.5), 400, "top_k", "valid integer"),
    (CHAT, chat(min_p=2), 400, "min_p", "less than or equal to 1"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", "greater than or equal to 0.01"),
    (CHAT, chat(n=0), 400, "n", "greater than or equal to 1"),
    (CHAT, chat(n=129), 400, "n", "less than or equal to 128"),
    (CHAT, chat(n=True), 400, "n", "valid integer"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    (CHAT, chat(max_tokens=-5), 400, "max_tokens", "greater than or equal to 1"),
    (CHAT, chat(max_tokens="4"), 400, "max_tokens", "valid integer"),
    (CHAT, chat(max_tokens=10**6), 400, "messages", "maximum context length is 512 tokens"),
    (CHAT, chat(max_completion_tokens=5), 400, "max_tokens", "differ"),
    (CHAT, chat(seed="x"), 400, "seed", "valid integer"),
    (CHAT, chat(seed=2**70), 400, "seed", "less than"),
    (CHAT, chat(stop=""), 400, "stop", "a text of 1 to 1000 characters"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop", "at most 16"),
    (CHAT, chat(stop=["a", 1]), 400, "stop", "list of at most 16"),
    (CHAT, chat(stop=[""]), 400, "stop", "1 to 1000 characters"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]", "greater than or equal to 0"),
    (CHAT, chat(stop_token_ids=[10**6]), 400, "stop_token_ids", "vocabulary"),
    (CHAT, chat(stream="yes"), 400, "stream", "valid boolean"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "stream = true"),
    (
        CHAT,
        chat(stream=True, stream_options={"x": 1}),
        400,
        "stream_options.x",
        "unknown parameter",
    ),
    (CHAT, chat(logprobs=3), 400, "logprobs", "valid boolean"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "less than or equal to 20"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs", "greater than or equal to 0"),
    (CHAT, chat(logprobs=True, top_logprobs=True), 400, "top_logprobs", "valid integer"),
    (CHAT, chat(top_logprobs=5), 400, "top_logprobs", "needs logprobs = true"),
    (CHAT, chat(logit_bias={"5": 100}), 400, "logit_bias", "not supported"),
    (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty", "less than or equal to 2"),
    (CHAT, chat(frequency_penalty=-2.5), 400, "frequency_penalty", "greater than or equal to -2"),
    (
        CHAT,
        chat(response_format={"type": "xml"}),
        400,
        "response_format.type",
        "'text', 'json_object' or 'json_schema'",
    ),
    (
        CHAT,
        chat(response_format={"type": "json_schema"}),
        400,
        "response_format.json_schema",
        "missing",
    ),
    (CHAT, chat(echo=True), 400, "echo", "not supported"),
    (CHAT, chat(min_tokens=3), 400, "min_tokens", "not supported"),
    (CHAT, chat(skip_special_tokens=False), 400, "skip_special_tokens", "not supported"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "tools is empty"),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice",
        "'g' is not in tools",
    ),
    (
        "/v1/responses",
        {"model": "tiny", "input": "hi", "previous_response_id": "resp_1"},
        400,
        "previous_response_id",
        "not supported",
    ),
    ("/v1/responses", {"model": "tiny", "input": []}, 400, "input", "expected a text, or a list"),
    (
        "/v1/responses",
        {"model": "tiny", "input": "hi", "tools": [{"type": "web_search"}]},
        400,
        "tools",
        "'web_search' is not supported",
    ),
    (
        "/v1/responses",
        {"model": "tiny", "input": "hi", "top_p": 7},
        400,
        "top_p",
        "less than or equal to 1",
    ),
    ("/chat/completions", chat(), 404, None, "Did you mean /v1/chat/completions?"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function", "missing parameter"),
    (CHAT, chat(tools=[TOOL], tool_choice="always"), 400, "tool_choice", "expected 'auto'"),
    (CHAT, chat(metadata={"a": 1}), 400, "metadata", "valid string"),
    (TEXT, text(prompt=""), 400, "prompt", "empty"),
    (TEXT, text(prompt=[]), 400, "prompt", "empty"),
    (TEXT, text(prompt=[[]]), 400, "prompt", "empty"),
    (TEXT, text(prompt=[1, "a"]), 400, "prompt", "expected a text, token ids"),
    (TEXT, text(prompt=[-1]), 400, "prompt", "numbers >= 0"),
    (TEXT, text(prompt=[10**6]), 400, "prompt", "vocabulary"),
    (
        TEXT,
        text(prompt="a" * 600),
        400,
        "prompt",
        (
            "maximum context length is 512 tokens. However, you requested 4 tokens for the"
            " completion and your prompt has 600"
        ),
    ),
    (TEXT, text(prompt=["a"] * 300), 400, "prompt", "the queue of 256 prompts"),
    (TEXT, text(prompt=["a"] * 200, n=100), 400, "n", "exceeds 1024 completions"),
    (TEXT, text(logprobs=6), 400, "logprobs", "less than or equal to 5"),
    (TEXT, text(logprobs=-1), 400, "logprobs", "greater than or equal to 0"),
    (TEXT, text(logprobs=True), 400, "logprobs", "valid integer"),
    (TEXT, text(top_logprobs=2), 400, "top_logprobs", "unknown parameter"),
    (TEXT, text(prompt={"text": "x"}), 400, "prompt", "expected a text, token ids"),
    (TEXT, text(prompt=None), 400, "prompt", "missing parameter 'prompt'"),
    (TEXT, text(echo="yes"), 400, "echo", "valid boolean"),
    (TEXT, text(max_tokens=-1), 400, "max_tokens", "greater than or equal to 0"),
    (TEXT, text(suffix="x"), 400, "suffix", "not supported"),
    (TEXT, text(messages=SAY), 400, "messages", "unknown parameter"),
    ("/v1/nothing", {}, 404, None, "path not found: POST /v1/nothing"),
    ("/v1/models", {}, 405, None, "POST is not allowed on /v1/models"),
    (CHAT, b" " * (MAX_BODY + 1), 413, None, "bytes"),
]


def check(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer. It must have exactly OpenAI's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] in ("invalid_request_error", "rate_limit_error")
    return dict(body["error"])


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(("path", "body", "status", "param", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_refused_in_openais_form(
    server: Running,
    path: str,
    body: dict[str, Any] | bytes,
    status: int,
    param: str | None,
    words: str,
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    error = check(
        httpx.post(
            server.url + path,
            content=content,
            headers={"content-type": "application/json"},
            timeout=30,
        ),
        status,
    )
    assert error["param"] == param
    assert words in error["message"]
    assert httpx.post(server.url + TEXT, json=text(max_tokens=1), timeout=30).status_code == 200


@pytest.mark.slow
def test_all_hostile_requests_leave_the_server_running(server: Running) -> None:
    assert len({(path, repr(body)) for path, body, *_ in BAD}) == len(BAD) >= 60
    server.idle()
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "weight_version": 0}
    assert (
        server.client().completions.create(model="tiny", prompt="a", max_tokens=3, seed=0).usage
        is not None
    )
    page = httpx.get(f"{server.url}/metrics").text
    assert 'status="5' not in page


def test_client_library_parses_the_errors(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p") as refused:
        server.client().chat.completions.create(model="tiny", messages=SAY, top_p=3)  # type: ignore[arg-type]
    assert (refused.value.param, refused.value.code) == ("top_p", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.client().models.retrieve("other")


def test_only_json_is_taken(server: Running) -> None:
    """A web page can make a browser post text or a form to a loopback address without permission,
    but not JSON.
    """
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        check(
            httpx.post(
                server.url + CHAT, content=json.dumps(chat()), headers={"content-type": kind}
            ),
            415,
        )
    assert (
        httpx.post(
            server.url + CHAT,
            content=json.dumps(chat()),
            headers={"content-type": "application/json; charset=utf-8"},
        ).status_code
        == 200
    )


def test_fields_that_are_null_or_change_nothing_are_accepted(server: Running) -> None:
    """Clients send all fields that they know, most of them empty. They also send an answer of the
    server back in the next request.
    """
    client = server.client()
    first = client.chat.completions.create(
        model="tiny", messages=SAY, max_tokens=4, user="me", presence_penalty=0, n=None, stop=None
    )  # type: ignore[arg-type]
    again: list[Any] = [
        *SAY,
        first.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "and"}], "name": "bob"},
    ]
    client.chat.completions.create(
        model="tiny", messages=again, max_tokens=4, response_format={"type": "text"}, store=False
    )


@pytest.mark.slow
def test_the_key(chat_policy: Policy) -> None:
    with running(chat_policy, api_key="s3cret") as server:
        for key in ("s", "wrong", "s3cret.", "S3CRET"):
            for path in ("/v1/models", "/metrics", CHAT):
                assert (
                    check(
                        httpx.get(server.url + path, headers={"authorization": f"Bearer {key}"}),
                        401,
                    )["code"]
                    == "invalid_api_key"
                )
        check(httpx.post(server.url + CHAT, json=chat()), 401)
        check(httpx.get(server.url + "/v1/models", headers={"authorization": b"Bearer \xe9"}), 401)
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert server.client("s3cret").models.list().data[0].id == "tiny"
        assert httpx.get(f"{server.url}/health").status_code == 200
        for scheme in ("bearer", "BEARER", "Bearer "):  # the case of a scheme has no meaning
            asked = {"authorization": f"{scheme} s3cret"}
            assert httpx.get(f"{server.url}/v1/models", headers=asked).status_code == 200, scheme
        for other in ("Basic s3cret", "s3cret", "Bearers3cret", "Bearer", "Bearer s3cret x"):
            check(httpx.get(f"{server.url}/v1/models", headers={"authorization": other}), 401)


@pytest.mark.slow
def test_a_full_queue_is_429_and_empties(chat_policy: Policy) -> None:
    """The engine is stopped in a step: one prompt runs, two wait, and the next is refused. Then all
    three are answered.
    """
    gate = threading.Event()

    def hold(engine: Engine) -> None:
        step = engine.step

        def held() -> Any:
            gate.wait(20)
            return step()

        engine.step = held  # type: ignore[method-assign]

    with running(chat_policy, hold, max_queue=3, max_running=1) as server:
        answers: list[int] = []

        def ask() -> None:
            answers.append(httpx.post(server.url + TEXT, json=text(), timeout=30).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while server.served.engine.waiting < 3 and any(thread.is_alive() for thread in threads):
            time.sleep(0.005)
        for body in (text(), text(stream=True)):
            refused = httpx.post(server.url + TEXT, json=body, timeout=30)
            assert check(refused, 429)["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
        assert server.metric("waiting_prompts") == 3
        gate.set()
        for thread in threads:
            thread.join(30)
        assert answers == [200, 200, 200]
        server.idle()
        assert httpx.post(server.url + TEXT, json=text(), timeout=30).status_code == 200


@pytest.mark.slow
def test_a_prompt_that_can_never_fit_the_cache_is_a_400(chat_policy: Policy) -> None:
    with running(chat_policy, kv_tokens=64) as server:
        assert (
            "maximum context length is 64 tokens"
            in check(
                httpx.post(server.url + TEXT, json=text(prompt=["a", "b" * 90], max_tokens=8)), 400
            )["message"]
        )
        server.idle()
        assert httpx.post(server.url + TEXT, json=text(prompt="b" * 30)).status_code == 200


def test_an_address_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
        assert (
            f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
        )
    assert main(["serve", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "no checkpoint, run or model at" in capsys.readouterr().err
