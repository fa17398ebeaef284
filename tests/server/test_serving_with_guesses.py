"""A server with speculation: the same answers, stop strings that end within the tokens of a step,
and refused draft models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import ALPHABET, OPTIONS, Running, running
from test_answers import HELLO, OURS, chat_tokens, direct, renderer

from sixfold.errors import UserError
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold_serving.record import read_trajectories
from sixfold_serving.serve import make_served


def saved(policy: Policy, folder: Path) -> str:
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def ask(server: Running, seed: int, **more: Any) -> Any:
    return (
        server.client()
        .chat.completions.create(
            model="tiny", messages=HELLO, seed=seed, max_tokens=40, extra_body=OURS, **more
        )
        .choices[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_at_the_very_token_that_ends_them(
    chat_policy: Policy, tmp_path: Path, stream: bool
) -> None:
    """The draft is the model itself: five tokens per step. The stop strings end at each position of
    a step.
    """
    with running(
        chat_policy, draft=saved(chat_policy, tmp_path / "draft"), record=tmp_path / "record"
    ) as server:
        prompt = chat_tokens(server)
        seed, free = next(
            (seed, s)
            for seed in range(50)
            for s in direct(server, prompt, 1, max_tokens=40, seed=seed)
            if len(s.logp) > 30
        )
        completion = free.tokens[len(prompt) :]
        text, ends = renderer(server).decode(completion), []
        for at in range(10, 20):
            stop = text[at : at + 3]
            cut = text.index(stop)
            ends.append(
                next(
                    n
                    for n in range(len(completion))
                    if stop in renderer(server).decode(completion[:n])
                )
            )
            if stream:
                chunks = list(server.client().chat.completions.create(
                    model="tiny", messages=HELLO, seed=seed, max_tokens=40, extra_body=OURS,
                    stop=stop, stream=True
                ))  # fmt: skip
                deltas = [c for chunk in chunks for c in chunk.choices]
                content, reason = (
                    "".join(c.delta.content or "" for c in deltas),
                    deltas[-1].finish_reason,
                )
                sampled = [t for c in deltas for t in (c.model_extra or {}).get("token_ids", [])]
            else:
                choice = ask(server, seed, stop=stop)
                content, reason, sampled = (
                    choice.message.content or "",
                    choice.finish_reason,
                    choice.model_extra["token_ids"],
                )
            assert (content, reason) == (text[:cut], "stop")
            assert sampled == completion[: ends[-1]]
        assert len({end % 5 for end in ends}) == 5
        assert server.metric("accepted_tokens_total") > 50 and server.metric("tokens_per_pass") > 2
        server.idle()
    (record,) = (tmp_path / "record").glob("*.jsonl")
    recorded = list(read_trajectories(record))
    assert [len(t.tokens) - len(prompt) for t in recorded] == ends
    assert all(len(t.logp) == len(t.version) == len(t.mask) == len(t.tokens) for t in recorded)


@pytest.mark.slow
def test_ngrams_change_no_answer(chat_policy: Policy) -> None:
    with running(chat_policy, speculation="ngram") as server:
        prompt = chat_tokens(server)
        for seed in range(2):
            (expected,) = direct(server, prompt, 1, max_tokens=40, seed=seed, temperature=0.0)
            extra = ask(server, seed, temperature=0.0).model_extra
            assert (extra["token_ids"], extra["token_logprobs"]) == (
                expected.tokens[len(prompt) :],
                expected.logp,
            )
        assert server.metric("proposed_tokens_total") > 10
        assert 0 < server.metric("acceptance_ratio") <= 1
        server.idle()


@pytest.mark.slow
def test_draft_model_with_other_vocabulary_or_shorter_context_is_refused(
    chat_policy: Policy, scratch_config: ScratchConfig, tmp_path: Path
) -> None:
    for changes, words in (
        (
            dict(alphabet=ALPHABET[::-1], context=512),
            "--draft.* vocabulary differs .* same tokenizer",
        ),
        (dict(alphabet=ALPHABET[:-1], context=512), "--draft.* vocabulary differs"),
        (
            dict(alphabet=ALPHABET, context=256),
            "--draft.* context of 256 tokens is shorter .* 512",
        ),
    ):
        other = load_policy(
            ModelConfig(scratch=scratch_config.model_copy(update=changes)), seed=1, device="cpu"
        )
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        options = OPTIONS.__class__(
            **{
                **vars(OPTIONS),
                "draft": saved(other, folder),
            }
        )
        with pytest.raises(UserError, match=words):
            make_served(chat_policy, options)
