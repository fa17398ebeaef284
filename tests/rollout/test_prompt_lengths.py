"""Prompts that do not fit are dropped and counted, or refused. Huge ones are not tokenized."""

from __future__ import annotations

from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.prompt_lengths import Fitting, fitting_tasks
from sixfold.types import Message, Task

TASKS = [Task("short", "ab"), Task("long", "abcdefgh"), Task("fits", "abcd")]


def renderer() -> Renderer:
    return Renderer(character_tokenizer("abcdefgh "))


def test_overlong_prompts_are_dropped_and_counted_or_refused() -> None:
    assert fitting_tasks(renderer(), TASKS, limit=6, overlong="drop") == Fitting(
        [TASKS[0], TASKS[2]], 1, 6
    )  # two tokens of template
    with pytest.raises(
        UserError, match=r"task long: the prompt has 10 tokens, but only 6 fit.*data.overlong"
    ):
        fitting_tasks(renderer(), TASKS, limit=6, overlong="error")
    assert fitting_tasks(renderer(), TASKS, limit=10, overlong="error") == Fitting(TASKS, 0, 10)


def test_nothing_left_is_refused() -> None:
    with pytest.raises(UserError, match="0 usable tasks: 3 read, 3 dropped"):
        fitting_tasks(renderer(), TASKS, limit=3, overlong="drop")
    assert fitting_tasks(renderer(), [], limit=3, overlong="drop") == Fitting([], 0, 0)


@pytest.mark.parametrize("chat", [False, True])
def test_a_huge_prompt_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    c, text = renderer(), "abcdefgh" * 1_000_000
    encoded: list[str] = []
    encode = c.encode_all
    monkeypatch.setattr(
        c, "encode_all", lambda tasks: encoded.extend(t.id for t in tasks) or encode(tasks)
    )
    prompt: Any = (
        (Message(role="system", content=text), Message(role="user", content="a")) if chat else text
    )
    tasks = [Task("huge", prompt), Task("a", "a")]
    # The longest token is "<|assistant|>", with 13 characters.
    with pytest.raises(UserError, match=r"task huge: the prompt has at least 61538[5-9] tokens"):
        fitting_tasks(c, tasks, limit=100, overlong="error")
    assert fitting_tasks(c, tasks, limit=100, overlong="drop") == Fitting([tasks[1]], 1, 3)
    assert "huge" not in encoded and "a" in encoded


def test_a_prompt_that_fits_is_never_refused_by_its_characters() -> None:
    """Blanks and text that the template drops do not become tokens."""
    c = renderer()
    c.tokenizer.chat_template = "{{ messages[-1]['content'] | trim }}"
    tasks = [
        Task("blank", " " * 1000 + "abc"),
        Task(
            "left out",
            (Message(role="system", content="a" * 9999), Message(role="user", content="abc")),
        ),
    ]
    assert fitting_tasks(c, tasks, limit=3, overlong="error") == Fitting(tasks, 0, 3)
