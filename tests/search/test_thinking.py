"""Budget forcing: where the end of thinking is written, and where it is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.rollout.fake_generator import FakeGenerator

from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import SampleKey, wait_for
from sixfold.types import SamplingParams, Task
from sixfold_search import Settings, search
from sixfold_search.task_search import Found

TASK = Task("t", "1+1=")


@pytest.fixture(scope="module")
def renderer(policy: Policy) -> Renderer:
    return Renderer(policy.tokenizer, policy.stop_token_ids)


def run(
    renderer: Renderer, says: dict[str, str], budget: int | None = None, **settings: Any
) -> Found:
    """Search with a policy that continues each text as `says` has it; "." is its end token."""
    (end,) = renderer.stop_token_ids[:1]

    def script(tokens: Sequence[int], params: SamplingParams, key: SampleKey) -> list[int]:
        assert key.origin is not None
        text = renderer.decode(tokens[key.origin :])
        (start,) = [one for one in says if text == one]
        return [end if letter == "." else renderer.plain(letter)[0] for letter in says[start]]

    params = SamplingParams(max_tokens=30, stop_token_ids=renderer.stop_token_ids)
    given = Settings(**{"think_end": "#", "think_more": "wait ", **settings})
    generator = FakeGenerator(renderer, script)
    return wait_for(
        search(
            generator,
            renderer,
            TASK,
            method="budget_forcing",
            params=params,
            settings=given,
            budget=budget,
        )
    )


def test_at_the_budget_the_end_of_thinking_is_written(renderer: Renderer) -> None:
    found = run(renderer, {"": "abcdefghij", "abcdef#": "42."}, think=6)
    assert found.text == "abcdef#42"
    assert found.best.finish_reason == "stop"
    assert [v == -1 for v in found.best.version[found.best.prompt_length :]] == [
        *[False] * 6, True, *[False] * 3
    ]  # fmt: skip


def test_an_end_within_the_bounds_is_left_alone(renderer: Renderer) -> None:
    found = run(renderer, {"": "abc#7.", "abc#": "7."}, think=6, think_min=2)
    assert found.text == "abc#7"


def test_an_early_end_of_thinking_is_replaced(renderer: Renderer) -> None:
    says = {"": "ab#7.", "abwait ": "cde#8.", "abwait cde#": "9."}
    found = run(renderer, says, think=20, think_min=6)
    assert found.text == "abwait cde#9"


def test_an_early_end_of_the_completion_is_replaced_too(renderer: Renderer) -> None:
    says = {"": "ab.", "abwait ": "cdefgh.", "abwait cdefgh": "."}
    found = run(renderer, says, think=20, think_min=6)
    assert found.text == "abwait cdefgh"


def test_without_tokens_for_thinking_it_answers_at_once(renderer: Renderer) -> None:
    found = run(renderer, {"#": "42."}, budget=len(renderer.encode(TASK)) + 10, think=20)
    assert found.text == "#42"


def test_waiting_ends_at_the_budget(renderer: Renderer) -> None:
    says = {"": "ab#", "abwait ": "c#", "abwait cwait ": "d#", "abwait cwait #": "5."}
    found = run(renderer, says, think=13, think_min=13)
    assert found.text == "abwait cwait #5"
