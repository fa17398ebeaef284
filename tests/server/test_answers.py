"""The `openai` client gets from a real server the answer that the engine gives for the same prompt,
parameters and seed, in every form of request.
"""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from serving import Running

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.renderer.renderer import Renderer
from sixfold.types import SamplingParams, Task
from sixfold_serving.exchange import noise_key
from sixfold_serving.record import read_trajectories

HELLO: list[Any] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "say something"},
]
OURS = {"return_token_ids": True}


def direct(server: Running, prompt: list[int], n: int, **params: Any) -> list[Sequence]:
    """The same completions from a separate engine."""
    engine = Engine(CausalLM(server.engine.runner.model.module), kv_tokens=4096)
    sampling = SamplingParams(
        **({"max_tokens": 16, "stop_token_ids": server.served.stop_token_ids} | params)
    )
    engine.add(noise_key(prompt), prompt, sampling, list(range(n)))
    return sorted(engine.run(), key=lambda s: s.sample)


def renderer(server: Running) -> Renderer:
    return Renderer(server.served.encoders[0].tokenizer)


def chat_tokens(server: Running, messages: list[Any] = HELLO) -> list[int]:
    return renderer(server).encode(Task("t", tuple(messages)))


@pytest.mark.slow
def test_chat_equals_the_engine_token_for_token(server: Running) -> None:
    prompt = chat_tokens(server)
    answer = server.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        n=3,
        seed=5,
        max_tokens=12,
        temperature=0.8,
        logprobs=True,
        extra_body=OURS,
    )
    expected = direct(server, prompt, 3, max_tokens=12, temperature=0.8, seed=5)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice, s in zip(answer.choices, expected, strict=True):
        sampled = s.tokens[len(prompt) :]
        extra: dict[str, Any] = choice.model_extra or {}
        assert extra["token_ids"] == sampled and extra["prompt_token_ids"] == prompt
        assert extra["token_logprobs"] == s.logp and extra["weight_versions"] == [0] * len(sampled)
        assert choice.message.content == renderer(server).decode(sampled)
        assert choice.finish_reason == s.finish_reason
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [t.logprob for t in choice.logprobs.content] == s.logp
        assert [t.token for t in choice.logprobs.content] == [
            renderer(server).piece(t) for t in sampled
        ]
    lengths = [len(s.logp) for s in expected]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(prompt),
        sum(lengths),
    )
    assert answer.usage.total_tokens == len(prompt) + sum(lengths)


@pytest.mark.slow
def test_chat_shows_the_likeliest_tokens(server: Running) -> None:
    prompt = chat_tokens(server)
    piece = renderer(server).piece
    create = server.client().chat.completions.create
    asked: dict[str, Any] = dict(
        model="tiny", messages=HELLO, seed=5, max_tokens=12, temperature=0.8, logprobs=True
    )
    (expected,) = direct(server, prompt, 1, max_tokens=12, temperature=0.8, seed=5, top_logprobs=3)
    assert len(expected.top) == len(expected.logp) and all(len(top) == 3 for top in expected.top)
    shown = [[(piece(t), p) for t, p in top.items()] for top in expected.top]
    whole = create(**asked, top_logprobs=3).choices[0].logprobs
    streamed = [
        c.logprobs for chunk in create(**asked, top_logprobs=3, stream=True) for c in chunk.choices
    ]
    for contents in ([whole], streamed):
        tokens = [token for logprobs in contents if logprobs for token in logprobs.content or ()]
        assert [[(t.token, t.logprob) for t in token.top_logprobs] for token in tokens] == shown
        assert [token.logprob for token in tokens] == expected.logp
        assert all(
            bytes(t.bytes or ()).decode() == t.token for token in tokens for t in token.top_logprobs
        )
    plain = create(**asked).choices[0].logprobs
    assert (
        plain is not None
        and plain.content is not None
        and [t.top_logprobs for t in plain.content] == [[]] * len(expected.logp)
    )


