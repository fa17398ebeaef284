"""Every method against enumeration, on trees that are small enough to be enumerated."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
from tests.search.lines import DIGITS, TASK, Lines, Scores

from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import SampleKey, wait_for
from sixfold.types import SamplingParams
from sixfold_search import Settings, search
from sixfold_search.task_search import Found
from sixfold_search.tree import Chain
from sixfold_search.tree_search import _Node

DEPTH = 4
PARAMS = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def renderer(policy: Policy) -> Renderer:
    return Renderer(policy.tokenizer, policy.stop_token_ids)


def table(lines: tuple[str, ...]) -> float:
    """A number between 0 and 1 for every chain of lines."""
    return random.Random(f"value/{lines}").random()


def planted(depth: int) -> tuple[str, ...]:
    return tuple(DIGITS[(3 * at + 2) % len(DIGITS)] for at in range(depth))


def closeness(lines: tuple[str, ...], depth: int) -> float:
    """Share of the planted lines with which the chain begins."""
    right = 0
    while right < len(lines) and lines[right] == planted(depth)[right]:
        right += 1
    return right / depth


def run(
    renderer: Renderer, method: str, *, depth: int = DEPTH, seed: int = 0, **more: Any
) -> Found:
    params = SamplingParams(max_tokens=40, seed=seed, stop_token_ids=renderer.stop_token_ids)
    generator = more.pop("generator", None) or Lines(renderer, depth)
    return wait_for(search(generator, renderer, TASK, method=method, params=params, **more))


def drawn(renderer: Renderer, count: int) -> list[tuple[str, ...]]:
    """The first samples of the task, from the generator alone."""
    prompt, generator = renderer.encode(TASK), Lines(renderer, DEPTH)
    params = SamplingParams(max_tokens=40, stop_token_ids=renderer.stop_token_ids)
    samples = [
        wait_for(generator.generate(prompt, params, SampleKey(TASK.id, k, len(prompt))))
        for k in range(count)
    ]
    return [tuple(renderer.decode(one.tokens).split()) for one in samples]


def lines(found: Found) -> tuple[str, ...]:
    return tuple(found.text.split())


def test_greedy_takes_the_most_probable_tokens(renderer: Renderer) -> None:
    assert lines(run(renderer, "greedy")) == ("0",) * DEPTH


@pytest.mark.parametrize("aggregate", ["min", "mean", "product", "last", "sum"])
def test_best_of_n_is_the_best_of_the_first_n_samples(renderer: Renderer, aggregate: str) -> None:
    def value(chain: tuple[str, ...]) -> float:
        steps = [table(chain[: n + 1]) for n in range(DEPTH)]
        whole = 1.0
        for one in steps:
            whole *= one
        by_name = {"min": min(steps), "mean": sum(steps) / DEPTH, "product": whole}
        return {**by_name, "last": steps[-1], "sum": sum(steps)}[aggregate]

    found = run(
        renderer, "best_of_n", settings=Settings(n=30), scorer=Scores(table), aggregate=aggregate
    )
    samples = drawn(renderer, 30)
    assert [tuple(t.text.split()) for t in found.candidates] == samples
    assert lines(found) == max(samples, key=value)
    assert found.value == pytest.approx(max(map(value, samples)))


def test_a_scorer_of_wholes_sees_no_steps(renderer: Renderer) -> None:
    found = run(renderer, "best_of_n", settings=Settings(n=30), scorer=Scores(table), by_step=False)
    assert lines(found) == max(drawn(renderer, 30), key=table)


def test_a_text_that_the_scorer_refuses_has_the_score_0(renderer: Renderer) -> None:
    class Strict(Scores):
        def score(self, task: Any, completions: Any, ends: Any) -> list[list[float]]:
            if any(text.startswith("3") for text in completions):
                raise UserError("no")
            return super().score(task, completions, ends)

    found = run(renderer, "best_of_n", settings=Settings(n=30), scorer=Strict(table))
    samples = list(dict.fromkeys(drawn(renderer, 30)))
    assert found.refused == sum(chain[0] == "3" for chain in samples) > 0
    kept = [chain for chain in samples if chain[0] != "3"]
    assert lines(found) == max(
        kept, key=lambda chain: min(table(chain[: n + 1]) for n in range(DEPTH))
    )


def test_votes_are_counted_by_answer(renderer: Renderer) -> None:
    """The answer of these lines is the last number."""
    samples = drawn(renderer, 62)
    counts = Counter(chain[-1] for chain in samples)
    (most, first), (_, second) = counts.most_common(2)
    assert first > second and samples[0][-1] != most
    found = run(renderer, "majority", settings=Settings(n=62))
    assert lines(found) == next(chain for chain in samples if chain[-1] == most)

    sums: Counter[str] = Counter()
    for chain in samples:
        sums[chain[-1]] += table(chain)  # type: ignore[assignment]
    (heaviest, _), *_ = sums.most_common()
    voted = run(
        renderer, "weighted", settings=Settings(n=62), scorer=Scores(table), aggregate="last"
    )
    assert lines(voted) == max((c for c in samples if c[-1] == heaviest), key=table)


def enumerated_beam(width: int, value: Any) -> tuple[str, ...]:
    kept: list[tuple[str, ...]] = [()]
    for _ in range(DEPTH):
        chains = [(*chain, digit) for chain in kept for digit in DIGITS]
        kept = sorted(chains, key=value, reverse=True)[:width]
    return kept[0]


@pytest.mark.parametrize("width", [1, 3])
def test_a_beam_keeps_the_best_of_all_extensions(renderer: Renderer, width: int) -> None:
    """With 40 draws per chain all five digits occur."""
    settings = Settings(n=40 * width, expand=40)
    found = run(renderer, "beam", settings=settings, scorer=Scores(table), aggregate="last")
    assert lines(found) == enumerated_beam(width, table)


@pytest.mark.nightly
def test_a_beam_with_room_for_all_chains_finds_the_optimum(renderer: Renderer) -> None:
    settings = Settings(n=150 * 25, expand=25)
    found = run(
        renderer, "beam", depth=3, settings=settings, scorer=Scores(table), aggregate="last"
    )
    assert lines(found) == max(product(DIGITS, repeat=3), key=table)


def test_lookahead_scores_what_greedy_steps_lead_to(renderer: Renderer) -> None:
    """Greedy steps repeat the last digit."""

    def ahead(chain: tuple[str, ...]) -> float:
        return table((chain + chain[-1:] * 2)[:DEPTH] if len(chain) < DEPTH else chain)

    settings = Settings(n=80, expand=40, lookahead=2)
    found = run(renderer, "lookahead", settings=settings, scorer=Scores(table), aggregate="last")
    assert lines(found) == enumerated_beam(2, ahead) != enumerated_beam(2, table)


def test_diverse_beams_do_not_see_each_other(renderer: Renderer) -> None:
    """Each tree keeps the best of its own extensions, and the trees end in different chains."""
    settings = Settings(n=12, expand=3)
    found = run(renderer, "diverse_beam", settings=settings, scorer=Scores(table), aggregate="last")
    ends = [tuple(t.text.split()) for t in found.candidates]
    firsts = [chain[0] for chain in drawn(renderer, 12)]
    best = [max(firsts[at : at + 3], key=lambda d: table((d,))) for at in range(0, 12, 3)]
    assert sorted(chain[0] for chain in ends) == sorted(best)
    assert len(ends) == 4 and lines(found) == max(ends, key=table)
    assert len(set(best)) > 1


@pytest.mark.parametrize("seed", range(3))
def test_tree_search_finds_a_planted_optimum_where_best_of_n_does_not(
    renderer: Renderer, seed: int
) -> None:
    """One chain of 5 ** 6 is right. Both methods have the same budget of model tokens."""
    depth, budget = 6, 8_000

    def scorer() -> Scores:
        return Scores(lambda chain: closeness(chain, depth))

    more: dict[str, Any] = {"depth": depth, "seed": seed, "budget": budget, "aggregate": "last"}
    deep = run(renderer, "mcts", settings=Settings(expand=24, explore=0.3), scorer=scorer(), **more)
    wide = run(renderer, "best_of_n", scorer=scorer(), **more)
    assert lines(deep) == planted(depth) and deep.value == 1
    assert wide.value is not None and wide.value < 1
    assert max(deep.cost.total, wide.cost.total) <= budget
    assert wide.cost.total > 0.9 * budget and len(wide.candidates) > 200


def test_the_bound_of_a_child_is_its_mean_and_its_spread() -> None:
    root = _Node(Chain(), visits=8)
    child = _Node(Chain(), root, visits=2, total=1.0)
    assert child.bound(0.5) == pytest.approx(0.5 + 0.5 * math.sqrt(math.log(8) / 2))
    assert _Node(Chain(), root).bound(0.5) == math.inf


def test_tree_search_of_a_small_tree_visits_every_leaf_once(renderer: Renderer) -> None:
    settings = Settings(n=10_000, expand=60)
    found = run(
        renderer, "mcts", depth=2, settings=settings, scorer=Scores(table), aggregate="last"
    )
    leaves = Counter(tuple(t.text.split()) for t in found.candidates)
    assert leaves.keys() == set(product(DIGITS, repeat=2))
    assert lines(found) == max(leaves, key=table)


def test_regeneration_keeps_right_steps_and_ends_at_the_right_chain(renderer: Renderer) -> None:
    right = planted(DEPTH)
    scorer = Scores(lambda chain: float(chain[-1] == right[len(chain) - 1]))
    found = run(renderer, "regenerate", seed=4, settings=Settings(n=200), scorer=scorer)
    assert lines(found) == right
    chains = [tuple(t.text.split()) for t in found.candidates]

    def wrong(chain: tuple[str, ...]) -> int:
        return next((n for n in range(DEPTH) if chain[n] != right[n]), DEPTH)

    # Everything before the first wrong step is kept, so that step never comes earlier again.
    assert [wrong(c) for c in chains] == sorted(wrong(c) for c in chains)
    assert [wrong(c) for c in chains].index(DEPTH) == len(chains) - 1


@pytest.mark.parametrize("method", ["majority", "best_of_n", "beam", "diverse_beam", "lookahead",
                                    "mcts", "regenerate", "weighted"])  # fmt: skip
def test_no_search_exceeds_its_budget_and_equal_seeds_give_equal_results(
    renderer: Renderer, method: str
) -> None:
    used = []
    for budget in (60, 200, 1500):
        twice = [
            run(
                renderer,
                method,
                settings=Settings(n=8, expand=4),
                scorer=Scores(table),
                budget=budget,
                seed=5,
            )
            for _ in range(2)
        ]
        assert twice[0] == twice[1]
        used.append(twice[0].cost.total)
        assert used[-1] <= budget
    assert used[-1] > 0.9 * 1500
    assert (
        run(renderer, method, settings=Settings(n=8), scorer=Scores(table), seed=6, budget=1500)
        != twice[0]
    )
