"""Staleness on the real loop: the rarer the sync, the more tokens lie outside the clip range."""

from __future__ import annotations

import copy

import pytest
from tests.rollouts import EngineRollout

from sixfold.algorithm.composed import make_algorithm
from sixfold.batch import collate
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.schema import AlgorithmConfig, TrainerConfig
from sixfold.renderer.renderer import Renderer
from sixfold.sync.sync import CopySync
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Reward, SamplingParams, Task

TASKS = [Task(f"t{i}", f"{i}+{i}=") for i in range(4)]


def clipped_fractions(policy: Policy, every: int, steps: int = 8) -> tuple[list[float], list[int]]:
    """train/clipped_frac and the staleness in versions of each step."""
    model = copy.deepcopy(policy.model)
    engine = Engine(CausalLM(copy.deepcopy(model).requires_grad_(False)), kv_tokens=1000)
    rollout = EngineRollout(
        engine, Renderer(policy.tokenizer), SamplingParams(max_tokens=8), samples=4
    )
    algorithm = make_algorithm(resolve_algorithm(AlgorithmConfig(name="grpo")), 8)
    trainer = Trainer(PolicyRoot(model), TrainerConfig(learning_rate=3e-3), Scoring(), steps)
    sync = CopySync(model, engine, every)
    clipped, stale = [], []
    for step in range(steps):
        groups = rollout.generate(TASKS, seed=step)
        for group in groups:
            for t in group.trajectories:  # even tokens are good ones: something to learn
                t.reward = Reward(
                    sum(x % 2 == 0 for x in t.tokens[t.prompt_length :]) / 8 + 0.01 * t.sample
                )
        stale.append(trainer.version - groups[0].trajectories[0].version[-1])
        metrics = trainer.train_step(algorithm.prepare(collate(groups)), algorithm.compute_loss)
        clipped.append(metrics["train/clipped_frac"])
        assert ("mismatch/max_abs_logp" in metrics) == (stale[-1] == 0)
        sync.sync(trainer.version)
    return clipped, stale  # type: ignore[return-value]


@pytest.fixture(scope="module")
def runs(policy: Policy) -> dict[int, tuple[list[float], list[int]]]:
    return {every: clipped_fractions(policy, every) for every in (1, 2, 4)}


def test_staleness_counts_the_updates_since_the_last_sync(
    runs: dict[int, tuple[list[float], list[int]]],
) -> None:
    assert {every: stale for every, (_, stale) in runs.items()} == {
        1: [0] * 8,
        2: [0, 1] * 4,
        4: [0, 1, 2, 3] * 2,
    }


def test_clipping_rises_with_the_syncs_apart(
    runs: dict[int, tuple[list[float], list[int]]],
) -> None:
    means = {every: sum(clipped) / len(clipped) for every, (clipped, _) in runs.items()}
    assert means[1] == 0
    assert 0.01 < means[2] < means[4]
    fresh = [c for every in runs for c, s in zip(*runs[every], strict=True) if s == 0]
    assert fresh == [0] * len(fresh)