def test_the_likeliest_token_is_what_greedy_takes_and_truncation_leaves_fewer(
    server: Running,
) -> None:
    create = server.client().chat.completions.create
    greedy = (
        create(
            model="tiny",
            messages=HELLO,
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
        )
        .choices[0]
        .logprobs
    )
    assert greedy is not None
    for token in greedy.content or ():
        assert len(token.top_logprobs) == 20 and (
            token.top_logprobs[0].token,
            token.top_logprobs[0].logprob,
        ) == (token.token, token.logprob)
    two = (
        create(
            model="tiny",
            messages=HELLO,
            max_tokens=8,
            logprobs=True,
            top_logprobs=20,
            extra_body={"top_k": 2},
        )
        .choices[0]
        .logprobs
    )
    assert two is not None
    for token in two.content or ():
        assert len(token.top_logprobs) == 2 and sum(
            math.exp(t.logprob) for t in token.top_logprobs
        ) == pytest.approx(1, abs=1e-5)


def test_completions_show_the_likeliest_and_the_sampled_token(server: Running) -> None:
    prompt = list(server.served.encoders[0].encode_text("count"))
    asked: dict[str, Any] = dict(max_tokens=12, top_k=3)
    drawn = (
        (seed, s)
        for seed in range(50)
        for s in direct(server, prompt, 1, seed=seed, top_logprobs=2, **asked)
    )
    seed, expected = next(
        (seed, s)
        for seed, s in drawn
        if {t in top for t, top in zip(s.tokens[len(prompt) :], s.top, strict=True)}
        == {True, False}
    )
    answer = server.client().completions.create(
        model="tiny", prompt="count", seed=seed, logprobs=2, extra_body=asked
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    sampled = zip(expected.tokens[len(prompt) :], expected.logp, expected.top, strict=True)
    assert logprobs.top_logprobs == [
        {renderer(server).piece(t): p for t, p in (top | {token: logp}).items()}
        for token, logp, top in sampled
    ]
    assert {len(top) for top in logprobs.top_logprobs or ()} == {
        2,
        3,
    }, "a token outside of the best two is added"


def test_alternatives_of_one_request_do_not_change_another(server: Running) -> None:
    """In one batch, only the request for alternatives gets them. Both requests get the same tokens
    as alone.
    """
    prompt = chat_tokens(server)
    engine = Engine(server.engine.runner.model, kv_tokens=4096)
    params = [SamplingParams(max_tokens=9, seed=1, top_logprobs=n) for n in (0, 2)]
    for k, p in enumerate(params):
        engine.add(f"{k}", prompt, p, [0])
    plain, asking = sorted(engine.run(), key=lambda s: s.request.key)
    assert plain.top == [] and [len(top) for top in asking.top] == [2] * len(asking.logp)
    for k, sequence in enumerate((plain, asking)):
        engine.add(f"{k}", prompt, params[0], [0])
        (alone,) = engine.run()
        assert (alone.tokens, alone.logp) == (sequence.tokens, sequence.logp)


def test_completions_take_texts_and_tokens_and_number_their_choices(server: Running) -> None:
    texts = ["one and", "two"]
    tokens = [list(server.served.encoders[0].encode_text(t)) for t in texts]
    create = server.client().completions.create
    by_text = create(model="tiny", prompt=texts, n=2, seed=3, max_tokens=9, logprobs=0)
    by_token = create(model="tiny", prompt=tokens, n=2, seed=3, max_tokens=9, logprobs=0)
    expected = [s for prompt in tokens for s in direct(server, prompt, 2, max_tokens=9, seed=3)]
    for answer in (by_text, by_token):
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert [c.text for c in answer.choices] == [
            renderer(server).decode(s.tokens[len(s.request.prompt) :]) for s in expected
        ]
        assert [c.logprobs.token_logprobs for c in answer.choices if c.logprobs] == [
            s.logp for s in expected
        ]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_answer(server: Running, n: int) -> None:
    create = server.client().chat.completions.create
    asked: dict[str, Any] = dict(
        model="tiny", messages=HELLO, n=n, seed=11, max_tokens=20, logprobs=True, extra_body=OURS
    )
    whole = create(**asked)
    text, tokens, logps = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)]  # type: ignore[var-annotated]
    reasons: dict[int, str] = {}
    roles, usage, chunks = [], None, 0
    for chunk in create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        chunks += 1
        for c in chunk.choices:
            roles += [c.delta.role] if c.delta.role else []
            text[c.index] += c.delta.content or ""
            tokens[c.index] += (c.model_extra or {}).get("token_ids", [])
            logps[c.index] += [
                t.logprob for t in (c.logprobs.content if c.logprobs and c.logprobs.content else [])
            ]
            if c.finish_reason:
                reasons[c.index] = c.finish_reason
    assert text == [c.message.content for c in whole.choices]
    assert tokens == [(c.model_extra or {})["token_ids"] for c in whole.choices]
    assert logps == [(c.model_extra or {})["token_logprobs"] for c in whole.choices]
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert roles == ["assistant"] * n and usage == whole.usage
    assert chunks > 8, "it came in one piece"


