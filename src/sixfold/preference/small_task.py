"""A preference loss on a small task: likelihood displacement, before and after.

    sixfold algorithms dpo --try

A policy writes four tokens after one of sixteen prompts; its logits are linear in features that
prompts share. Pairs are sampled from the reference and labelled by Bradley and Terry with a hidden
reward of the same form. Half of the prompts are held out. A loss that raises the margin by making
the worse completion less likely also lowers completions that resemble it: the better one of the
pair among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .loss import PreferenceLoss
from .losses import log_ratios, margin
from .mixture import Mixture, Term
from .pairs import Pairs, Unpaired

PROMPTS, FEATURES, TOKENS, WORDS, PER_PROMPT = 16, 6, 4, 8, 16
STEPS, LEARNING_RATE = 100, 0.02


class SmallTask:
    """Pairs of completions of a log-linear policy.

    Args:
        seed: seed of the features, the hidden reward, the pairs and their labels.
    """

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.features = torch.randn(PROMPTS, FEATURES, generator=draw)
        self.reference = torch.randn(FEATURES, TOKENS, WORDS, generator=draw) / FEATURES**0.5
        hidden = torch.randn(FEATURES, TOKENS, WORDS, generator=draw)
        words = torch.einsum("pf,ftw->ptw", self.features, hidden)
        prompts = torch.arange(PROMPTS).repeat_interleave(2 * PER_PROMPT)
        probabilities = self._log_probs(self.reference)[prompts].exp().flatten(0, 1)
        sampled = torch.multinomial(probabilities, 1, generator=draw).view(-1, TOKENS)
        lengths = torch.randint(2, TOKENS + 1, (len(sampled),), generator=draw)
        self.mask = torch.arange(TOKENS) < lengths[:, None]
        rewards = (words[prompts].gather(2, sampled[..., None])[..., 0] * self.mask).sum(-1)
        first, second = rewards.view(-1, 2).unbind(1)
        won = torch.rand(len(first), generator=draw) < torch.sigmoid(first - second)
        at = torch.arange(0, len(sampled), 2)
        self.better, self.worse = torch.where(won, at, at + 1), torch.where(won, at + 1, at)
        self.prompts, self.sampled = prompts, sampled
        self.train = prompts[::2] < PROMPTS // 2

    def _log_probs(self, weights: Tensor) -> Tensor:
        return torch.einsum("pf,ftw->ptw", self.features, weights).log_softmax(-1)

    def pairs(self, weights: Tensor) -> Pairs:
        """All pairs under a policy."""
        sides = []
        for table in (weights, self.reference):
            tokens = self._log_probs(table)[self.prompts].gather(2, self.sampled[..., None])[..., 0]
            tokens = tokens * self.mask
            counts = self.mask.sum(-1)
            shorter = torch.minimum(counts[self.better], counts[self.worse])[:, None]
            head = torch.arange(TOKENS) < shorter
            for side in (self.better, self.worse):
                sides.append((tokens[side].sum(-1), (tokens[side] * head).sum(-1)))
        lengths = self.mask.sum(-1).float()
        (w, w_head), (l, l_head), (ref_w, ref_w_head), (ref_l, ref_l_head) = sides  # noqa: E741
        return Pairs(
            *(w, l, lengths[self.better], lengths[self.worse], ref_w, ref_l),
            chosen_head=w_head,
            rejected_head=l_head,
            ref_chosen_head=ref_w_head,
            ref_rejected_head=ref_l_head,
        )


def single(pairs: Pairs) -> Unpaired:
    """The completions of the pairs: better ones are liked, worse ones disliked."""
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
    liked = torch.arange(2 * len(pairs)) < len(pairs)
    return Unpaired(
        torch.cat([pairs.chosen, pairs.rejected]),
        torch.cat([pairs.ref_chosen, pairs.ref_rejected]),
        liked,
    )


def train_loss(row: PreferenceLoss, task: SmallTask, steps: int) -> Tensor:
    """Weights of the policy after `steps` updates on the training pairs."""
    mixture = Mixture([Term(row, row.defaults)])
    weights = task.reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=LEARNING_RATE)
    train = task.train.nonzero()[:, 0]
    for _ in range(steps):
        pairs = task.pairs(weights).of(train)
        rows = single(pairs) if row.unpaired else pairs
        loss = mixture.per_pair(rows, mixture.whole_batch(rows)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights.detach()


def measured(task: SmallTask, weights: Tensor) -> dict[str, tuple[float, float, float]]:
    """(accuracy, log pi of the better, log pi of the worse completion) per token, by set of pairs.

    Accuracy is the share of pairs whose better completion has gained more log-prob.
    """
    pairs, found = task.pairs(weights), {}
    for name, some in (("training", task.train), ("held out", ~task.train)):
        part = pairs.of(some.nonzero()[:, 0])
        gained = torch.stack(log_ratios(part)).diff(dim=0)[0] < 0
        found[name] = (
            float(gained.float().mean()),
            float(part.chosen.sum() / part.chosen_tokens.sum()),
            float(part.rejected.sum() / part.rejected_tokens.sum()),
        )
    return found


def try_loss(row: PreferenceLoss, *, steps: int = STEPS, seed: int = 0) -> None:
    """Train on the small task and print what the loss did to both sides of the pairs.

    Args:
        row: the loss.
        steps: updates.
        seed: seed of the task.
    """
    task = SmallTask(seed)
    weights = train_loss(row, task, steps)
    before, after = measured(task, task.reference), measured(task, weights)
    gap = float(margin(task.pairs(weights).of(task.train.nonzero()[:, 0]), row.defaults).mean())
    print(f"{row.name}, {steps} steps on {int(task.train.sum())} pairs: mean margin {gap:.2f}\n")
    print("pairs     accuracy  log pi(better) per token  log pi(worse) per token")
    for name, (accuracy, better, worse) in after.items():
        print(
            f"{name:<10}{100 * accuracy:>6.1f} %  {before[name][1]:>10.3f} ->{better:>8.3f}     "
            f"{before[name][2]:>10.3f} ->{worse:>8.3f}"
        )
    shift = after["held out"][1] - before["held out"][1]
    verdict = "displaced" if shift < 0 else "not displaced"
    print(f"\nheld-out better completions: {shift:+.3f} nats per token ({verdict})")
