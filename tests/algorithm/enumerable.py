"""A policy small enough to enumerate: a softmax at every prefix of a tree of completions, float64.
What an estimator does on average, and how far it strays, is then a sum over all the groups that
could have been drawn, not a sample of them.

    toy.log_probs(theta)                  of every token of every completion, differentiable
    every_group(toy, theta, ..., K)       the gradient that the algorithm makes of each of the N^K
    groups, and that group's probability

theta [S, V]: one row of logits for each prefix. Completions are numbered; each is one row [T], its
prompt the single token at index 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from sixfold.algorithm.composed import Composed
from sixfold.batch import Batch, final_rewards


@dataclass(frozen=True)
class Toy:
    """The completions of a prefix tree: N of them, T - 1 tokens at most. tokens, state (the prefix
    a token is drawn at): [N, T] int64, 0 off the mask; mask [N, T] bool.
    """

    tokens: Tensor
    state: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """[N] tokens of each completion."""
        return self.mask.sum(-1)

    @property
    def states(self) -> int:
        """Prefixes at which a token is drawn."""
        return int(self.state.max()) + 1

    def log_probs(self, theta: Tensor) -> Tensor:
        """theta [..., S, V] -> [..., N, T], 0 off the mask."""
        return torch.where(self.mask, theta.log_softmax(-1)[..., self.state, self.tokens], 0.0)

    def probability(self, theta: Tensor) -> Tensor:
        """theta [..., S, V] -> [..., N]; differentiable."""
        return self.log_probs(theta).sum(-1).exp()

    def scores(self, theta: Tensor) -> Tensor:
        """[N, T, S V]: the gradient of each token's log-prob, by hand: one-hot minus softmax at the
        token's prefix, 0 elsewhere.
        """
        vocabulary = theta.shape[-1]
        at_state = torch.nn.functional.one_hot(self.state, self.states).double()[..., None]
        towards = (
            torch.nn.functional.one_hot(self.tokens, vocabulary) - theta.softmax(-1)[self.state]
        )
        return (at_state * towards[:, :, None, :] * self.mask[:, :, None, None]).flatten(2)

    def batch(self, rows: Tensor, group: Tensor, logp: Tensor, rewards: Tensor) -> Batch:
        """Completions `rows` [B] of prompts `group` [B], their log-probs at sampling [B, T] and
        rewards [B].
        """
        mask, one = self.mask[rows], torch.ones_like(rows)
        return Batch(
            tokens=self.tokens[rows],
            mask=mask,
            old_logp=logp.detach(),
            version=torch.zeros_like(self.tokens[rows]),
            rewards=final_rewards(rewards, mask),
            lengths=mask.sum(-1) + 1,
            prompt_lengths=one,
            group=group,
            truncated=torch.zeros_like(one, dtype=torch.bool),
        )


def tree(completions: list[tuple[int, ...]]) -> Toy:
    """The toy whose completions are these. Where some are shorter than others, none is the
    beginning of another.
    """
    prefixes = sorted({c[:t] for c in completions for t in range(len(c))})
    width = 1 + max(map(len, completions))
    tokens, state = torch.zeros(2, len(completions), width, dtype=torch.int64).unbind()
    mask = torch.zeros(len(completions), width, dtype=torch.bool)
    for n, c in enumerate(completions):
        for t, token in enumerate(c):
            tokens[n, t + 1], state[n, t + 1], mask[n, t + 1] = token, prefixes.index(c[:t]), True
    return Toy(tokens, state, mask)


def every_group(
    algorithm: Composed, toy: Toy, theta: Tensor, rewards: Tensor, k: int, ref: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(gradient [N^k, S V], probability [N^k]) of every group of k completions that could be drawn;
    rewards [N].

    The gradient is of what is maximised, -loss, in a step that holds the group alone. All groups go
    through one batch, so this is only for advantages that are taken within a group and aggregations
    whose denominator is the number of rows. ref: the reference's logits.
    """
    completions = len(toy.tokens)
    rows = torch.tensor(list(product(range(completions), repeat=k))).flatten()
    groups = completions**k
    batch = toy.batch(
        rows, torch.arange(groups).repeat_interleave(k), toy.log_probs(theta)[rows], rewards[rows]
    )
    if ref is not None:
        batch = batch.with_(ref_logp=toy.log_probs(ref)[rows])
    logp = batch.old_logp.clone().requires_grad_()
    (by_logp,) = torch.autograd.grad(
        algorithm.compute_loss(algorithm.prepare(batch), logp).loss, logp
    )
    by_row = torch.einsum("bt,btp->bp", by_logp, toy.scores(theta)[rows])
    return -groups * by_row.view(groups, k, -1).sum(1), toy.probability(theta)[rows].view(
        groups, k
    ).prod(1)


def moments(gradient: Tensor, probability: Tensor) -> tuple[Tensor, float]:
    """Exact mean [P] and total variance (trace of the covariance) of a gradient [G, P] drawn with
    these probabilities [G].
    """
    mean = probability @ gradient
    return mean, float(probability @ (gradient - mean).square().sum(-1))


def exact_gradient(toy: Toy, theta: Tensor, rewards: Tensor) -> Tensor:
    """[S V] of the expected reward sum_c pi(c) r(c), by autograd of the probabilities: no score
    function in it.
    """
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(toy.probability(leaf) @ rewards, leaf)
    return gradient.flatten()
