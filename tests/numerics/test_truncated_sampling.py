"""Training on truncated samples: engine and trainer score one distribution, on every architecture;
and what goes wrong where they do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from tests.conftest import VOCABULARY
from tests.rollouts import EngineRollout
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.algorithm.composed import make_algorithm
from sixfold.batch import Batch, collate
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.scratch import character_tokenizer
from sixfold.model.stop_tokens import model_turn_end
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.schema import AlgorithmConfig, TrainerConfig
from sixfold.renderer.renderer import Renderer
from sixfold.sync.sync import SharedSync
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, SamplingParams, Task

ALPHABET = "".join(chr(ord("0") + i) for i in range(VOCABULARY - 6))
TASKS = [Task(f"t{i}", ALPHABET[i : i + n]) for i, n in enumerate((1, 5, 14, 30))]
TEMPERATURE = 0.9
RULES = {
    "top-p": dict(top_p=0.8),
    "top-k": dict(top_k=5),
    "min-p": dict(min_p=0.1),
    "all": dict(top_p=0.9, top_k=12, min_p=0.02),
}
ALGORITHM = make_algorithm(resolve_algorithm(AlgorithmConfig(name="grpo")), 16)


def sampled(
    model: PreTrainedModel, engine: Engine, rule: str, seed: int
) -> tuple[list[Group], dict[str, float]]:
    """Four groups of four with made-up rewards, and the rollout's metrics."""
    tokenizer = character_tokenizer(ALPHABET)
    params = SamplingParams(
        max_tokens=16,
        temperature=TEMPERATURE,
        stop_token_ids=model_turn_end(model.generation_config, tokenizer).tokens,
        **RULES[rule],
    )  # type: ignore[arg-type]
    rollout = EngineRollout(engine, Renderer(tokenizer), params, samples=4)
    groups = rollout.generate(TASKS, seed)
    for t in chain.from_iterable(g.trajectories for g in groups):
        t.reward = Reward(float(t.sample % 3))
    return groups, rollout.stats()


def kept_mass(groups: list[Group], batch: Batch) -> Tensor:
    """[B, T], 1 where nothing was sampled."""
    mass = torch.ones(batch.tokens.shape)
    for b, t in enumerate(chain.from_iterable(g.trajectories for g in groups)):
        assert t.kept is not None
        mass[b, batch.mask[b]] = torch.tensor(t.kept.mass.tolist(), dtype=torch.float32)
    return mass


@pytest.mark.mostly_nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_engine_and_trainer_agree_before_and_after_an_update(
    name: str, rule: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    """Prompts shared, micro-batches of a few trajectories, chunks of 16 positions."""
    model = copy.deepcopy(tiny(name))
    engine = Engine(CausalLM(model), kv_tokens=600, block_size=8, max_running=5)
    trainer = Trainer(
        PolicyRoot(model),
        TrainerConfig(learning_rate=1e-2, max_tokens_per_microbatch=96),
        Scoring(temperature=TEMPERATURE, chunk=16),
        2,
    )
    for seed in (0, 1):
        groups, _ = sampled(model, engine, rule, seed)
        batch = ALGORITHM.prepare(collate(groups))
        metrics = trainer.train_step(batch, ALGORITHM.compute_loss)
        assert metrics["mismatch/max_abs_logp"] <= 1e-4  # type: ignore[operator]
        assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["train/clipped_frac"] == 0
        assert seed == 1 or metrics["train/microbatches"] > 1  # type: ignore[operator]
        SharedSync(model, engine).sync(trainer.version)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen3_moe"])
def test_the_full_log_prob_is_the_truncated_one_plus_the_log_of_the_mass(
    name: str, rule: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    """At the sampler's own weights, token by token: two ways to one number."""
    model = tiny(name)
    groups, stats = sampled(model, Engine(CausalLM(model), kv_tokens=600), rule, 2)
    batch, mass = collate(groups), kept_mass(groups, collate(groups))
    for share_prefix in (True, False):
        truncated, full = (
            score_batch(model, b, Scoring(TEMPERATURE, 16), 96, share_prefix)
            for b in (batch, replace(batch, kept=None))
        )
        torch.testing.assert_close(truncated, batch.old_logp, rtol=0, atol=2e-5)
        torch.testing.assert_close(full - mass.log(), truncated, rtol=0, atol=2e-5)
    assert stats["rollout/kept_mass_frac"] == pytest.approx(
        float(mass[batch.mask].mean()), abs=1e-5
    )
    assert batch.kept is not None
    assert stats["rollout/kept_mean"] == pytest.approx(
        float(batch.kept.count[batch.mask].double().mean())
    )


def test_scored_over_all_tokens_every_ratio_is_the_kept_mass_and_many_are_clipped(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Reason for kept sets: without them an on-policy step looks like one far off the policy."""
    model = copy.deepcopy(tiny("qwen3"))
    groups, _ = sampled(model, Engine(CausalLM(model), kv_tokens=600), "top-k", 0)
    right = ALGORITHM.prepare(collate(groups))
    wrong, mass = replace(right, kept=None), kept_mass(groups, right)
    ratio = (score_batch(model, wrong, Scoring(TEMPERATURE), 4096, True) - right.old_logp).exp()
    torch.testing.assert_close(ratio[right.mask], mass[right.mask], rtol=1e-4, atol=0)
    got = [
        Trainer(
            PolicyRoot(copy.deepcopy(model)), TrainerConfig(), Scoring(TEMPERATURE), 1
        ).train_step(batch, ALGORITHM.compute_loss)
        for batch in (right, wrong)
    ]
    assert (
        got[0]["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
        and got[0]["mismatch/max_abs_logp"] < 1e-4
    )  # type: ignore[operator]
    assert (
        got[1]["train/ratio_mean"] < 0.8
        and got[1]["train/clipped_frac"] > 0.05
        and got[1]["mismatch/max_abs_logp"] > 0.5
    )  # type: ignore[operator]
