"""JSON modes and forced tool calls on random models: the answers always have the requested form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from serving import Running, running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.renderer.token_bytes import TokenBytes
from sixfold_serving import structured
from sixfold_serving.structured import Form, Grammars, lark_grammar

SAY: list[Any] = [{"role": "user", "content": "say something"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
ONE = {
    "type": "object",
    "properties": {"a": {"enum": [1]}},
    "required": ["a"],
    "additionalProperties": False,
}
NODE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}},
    "required": ["v"],
    "additionalProperties": False,
}
SHARED = {
    "$defs": {"v": {"enum": [1, 2]}},
    "type": "object",
    "properties": {"v": {"$ref": "#/$defs/v"}},
    "required": ["v"],
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name} | ({"parameters": parameters} if parameters else {}),
    }


@pytest.fixture
def llguidance() -> None:
    pytest.importorskip("llguidance")


@pytest.mark.mostly_slow(1)
@pytest.mark.usefixtures("llguidance")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_json_of_a_schema(
    server: Running, chat_policy: Policy, seed: int, speculation: str
) -> None:
    asked: dict[str, Any] = dict(
        model="tiny", messages=SAY, seed=seed, max_tokens=200, logprobs=True
    )
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
    }
    choice = server.client().chat.completions.create(**asked, response_format=form).choices[0]
    person = json.loads(choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert (
        person["name"] in ("ada", "bob")
        and person["age"] in range(100)
        and person["ok"] in (True, False)
    )
    assert choice.logprobs is not None and all(
        t.logprob <= 0 for t in choice.logprobs.content or ()
    )
    if speculation == "ngram":
        with running(chat_policy, speculation="ngram") as other:
            again = other.client().chat.completions.create(**asked, response_format=form).choices[0]
            assert again.message.content == choice.message.content


@pytest.mark.slow
@pytest.mark.usefixtures("llguidance")
def test_json_of_an_object_with_other_samples_beside(server: Running) -> None:
    """A random model writes inside a string until the token limit. So the answer must be the
    beginning of an object.
    """
    create = server.client().chat.completions.create
    asked: dict[str, Any] = dict(model="tiny", messages=SAY, n=3, seed=2, max_tokens=60)
    free = create(**asked)
    bound = create(**asked, response_format={"type": "json_object"})
    assert all((choice.message.content or "").lstrip().startswith("{") for choice in bound.choices)
    assert [c.message.content for c in create(**asked).choices] == [
        c.message.content for c in free.choices
    ]


@pytest.mark.usefixtures("llguidance")
@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}],
)
def test_a_forced_call_of_a_function_without_parameters_has_none(
    server: Running, parameters: dict[str, Any] | None
) -> None:
    function = {"name": "now"} | ({} if parameters is None else {"parameters": parameters})
    tools: list[Any] = [{"type": "function", "function": function}]
    for seed in range(4):
        (answer,) = server.client().chat.completions.create(
            model="tiny", messages=[*SAY, {"role": "assistant", "content": []}, *SAY],
            seed=seed, max_tokens=150, tools=tools,
            tool_choice={"type": "function", "function": {"name": "now"}},
        ).choices  # fmt: skip
        (call,) = answer.message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("now", "{}")


@pytest.mark.mostly_slow(1)
@pytest.mark.usefixtures("llguidance")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named", "auto"])
def test_tool_choice(server: Running, choice: str, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "node"}}
    asked: dict[str, Any] = dict(
        model="tiny", messages=SAY, seed=5, max_tokens=150,
        tools=[tool("one", ONE), tool("node", NODE)], parallel_tool_calls=False,
        tool_choice=named if choice == "named" else choice,
    )  # fmt: skip
    if stream:
        parts = [
            c
            for chunk in server.client().chat.completions.create(**asked, stream=True)
            for c in chunk.choices
        ]
        calls = [
            (call.function.name, call.function.arguments)
            for c in parts
            for call in c.delta.tool_calls or ()
        ]
        reason = parts[-1].finish_reason
    else:
        (answer,) = server.client().chat.completions.create(**asked).choices
        calls = [
            (call.function.name, call.function.arguments)
            for call in answer.message.tool_calls or ()
        ]  # type: ignore[union-attr]
        reason = answer.finish_reason
    if choice == "auto":
        assert not calls, "a random model calls nothing by itself"
        return
    ((name, arguments),) = calls
    assert reason == "tool_calls" and (choice != "named" or name == "node")
    assert (
        json.loads(arguments)["v"] in (1, 2)
        if name == "node"
        else json.loads(arguments) == {"a": 1}
    )


@pytest.mark.usefixtures("llguidance")
@pytest.mark.parametrize(
    "schema", [{"type": "wish"}, {"$ref": "#/nowhere"}, {"minimum": "x", "type": "integer"}]
)
def test_a_schema_that_cannot_be_followed_is_refused(
    server: Running, schema: dict[str, Any]
) -> None:
    body = {
        "model": "tiny",
        "messages": SAY,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.slow
@pytest.mark.usefixtures("llguidance")
def test_a_tokenizer_that_cannot_write_json_is_refused(policy: Policy) -> None:
    """The default alphabet has no braces. Without a refusal the answer would begin with
    <|unknown|>.
    """
    with running(policy) as plain:
        body = {"model": "tiny", "messages": SAY, "response_format": {"type": "json_object"}}
        answer = httpx.post(f"{plain.url}/v1/chat/completions", json=body)
    assert (
        answer.status_code == 400
        and "tokenizer" in answer.json()["error"]["message"]
        and "{" in answer.json()["error"]["message"]
    )


def test_without_the_library_it_is_refused_by_name(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "find_spec", lambda name: None)
    body = {"model": "tiny", "messages": SAY, "response_format": {"type": "json_object"}}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "response_format" and "sixfold[structured]" in error["message"]


@pytest.mark.usefixtures("llguidance")
def test_each_tool_has_its_own_definitions() -> None:
    tokenizer = byte_level()
    form = Form(tools=(("f", SHARED), ("g", SHARED)), calls=True)
    matcher = (
        Grammars(Renderer(tokenizer), len(tokenizer), (tokenizer.eos_token_id,))
        .compile(form)
        .start()
    )
    written = tokenizer('<tool_call>{"name": "g", "arguments": {"v": ')["input_ids"]
    one, two, three = tokenizer("123")["input_ids"]
    allowed = matcher.allowed(written)
    assert allowed[one] and allowed[two] and not allowed[three]


def test_a_grammar_of_calls_or_text() -> None:
    free = Form(tools=(("f", {}),))
    assert free.is_free
    both = lark_grammar(
        Form(schema={"type": "object"}, tools=(('say "x"', {"type": "object"}),), many=False)
    )
    assert both.startswith("start: calls | text\n") and "calls: call\n" in both
    assert r'"{\"name\": \"say \\\"x\\\"\", \"arguments\": "' in both


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte is a token, in GPT-2's alphabet, and some tokens are words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|end|>", *alphabet, "Ġthe", '{"'])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2: words with a mark for the space, and bytes as <0xE4>."""
    vocabulary = {"<unk>": 0, "</s>": 1, "\u2581a": 2, "b": 3} | {
        f"<0x{b:02X}>": 4 + b for b in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_bytes_of_partial_characters() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        token_bytes = TokenBytes(tokenizer)
        ids = tokenizer("\u4f60", add_special_tokens=False)["input_ids"]
        assert len(ids) == 3 and [token_bytes(i) for i in ids] == [b"\xe4", b"\xbd", b"\xa0"]
    level, fallback = byte_level(), byte_fallback()
    assert TokenBytes(level)(level.convert_tokens_to_ids("Ġthe")) == b" the"
    assert TokenBytes(fallback)(2) == b" a" and TokenBytes(fallback)(1) == b"</s>"
    assert TokenBytes(level)(10**6) == b""


@pytest.mark.usefixtures("llguidance")
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_grammars_work_on_bytes(make: Any) -> None:
    """A character of three tokens is allowed byte by byte. The end token is allowed only where the
    grammar ends.
    """
    tokenizer = make()
    (end,) = [tokenizer.eos_token_id]
    vocabulary = len(tokenizer) + 5  # a head wider than the tokenizer
    matcher = (
        Grammars(Renderer(tokenizer), vocabulary, (end,))
        .compile(Form(schema={"const": "\u4f60"}))
        .start()
    )
    token_of = {TokenBytes(tokenizer)(i): i for i in reversed(range(len(tokenizer)))}
    completion: list[int] = []
    for byte in '"\u4f60"'.encode():
        allowed = matcher.allowed(completion)
        assert (
            allowed.shape == (vocabulary,)
            and not allowed[end]
            and not allowed[len(tokenizer) :].any()
        )
        completion.append(token_of[bytes([byte])])
        assert allowed[completion[-1]]
    assert matcher.allowed(completion).nonzero()[:, 0].tolist() == [end]
    assert torch.equal(matcher.allowed(completion[:2]), matcher.allowed(completion[:2])), (
        "it goes back"
    )
    assert matcher.allowed([token_of.get(b"b", 3)]).all(), (
        "behind what is not allowed, nothing is drawn"
    )
