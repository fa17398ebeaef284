"""Search on the embedded engine: what is counted equals the engine's counters."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.search.lines import Scores

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import wait_for
from sixfold.types import SamplingParams, Task
from sixfold_search import Settings, Stepping, search, tree
from sixfold_search.methods import METHODS
from sixfold_search.shared_scorer import SharedScorer
from sixfold_search.task_search import Found

TASK = Task("t", "17+25=42;17+2=19;1+")
"""Longer than a block of the cache."""
STEPS = Stepping("every:4")


@pytest.fixture
def generator(policy: Policy) -> Iterator[EngineGenerator]:
    """Without an end token, so that all completions are long."""
    generator = made(policy, kv_tokens=20_000)
    yield generator
    generator.close()


def made(policy: Policy, **more: Any) -> EngineGenerator:
    engine = Engine(CausalLM(copy.deepcopy(policy.model)), **more)
    return EngineGenerator(engine, Renderer(policy.tokenizer, policy.stop_token_ids))


def run(
    generator: EngineGenerator, policy: Policy, method: str, tasks: Sequence[Task] = (), **more: Any
) -> Any:
    """What is found of TASK, or of several tasks at once."""
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    given: dict[str, Any] = {
        "params": SamplingParams(max_tokens=32, seed=1),
        "settings": Settings(n=8, expand=4, think=10, think_min=4, think_end="#", think_more="+"),
        "stepping": STEPS,
        "scorer": Scores(lambda lines: len(set("".join(lines))) / 64),
    }
    given, thread = {**given, **more}, ThreadPoolExecutor(1)

    async def all_of() -> list[Found]:
        return await asyncio.gather(
            *(
                search(
                    generator,
                    renderer,
                    task,
                    method=method,
                    **{**given, "scorer": SharedScorer(given["scorer"], thread)},
                )
                for task in tasks or [TASK]
            )
        )

    found = wait_for(all_of())
    return found if tasks else found[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [None, 900])
def test_tokens_are_those_of_the_engine(
    generator: EngineGenerator, policy: Policy, method: str, budget: int | None
) -> None:
    found = run(generator, policy, method, budget=budget)
    stats = generator.engine.stats
    assert (found.cost.prefilled, found.cost.sampled) == (
        stats.prefill_tokens,
        stats.decoded_tokens,
    )
    assert found.cost.sampled > 0
    assert budget is None or found.cost.total <= budget


def test_tokens_of_steps_that_a_function_ends_are_those_of_the_engine(
    generator: EngineGenerator, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def ends(text):\n    return range(5, len(text), 5)\n")
    monkeypatch.setattr(tree, "PIECE", 4)
    found = run(generator, policy, "beam", stepping=Stepping(f"{tmp_path}/own.py:ends"))
    stats, cost = generator.engine.stats, found.cost
    assert (cost.prefilled, cost.sampled) == (stats.prefill_tokens, stats.decoded_tokens)
    assert cost.sampled > sum(t.sampled_length for t in found.candidates)


def test_a_beam_of_16_by_4_computes_each_prefix_once(
    generator: EngineGenerator, policy: Policy
) -> None:
    """Eight steps of four tokens. Without branches every step would compute its prefix again."""
    found = run(generator, policy, "beam", settings=Settings(n=64, expand=4))
    prompt = found.best.prompt_length
    # Of each kept chain the last token is computed again, as a prompt of its extensions.
    assert found.cost.sampled == 64 * 32
    assert found.cost.prefilled <= prompt + 16 * 7
    distinct = prompt + found.cost.sampled
    assert found.cost.prefilled + found.cost.sampled <= 1.1 * distinct
    alone = sum(16 * (prompt + 4 * step) for step in range(1, 8))
    assert alone > 20 * found.cost.prefilled


def test_a_search_has_the_same_result_after_others(
    generator: EngineGenerator, policy: Policy
) -> None:
    first = run(generator, policy, "mcts")
    run(generator, policy, "best_of_n")
    again = run(generator, policy, "mcts")
    assert (first.best.tokens, first.value) == (again.best.tokens, again.value)
    # Its prefixes were still in the cache, where an earlier search had left them.
    assert again.cost == first.cost


MANY = [Task(f"t{n}", f"{TASK.prompt}{n // 2}") for n in range(4)]
"""They share a block of the cache, and two have the same prompt."""


def empty(generator: EngineGenerator) -> None:
    wait_for(generator.call(lambda engine: engine.prefixes.clear()))


def check_at_once(policy: Policy, cache: str, methods: Sequence[str], budget: int | None) -> None:
    """Compare with searches alone. The cache has what the methods before have left."""
    generator = made(policy, kv_tokens=40_000, prefix_cache=cache)
    stats = generator.engine.stats
    for method in methods:
        first = stats.steps
        together = run(generator, policy, method, MANY, budget=budget)
        second = stats.steps
        for task, one in zip(MANY, together, strict=True):
            empty(generator)
            assert [one] == run(generator, policy, method, [task], budget=budget), (method, task)
            assert not one.evicted
        assert 2 * (second - first) < stats.steps - second
        run(generator, policy, method, MANY[:1], budget=budget)
    generator.close()


def test_tasks_that_are_searched_at_once_find_and_cost_what_each_does_alone(policy: Policy) -> None:
    check_at_once(policy, "radix", ["best_of_n", "beam"], budget=500)


@pytest.mark.nightly
@pytest.mark.parametrize("cache", ["radix", "hash"])
@pytest.mark.parametrize("budget", [None, 700])
def test_all_methods_find_and_cost_the_same_at_once(
    policy: Policy, cache: str, budget: int | None
) -> None:
    check_at_once(policy, cache, [*METHODS], budget)


def test_a_search_tells_that_others_took_its_room_in_the_cache(policy: Policy) -> None:
    generator = made(policy, kv_tokens=1000)
    together = run(generator, policy, "beam", MANY)
    assert any(found.evicted for found in together)
    for task, one in zip(MANY, together, strict=True):
        empty(generator)
        (alone,) = run(generator, policy, "beam", [task])
        assert not alone.evicted
        assert one.best == alone.best
        assert one.evicted or one == alone
    generator.close()