def test_a_streamed_completion_adds_up_too(server: Running) -> None:
    create = server.client().completions.create
    whole = create(model="tiny", prompt="count", seed=2, max_tokens=20)
    parts = [
        c
        for chunk in create(model="tiny", prompt="count", seed=2, max_tokens=20, stream=True)
        for c in chunk.choices
    ]
    assert "".join(c.text for c in parts) == whole.choices[0].text
    assert [c.finish_reason for c in parts[-1:]] == [whole.choices[0].finish_reason]


@pytest.mark.slow
def test_a_seed_repeats_and_no_seed_does_not(server: Running) -> None:
    def text(**more: Any) -> str | None:
        return (
            server.client()
            .chat.completions.create(model="tiny", messages=HELLO, max_tokens=16, **more)
            .choices[0]
            .message.content
        )

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0)


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    "more",
    [
        dict(top_p=0.5),
        dict(extra_body=dict(top_k=3)),
        dict(extra_body=dict(min_p=0.9, repetition_penalty=1.5)),
    ],
)
def test_truncation_reaches_the_engine(server: Running, more: dict[str, Any]) -> None:
    prompt = chat_tokens(server)
    body = dict(more.get("extra_body", {}))
    asked = dict(more) | {"extra_body": body | OURS}
    answer = server.client().chat.completions.create(
        model="tiny", messages=HELLO, seed=5, max_tokens=10, **asked
    )
    (expected,) = direct(
        server,
        prompt,
        1,
        max_tokens=10,
        seed=5,
        **(body | {k: v for k, v in more.items() if k != "extra_body"}),
    )
    assert (answer.choices[0].model_extra or {})["token_logprobs"] == expected.logp


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_sampling(server: Running, stream: bool) -> None:
    prompt = chat_tokens(server)
    seed, free = next(
        (seed, s)
        for seed in range(50)
        for s in direct(server, prompt, 1, max_tokens=40, seed=seed)
        if len(s.logp) > 20
    )
    text = renderer(server).decode(free.tokens[len(prompt) :])
    stop = text[10:13]
    cut = text.index(stop)
    asked: dict[str, Any] = dict(
        model="tiny", messages=HELLO, seed=seed, max_tokens=40, stop=[stop, "zzzz"], extra_body=OURS
    )
    if stream:
        choices = [
            c
            for chunk in server.client().chat.completions.create(**asked, stream=True)
            for c in chunk.choices
        ]
        content, reason = "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason
        sampled = [t for c in choices for t in (c.model_extra or {}).get("token_ids", [])]
    else:
        (choice,) = server.client().chat.completions.create(**asked).choices
        content, reason, sampled = (
            choice.message.content or "",
            choice.finish_reason,
            (choice.model_extra or {})["token_ids"],
        )
    assert (content, reason) == (text[:cut], "stop")
    assert sampled == free.tokens[len(prompt) :][: cut + len(stop)], (
        "one character is one token here"
    )
    server.idle()


