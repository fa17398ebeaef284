"""What a tree deletes, what it counts, and what it shows to scorers and verifiers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.search.lines import TASK, Lines, Scores

from sixfold.checks.environment import Environment
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import Sampled, wait_for
from sixfold.types import SamplingParams, Task
from sixfold_search import Settings, search
from sixfold_search import tree as module
from sixfold_search.aggregate import AGGREGATES
from sixfold_search.scorers import Oracle
from sixfold_search.steps import Stepping
from sixfold_search.task_search import Found
from sixfold_search.tree import Chain, Tree

BEGUN = Task(
    "t", ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "9"}),
    form="continued", tools=({"name": "add"},),
)  # fmt: skip


@pytest.fixture(scope="module")
def renderer(policy: Policy) -> Renderer:
    return Renderer(policy.tokenizer, policy.stop_token_ids)


class Begun(Renderer):
    """Reads the chat as its text. The policy of these tests has no chat template."""

    def encode(self, task: Task) -> list[int]:
        return super().encode(replace(task, prompt=task.prompt_text, form="messages", tools=()))


class Pairs:
    """A renderer whose tokens are two letters each."""

    @staticmethod
    def encode(task: Task) -> list[int]:
        return [0]

    @staticmethod
    def decode(tokens: Sequence[int]) -> str:
        return "".join(["ab", "cd", "e\n", "fg", "h\n"][token] for token in tokens)


def tree(renderer: Any, generator: Any = None, task: Task = TASK, most: int = 40) -> Tree:
    return Tree(
        generator,
        renderer,
        task,
        SamplingParams(max_tokens=most),
        step=Stepping().span,
        steps=Stepping().steps(renderer) if isinstance(renderer, Renderer) else Stepping.steps,  # type: ignore[arg-type]
        aggregate=AGGREGATES["min"],
        scorer=None,
        by_step=True,
        stops=(),
        budget=None,
    )


def run(renderer: Renderer, generator: Any = None, task: Task = TASK, **more: Any) -> Found:
    params = SamplingParams(max_tokens=40, seed=1, stop_token_ids=renderer.stop_token_ids)
    made = generator or Lines(renderer, 4)
    return wait_for(search(made, renderer, task, params=params, **more))


@pytest.mark.parametrize(
    ("characters", "kept"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)]
)
def test_a_token_across_the_cut_is_deleted(characters: int, kept: int) -> None:
    chain = Chain((0, 1, 2), (0.0,) * 3, (0,) * 3, "abcde\n")
    assert tree(Pairs()).cut(chain, characters).tokens == chain.tokens[:kept]


def test_a_full_chain_is_not_extended(renderer: Renderer) -> None:
    generator = Lines(renderer, 4)
    full = Chain((1, 1), (0.0,) * 2, (0,) * 2, "xx")
    assert wait_for(tree(renderer, generator, most=2).extend([full], 3)) == [[]]
    assert not generator.calls


class Warm(Lines):
    """A server in whose cache others have left everything."""

    async def generate(self, tokens: Sequence[int], *given: Any, **more: Any) -> Sampled:
        return replace(await super().generate(tokens, *given, **more), reused=len(tokens) - 1)


def test_what_others_left_in_a_cache_makes_no_search_cheaper(renderer: Renderer) -> None:
    given: dict[str, Any] = {"method": "beam", "settings": Settings(n=8, expand=4)}
    cold = run(renderer, scorer=Scores(lambda lines: len(lines) / 9), **given)
    warm = run(renderer, Warm(renderer, 4), scorer=Scores(lambda lines: len(lines) / 9), **given)
    assert warm.cost.prefilled >= len(renderer.encode(TASK))
    assert warm.cost == cold.cost


def test_tree_search_completes_the_prompt_if_no_step_fits(renderer: Renderer) -> None:
    for budget in range(30, 160, 10):
        scores: dict[str, Any] = {"settings": Settings(n=4), "budget": budget, "by_step": False}
        given = [run(renderer, method=m, scorer=Scores(lambda c: 0.5), **scores)
                 for m in ("best_of_n", "mcts")]  # fmt: skip
        assert given[1].candidates or not given[0].candidates, budget
        assert given[1].cost.total <= budget


def test_scorers_get_the_task_and_verifiers_the_start_of_the_reply(policy: Policy) -> None:
    renderer, seen = Begun(policy.tokenizer, policy.stop_token_ids), list[Task]()

    class Seeing(Scores):
        def score(self, task: Task, *given: Any) -> list[list[float]]:
            seen.append(task)
            return super().score(task, *given)

    found = run(renderer, None, BEGUN, method="best_of_n", scorer=Seeing(lambda lines: 0.5))
    assert seen[0] == BEGUN
    assert {t.opened for t in found.candidates} == {"9"}

    read: list[str] = []

    def verifier(completion: str, task: Task) -> float:
        read.append(completion)
        return 1.0

    with Environment([verifier]) as environment:
        assert Oracle(environment, renderer).score(BEGUN, ["12"], [[2]]) == [[1.0]]
    assert read == ["912"]


@pytest.mark.parametrize("piece", [1, 3, 32])
def test_steps_by_a_function_are_those_by_its_name(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A step may end within a piece, at its end, or in the next one."""
    monkeypatch.setattr(module, "PIECE", piece)
    (tmp_path / "own.py").write_text(
        "def ends(text):\n    return [at + 1 for at, c in enumerate(text) if c == '\\n']\n"
    )
    own = Stepping(f"{tmp_path}/own.py:ends")
    given: dict[str, Any] = {"settings": Settings(n=8, expand=4)}
    for method in ("beam", "diverse_beam"):
        scorer = Scores(lambda lines: random.Random(f"{lines}").random())
        named = run(renderer, method=method, scorer=scorer, **given)
        read = run(renderer, method=method, scorer=scorer, stepping=own, **given)
        assert (read.text, read.value) == (named.text, named.value)
        assert len({t.text for t in read.candidates}) > 1
    for budget in range(60, 400, 40):
        for method in ("beam", "lookahead", "mcts"):
            scorer = Scores(lambda lines: 0.5)
            found = run(renderer, method=method, scorer=scorer, stepping=own, budget=budget)
            assert found.cost.total <= budget


class Cold(Lines):
    """A generator without a cache."""

    async def generate(self, tokens: Sequence[int], *given: Any, **more: Any) -> Sampled:
        return replace(await super().generate(tokens, *given, **more), reused=0)


def test_pieces_that_are_prefilled_again_keep_the_budget(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 1)
    (tmp_path / "own.py").write_text("def ends(text):\n    return []\n")
    whole = Stepping(f"{tmp_path}/own.py:ends", 8)
    costs = set()
    for budget in range(60, 2000, 100):
        found = run(
            renderer, Cold(renderer, 4), method="beam", scorer=Scores(lambda lines: 0.5),
            stepping=whole, budget=budget, settings=Settings(n=4),
        )  # fmt: skip
        assert found.cost.total <= budget
        costs.add(found.cost.prefilled)
    assert len(costs) > 3


def test_a_token_with_the_end_of_a_step_belongs_to_it() -> None:
    chain = Chain((0, 2, 3), (0.0,) * 3, (0,) * 3, "abe\nfg")
    made = tree(Pairs())
    assert [made._up_to(chain, end, 1).tokens for end in (1, 2, 3, 4)] == [
        (0,),
        (0,),
        (0, 2),
        (0, 2),
    ]
    assert made._up_to(chain, 1, 2).tokens == (0, 2)
