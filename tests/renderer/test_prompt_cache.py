"""The prompt cache: its keys are contents, not ids; its memory is compact and limited."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.prompt_cache import CACHED_TOKENS, PromptCache
from sixfold.renderer.renderer import Renderer
from sixfold.types import Message, Task


def tokens(task: Task) -> list[int]:
    return [ord(c) for c in task.prompt_text]


def test_tasks_with_the_same_id_have_different_prompts() -> None:
    renderer = Renderer(character_tokenizer("ab"))
    assert renderer.shown(renderer.encode(Task("0", "ab"))) == "<|user|>ab<|assistant|>"
    assert renderer.shown(renderer.encode(Task("0", "ba"))) == "<|user|>ba<|assistant|>"


def test_keys_of_texts_chats_and_turns_differ() -> None:
    def chat(*contents: str) -> Task:
        return Task("0", tuple(Message(role="user", content=c) for c in contents))

    cache = PromptCache(CACHED_TOKENS)
    prompts = [
        Task("0", "ab"),
        chat("ab"),
        chat("a", "b"),
        chat("b", "a"),
        Task("0", "userab"),
        Task("0", "a\ud800"),
    ]
    for number, task in enumerate(prompts):
        assert cache.get([task], lambda _, n=number: [[n]]) == [[number]]  # type: ignore[misc]
    assert cache.get(prompts, lambda _: []) == [[n] for n in range(len(prompts))]


def test_the_least_recently_used_prompts_are_dropped_at_the_limit() -> None:
    cache, made = PromptCache(capacity=10), []

    def make(tasks: Sequence[Task]) -> list[list[int]]:
        made.extend(task.prompt_text for task in tasks)
        return [tokens(task) for task in tasks]

    for prompt in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        assert cache.get([Task("0", prompt)], make) == [[ord(prompt[0])] * 4]
    assert made == ["aaaa", "bbbb", "cccc", "bbbb"]
    assert (len(cache), cache.tokens) == (2, 8)
    assert (
        len(cache.get([Task("0", "d" * 11)], make)[0]) == 11 and len(cache) == 0
    )  # longer than the limit: given, not kept
    made.clear()
    many = [Task("0", prompt) for prompt in ("eee", "fff", "eee", "ggg", "hhh")]
    assert cache.get(many, make) == [tokens(task) for task in many] and made == [
        "eee",
        "fff",
        "ggg",
        "hhh",
    ]
    assert (len(cache), cache.tokens) == (3, 9)


@pytest.mark.slow
def test_a_cached_token_takes_four_bytes() -> None:
    """A prompt takes about 300 more, for key, array and table. A Python integer takes 36."""
    cache, count, length = PromptCache(CACHED_TOKENS), 500, 1000
    tracemalloc.start()
    for n in range(count):
        cache.get([Task(str(n), str(n))], lambda _: [[100_000 + i for i in range(length)]])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < count * (4 * length + 400)