def test_stop_tokens(server: Running) -> None:
    prompt = chat_tokens(server)
    (free,) = direct(server, prompt, 1, max_tokens=30, seed=9)
    sampled = free.tokens[len(prompt) :]
    stop = sampled[6]
    answer = server.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        seed=9,
        max_tokens=30,
        extra_body=OURS | {"stop_token_ids": [stop]},
    )
    assert (answer.choices[0].model_extra or {})["token_ids"] == sampled[: sampled.index(stop) + 1]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_the_limit_is_the_servers_where_the_request_has_none(server: Running) -> None:
    create = server.client().chat.completions.create
    lengths = {
        (create(model="tiny", messages=HELLO, seed=s, **limit).usage or 0).completion_tokens  # type: ignore[union-attr]
        for s, limit in enumerate([{}, {"max_completion_tokens": 16}, {"max_tokens": 16}])
    }
    assert max(lengths) == 16


def test_every_exchange_is_recorded_as_it_was_returned(server: Running) -> None:
    recorder = server.served.recorder
    assert recorder is not None
    before = len(read_trajectories(recorder.path))
    answer = server.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        n=2,
        seed=21,
        max_tokens=14,
        metadata={"task_id": "task 7"},
        extra_body=OURS,
    )
    stream = server.client().completions.create(
        model="tiny", prompt="abc", max_tokens=5, stream=True, extra_body=OURS
    )
    streamed = [c for chunk in stream for c in chunk.choices]
    new = read_trajectories(recorder.path)[before:]
    assert len(new) == 3
    for choice in answer.choices:
        (t,) = [t for t in new if t.task_id == "task 7" and t.sample == choice.index]
        extra: dict[str, Any] = choice.model_extra or {}
        p = t.prompt_length
        assert (t.tokens[:p], t.tokens[p:]) == (extra["prompt_token_ids"], extra["token_ids"])
        assert t.mask == [False] * p + [True] * (len(t.tokens) - p)
        assert (t.logp[p:], t.version[p:]) == (extra["token_logprobs"], extra["weight_versions"])
        assert (t.logp[:p], t.version[:p]) == ([0.0] * p, [-1] * p)
        assert (t.text, t.finish_reason) == (choice.message.content, choice.finish_reason)
    assert new[-1].tokens[3:] == [i for c in streamed for i in (c.model_extra or {})["token_ids"]]
    line = json.loads(recorder.path.read_bytes().splitlines()[-1])
    assert (line["prompt"], line["model"], line["task_id"]) == ("abc", "tiny", line["exchange"])


def test_the_record_of_a_truncated_exchange_says_what_was_kept(server: Running) -> None:
    recorder = server.served.recorder
    assert recorder is not None
    server.client().completions.create(
        model="tiny", prompt="abc", max_tokens=9, top_p=0.7, stop="b"
    )
    t = read_trajectories(recorder.path)[-1]
    assert t.kept is not None and len(t.kept) == len(t.tokens) - 3
    at = 0
    for token, count, mass in zip(t.tokens[3:], t.kept.counts, t.kept.mass, strict=True):
        assert token in t.kept.ids[at : at + count] and 0.7 <= mass <= 1.0 + 1e-12
        at += count


@pytest.mark.slow
def test_exchanges_that_no_trainer_can_score_are_recorded_and_left_out(server: Running) -> None:
    recorder = server.served.recorder
    assert recorder is not None
    create = server.client().completions.create
    before, lines = (
        len(read_trajectories(recorder.path)),
        len(recorder.path.read_bytes().splitlines()),
    )
    for more in (
        dict(presence_penalty=1.0),
        dict(frequency_penalty=0.5),
        dict(extra_body={"repetition_penalty": 1.2}),
        {},
    ):
        create(model="tiny", prompt="abc", max_tokens=3, **more)  # type: ignore[call-overload]
    assert len(recorder.path.read_bytes().splitlines()) == lines + 4
    assert len(read_trajectories(recorder.path)) == before + 1


@pytest.mark.slow
def test_models_health_and_metrics(server: Running) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    assert (
        httpx.get(f"{server.url}/v1/models/").json() == httpx.get(f"{server.url}/v1/models").json()
    )
    assert httpx.get(server.url).json()["base_url"] == f"{server.url}/v1"
    before = server.metric("decoded_tokens_total")
    client.completions.create(
        model="tiny", prompt=[5, 6], max_tokens=7, extra_body={"stop_token_ids": []}, seed=1
    )
    assert 1 <= server.metric("decoded_tokens_total") - before <= 7
