"""Log-probs must be recorded when tokens are sampled. If they are recomputed from the current
weights, a stale batch looks fresh.
"""

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
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.trainer import Trainer
from sixfold.types import Reward, SamplingParams, Task


def test_recomputed_old_log_probs_hide_staleness(policy: Policy) -> None:
    model = copy.deepcopy(policy.model)
    rollout = EngineRollout(
        Engine(CausalLM(model), kv_tokens=2000),
        Renderer(policy.tokenizer),
        SamplingParams(max_tokens=8),
        4,
    )
    groups = rollout.generate([Task("a", "1+1="), Task("b", "2+2=")], seed=0)
    for group in groups:
        for t in group.trajectories:
            t.reward = Reward(float(t.sample % 2))
    algorithm = make_algorithm(resolve_algorithm(AlgorithmConfig(name="grpo")), 8)
    trainer = Trainer(
        PolicyRoot(model), TrainerConfig(learning_rate=0.02), Scoring(), total_steps=9
    )
    batch = algorithm.prepare(collate(groups))
    for _ in range(2):
        trainer.train_step(batch, algorithm.compute_loss)

    recorded = trainer.train_step(batch, algorithm.compute_loss)
    assert abs(recorded["train/ratio_mean"] - 1) > 0.05 and recorded["train/clipped_frac"] > 0.2  # type: ignore[operator]
    again = batch.with_(old_logp=score_batch(model, batch, Scoring(), 4096, share_prefix=True))
    hidden = trainer.train_step(again, algorithm.compute_loss)
    assert (
        hidden["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
        and hidden["train/clipped_frac"] == 0
    )
