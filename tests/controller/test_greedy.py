"""Greedy baselines: one scored completion per prompt at temperature 0, beside the samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.controller.scripted import ScriptedRollout, collect
from tests.rollouts import EngineRollout, GeneratorRollout

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import collate
from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.controller.dynamic_sampling import Refill
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.report.rewards import reward_metrics
from sixfold.types import Group, SamplingParams, Task, Trajectory


class Answers(ScriptedRollout):
    """Rollout whose samples answer with given texts; "?" makes the check fail."""

    def __init__(self, answers: dict[str, str]) -> None:
        super().__init__()
        self.answers = answers
        self.samples = len(next(iter(answers.values())))

    def episodes(self, task: Task, seed: int) -> list[Trajectory]:
        return [_trajectory(task, k, text) for k, text in enumerate(self.answers[task.id])]

    def stats(self) -> dict[str, float]:
        return {"rollout/tokens": 3.0}


def _trajectory(task: Task, sample: int, text: str) -> Trajectory:
    return Trajectory.one_turn(task.id, sample, [1], [2], [-1.0], [0], "stop", text=text)


def reward(completion: str, task: Task) -> float:
    return float(completion)


def generate(
    samples: dict[str, str], greedy: dict[str, str], error_budget: float = 1.0
) -> tuple[list[Group], dict[str, float]]:
    """Scored groups of all tasks, and the metrics."""
    with Environment([reward], error_budget=error_budget) as environment:
        tasks = [Task(name, "") for name in samples]
        return collect(Answers(samples), environment, tasks, greedy=Answers(greedy))


def test_advantages_are_the_reward_less_that_of_the_greedy_completion() -> None:
    """Prompt a fails greedily, b succeeds, the check of c's greedy completion fails."""
    groups, stats = generate({"a": "10", "b": "11", "c": "10"}, {"a": "0", "b": "1", "c": "?"})
    batch = collate(groups)
    assert batch.greedy is not None and batch.greedy[:4].tolist() == [0.0, 0.0, 1.0, 1.0]
    done = Composed(ZOO["remax"], horizon=4).prepare(batch)
    assert done.advantages is not None and done.weights is not None
    assert done.advantages[:, 1].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Without a baseline prompt c must not train, and its rows stay in the denominator.
    assert done.weights[:, 1].tolist() == pytest.approx([1 / 6, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert stats == {
        "rollout/tokens": 3.0,
        "rollout/greedy_tokens": 3.0,
        "rollout/greedy_error_frac": pytest.approx(1 / 3),
        "rollout/greedy_reward": 0.5,
    }


def test_the_greedy_completion_counts_in_no_metric_and_no_row() -> None:
    groups, _ = generate({"a": "11", "b": "11"}, {"a": "0", "b": "?"})
    metrics = reward_metrics(groups)
    assert metrics["reward/mean"] == 1.0 and metrics["reward/error_frac"] == 0.0
    assert len(collate(groups).tokens) == 4
    assert [g.greedy.text for g in groups if g.greedy] == ["0", "?"]


def test_failed_greedy_checks_are_a_share_of_the_whole_step() -> None:
    """One of 2 greedy checks fails: a sixth of the 6 checks of the step."""
    samples, greedy = {"a": "10", "b": "10"}, {"a": "1", "b": "?"}
    generate(samples, greedy, error_budget=0.17)
    with pytest.raises(RewardBudgetExceeded):
        generate(samples, greedy, error_budget=0.16)


def test_only_tasks_that_reach_the_step_get_a_greedy_completion() -> None:
    """Dynamic sampling replaces the group of b, whose rewards are equal, by that of c."""
    tasks = [Task(name, "") for name in "abc"]
    greedy = Answers({"a": "0", "b": "0", "c": "1"})
    with Environment([reward]) as environment:
        inner = Answers({"a": "10", "b": "11", "c": "01"})
        policies = {"refill": Refill(tasks, 2), "greedy": greedy}
        groups, _ = collect(inner, environment, tasks[:2], **policies)
    assert [g.task.id for g in groups] == [task for task, _ in greedy.ended] == ["a", "c"]


def test_a_group_without_a_greedy_completion_among_others_is_refused() -> None:
    groups, _ = generate({"a": "10", "b": "11"}, {"a": "0", "b": "1"})
    with pytest.raises(ValueError, match="task b"):
        collate([groups[0], replace(groups[1], greedy=None)])
    assert collate([replace(group, greedy=None) for group in groups]).greedy is None


def test_the_samples_are_those_of_a_rollout_without_a_baseline(policy: Policy) -> None:
    """Tokens and log-probs of two calls on one engine, bit for bit; the greedy completion is that
    of an engine of its own.
    """
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(3)]
    sampled, best = SamplingParams(6), SamplingParams(6, temperature=0.0)

    def engine() -> Engine:
        return Engine(CausalLM(policy.model), kv_tokens=512, block_size=16, max_running=8)

    plain = EngineRollout(engine(), renderer, sampled, 4)
    alone = EngineRollout(engine(), renderer, best, 1)
    shared = engine()
    mine = EngineRollout(shared, renderer, sampled, 4)
    best_of = GeneratorRollout(mine.player.generator, renderer, best, 1)
    with Environment([lambda completion, task: 1.0]) as environment:
        for seed in (0, 1):
            expected = plain.generate(tasks, seed)
            found, stats = collect(mine.driver(), environment, tasks, seed, greedy=best_of.driver())
            for a, b, c in zip(expected, found, alone.generate(tasks, 0), strict=True):
                for left, right in zip(a.trajectories, b.trajectories, strict=True):
                    assert (left.tokens, left.logp) == (right.tokens, right.logp)
                assert b.greedy is not None and b.greedy.tokens == c.trajectories[0].tokens
            assert stats["rollout/tokens"] == plain.stats()["rollout/tokens"]
