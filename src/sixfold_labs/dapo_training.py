"""A small policy trained with the library's parts of DAPO. Imports torch.

The policy has one softmax over tokens per prompt. Token 0 continues the answer, every other token
ends it. An answer is right if it ends with the right token, after more than `NEEDED` tokens in all.
An answer without an end is cut off at `LONGEST` tokens and is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sixfold.algorithm.advantages import group_zscore
from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.dapo import DAPO
from sixfold.algorithm.grpo import GRPO
from sixfold.algorithm.losses import clipped_surrogate
from sixfold.algorithm.shaping import overlong_penalty

from .dapo_changes import STEPS, Changes

PROMPTS, SAMPLES, TOKENS, LONGEST, NEEDED = 4, 8, 8, 16, 4
UPDATES, LEARNING_RATE = 4, 0.5
CONTINUE, RIGHT = 3.5, 1.0
"""Logits at the start of the token that continues and of the right token. The others have 0."""


@dataclass(frozen=True)
class Group:
    """Samples of one prompt.

    Attributes:
        tokens: [K, LONGEST] sampled tokens.
        mask: [K, LONGEST] true up to the token that ends the answer.
        rewards: [K] 1 for the right answer, otherwise 0.
    """

    tokens: Tensor
    mask: Tensor
    rewards: Tensor

    @property
    def mixed(self) -> bool:
        """True if some samples are right and some are wrong."""
        return 0 < float(self.rewards.sum()) < len(self.rewards)


@dataclass(frozen=True)
class Training:
    """What a training run did, one number per step.

    Attributes:
        rewards: mean reward of the group.
        useful: the group had different rewards.
        entropies: entropy per token, relative to the start.
        lengths: mean tokens of the answers.
    """

    rewards: list[float]
    useful: list[bool]
    entropies: list[float]
    lengths: list[float]


def sample(logp: Tensor, right: int, draw: torch.Generator) -> Group:
    """One group of answers to a prompt.

    Args:
        logp: [TOKENS] log-probabilities of the policy.
        right: token of the right answer.
    """
    tokens = torch.multinomial(logp.exp(), SAMPLES * LONGEST, replacement=True, generator=draw)
    tokens = tokens.view(SAMPLES, LONGEST)
    ended = (tokens != 0).cumsum(1) - (tokens != 0).long()
    mask = ended == 0
    last = tokens.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
    rewards = (last == right) & (mask.sum(1) > NEEDED)
    return Group(tokens, mask, rewards.double())


def scores(group: Group, penalty: bool) -> Tensor:
    """[K] rewards, with DAPO's overlong penalty if `penalty`."""
    if not penalty:
        return group.rewards
    buffer = round(DAPO.overlong_buffer * LONGEST)
    return group.rewards + overlong_penalty(group.mask.sum(1).double(), LONGEST, buffer)


def update(logits: Tensor, group: Group, changes: Changes, updates: int) -> Tensor:
    """Logits of a prompt after gradient steps on one group.

    Args:
        logits: [TOKENS] logits at sampling.
        changes: changes of DAPO that are on. Without any, the loss is GRPO's.
        updates: number of gradient steps.
    """
    one = torch.zeros(SAMPLES, dtype=torch.int64)
    advantages = group_zscore(scores(group, changes.overlong_penalty), one, 1e-6)
    rule = DAPO.aggregation if changes.token_level else GRPO.aggregation
    weights = AGGREGATIONS[rule](group.mask.double(), one, LONGEST)
    low, high = GRPO.clip_low, DAPO.clip_high if changes.clip_higher else GRPO.clip_high
    assert low is not None and high is not None
    old = logits.log_softmax(-1)[group.tokens]
    for _ in range(updates):
        logits = logits.detach().requires_grad_()
        logp = logits.log_softmax(-1)[group.tokens]
        spread = advantages[:, None].expand_as(logp)
        loss = (weights * clipped_surrogate(logp, old, spread, low, high).loss).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = logits.detach() - LEARNING_RATE * gradient
    return logits


def train(changes: Changes, seed: int) -> Training:
    """Train for `STEPS` steps, one prompt per step."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.zeros(PROMPTS, TOKENS, dtype=torch.float64)
    logits[:, 0] = CONTINUE
    for prompt in range(PROMPTS):
        logits[prompt, 1 + prompt] = RIGHT
    first = mean_entropy(logits)
    done = Training([], [], [], [])
    for step in range(STEPS):
        prompt = step % PROMPTS
        for _ in range(DAPO.dynamic_sampling if changes.dynamic_sampling else 1):
            group = sample(logits[prompt].log_softmax(-1), 1 + prompt, draw)
            if group.mixed:
                break
        logits[prompt] = update(logits[prompt].clone(), group, changes, UPDATES)
        done.rewards.append(float(group.rewards.mean()))
        done.useful.append(group.mixed)
        done.entropies.append(mean_entropy(logits) / first)
        done.lengths.append(float(group.mask.sum(1).double().mean()))
    return done


def mean_entropy(logits: Tensor) -> float:
    """Entropy per token in nats, mean over the prompts."""
    logp = logits.log_softmax(-1)
    return float(-(logp.exp() * logp).sum(-1).mean())
