"""The one-file loop and the library, ten steps on the same trajectories: the same losses, gradient
norms and weights.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import collate
from sixfold.model.attention import NAME, register
from sixfold.recipe.schema import TrainerConfig
from sixfold.reference.frozen import FrozenReference, NoReference
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory

from .test_minimal import minimal

STEPS = 10
STALE = 4
"""Rollouts are drawn before the first step and used again, so that ratios leave 1 and the losses
are not all zero.
"""


def as_groups(t: object, prompt_length: int) -> list[Group]:
    """The one-file loop's trajectories in the library's types."""
    groups: dict[int, list[Trajectory]] = {}
    for b in range(len(t.tokens)):
        length = int(t.mask[b].nonzero().max()) + 1
        assert bool(t.mask[b, prompt_length:length].all())
        trajectory = Trajectory.one_turn(
            str(int(t.groups[b])),
            b,
            t.tokens[b, :prompt_length].tolist(),
            t.tokens[b, prompt_length:length].tolist(),
            t.logp[b, prompt_length:length].tolist(),
            [0] * (length - prompt_length),
            "stop",
            reward=Reward(float(t.rewards[b])),
        )
        groups.setdefault(int(t.groups[b]), []).append(trajectory)
    return [Group(Task(str(g), "x"), trajectories) for g, trajectories in groups.items()]


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_ten_steps_are_the_same(beta: float) -> None:
    settings = minimal.Settings(steps=STEPS, beta=beta, learning_rate=1e-3)
    theirs = minimal.make_model(seed=1)
    register()
    ours = AutoModelForCausalLM.from_config(
        theirs.config, attn_implementation=NAME, dtype=torch.float32
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    batches = [
        minimal.rollout(theirs, [minimal.draw_task(rng) for _ in range(8)], settings, generator)
        for _ in range(STALE)
    ]

    losses = minimal.train(theirs, settings, given=lambda step: batches[step % STALE])

    algorithm = make_algorithm(replace(ZOO["grpo"], beta=beta), settings.max_new_tokens)
    config = TrainerConfig(learning_rate=settings.learning_rate, max_tokens_per_microbatch=64)
    reference = FrozenReference(ours, Scoring(), 64, True) if beta else NoReference()
    trainer = Trainer(PolicyRoot(ours), config, Scoring(), STEPS)
    for step in range(STEPS):
        batch = algorithm.prepare(
            reference.score(collate(as_groups(batches[step % STALE], len(minimal.encode("1+2=")))))
        )
        metrics = trainer.train_step(batch, algorithm.compute_loss)
        assert metrics["train/loss"] == pytest.approx(losses[step], abs=2e-6), f"step {step}"
        if step >= STALE:
            assert abs(losses[step]) > 1e-4, "the ratios should have left 1 by now"
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=2e-4), name
