"""SFT as a loss: the solution's tokens and no other, averaged over all tokens, by the trainer that
RL uses.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import (
    make_trainer,
    plain_gradient,
    plain_logits,
    plain_logp,
    relative,
    step_gradient,
    tiny_model,
)
from torch import Tensor

from sixfold.batch import Batch, collate
from sixfold.errors import UserError
from sixfold.trainer.sft import SupervisedLoss, example
from sixfold.types import Task

torch.set_num_threads(1)
LOSS = SupervisedLoss()
EXAMPLES = [([5, 6, 7], [8, 9, 1]), ([4], [3, 1]), ([2, 2, 2, 2, 2], [1])]


def _batch(examples: list[tuple[list[int], list[int]]]) -> Batch:
    groups = [example(Task(f"t{i}", "?"), p, s) for i, (p, s) in enumerate(examples)]
    return LOSS.prepare(collate(groups))


def _cross_entropy(batch: Batch, prompts: list[int]) -> Tensor:
    """The textbook form: labels shifted by one, everything before `prompts[i]` ignored, mean over
    the rest.
    """
    model = tiny_model()
    logits = plain_logits(model, batch)[:, :-1]
    labels = batch.tokens.clone()
    for b, prompt in enumerate(prompts):
        labels[b, :prompt] = -100
        labels[b, int(batch.lengths[b]) :] = -100
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_the_mask_begins_at_the_first_token_of_the_solution() -> None:
    batch = _batch(EXAMPLES)
    assert batch.mask.int().tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert batch.weights is not None and batch.weights[batch.mask].tolist() == pytest.approx(
        [1 / 6] * 6
    )


def test_loss_is_the_cross_entropy_with_the_prompt_ignored() -> None:
    batch = _batch(EXAMPLES)
    loss = LOSS.compute_loss(batch, plain_logp(tiny_model(), batch)).loss
    torch.testing.assert_close(loss, _cross_entropy(batch, [3, 1, 5]))


@pytest.mark.parametrize("shift", [-1, +1])
def test_an_off_by_one_boundary_would_be_seen(shift: int) -> None:
    """With y[:P-1] or y[:P+1] ignored instead of y[:P] the loss is another number."""
    batch = _batch(EXAMPLES[:1])
    loss = LOSS.compute_loss(batch, plain_logp(tiny_model(), batch)).loss
    assert abs(float((loss - _cross_entropy(batch, [3 + shift])).detach())) > 1e-3


@pytest.mark.parametrize("most", [10**6, 16])
def test_the_trainers_gradient_is_that_of_the_plain_forward(most: int) -> None:
    batch = _batch(EXAMPLES)
    got = step_gradient(tiny_model(), batch, LOSS.compute_loss, max_tokens_per_microbatch=most)
    assert relative(got, plain_gradient(tiny_model(), batch, LOSS.compute_loss)) < 1e-5


def test_a_prompt_token_moves_nothing_but_through_attention() -> None:
    """The logits at prompt positions have no gradient, except the last one: it predicts the
    solution's first token.
    """
    batch = _batch(EXAMPLES[:1])
    logits = plain_logits(tiny_model(), batch).detach().requires_grad_()
    logp = torch.nn.functional.pad(
        logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[:, :, 0], (1, 0)
    )
    LOSS.compute_loss(batch, logp).loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1)[0].bool().tolist() == [False, False, True, True, True, False]


@pytest.mark.slow
def test_it_learns_the_solutions_by_heart() -> None:
    model, batch = tiny_model(), _batch(EXAMPLES)
    trainer = make_trainer(model, learning_rate=3e-2, grad_clip=1.0)
    first = trainer.train_step(batch, LOSS.compute_loss)
    for _ in range(40):
        last = trainer.train_step(batch, LOSS.compute_loss)
    assert float(first["train/loss"]) > 2.0 > 0.05 > float(last["train/loss"])  # type: ignore[arg-type]
    assert "mismatch/kl_k3" not in last
    logp = plain_logp(copy.deepcopy(model), batch)
    assert float(logp[batch.mask].exp().min().detach()) > 0.9


def test_metrics_of_the_policy_ratio_need_sampled_tokens() -> None:
    """Solutions were not sampled: there is nothing to compare their log-probs with."""
    metrics = make_trainer(tiny_model()).train_step(_batch(EXAMPLES), LOSS.compute_loss)
    counts = ("updates", "tokens", "microbatches", "skipped", "skipped_total")
    values = ("loss", "entropy", "grad_norm", "learning_rate")
    assert metrics.keys() == {f"train/{name}" for name in (*values, *counts)}


def test_refusals() -> None:
    with pytest.raises(UserError, match="task t has no worked solution"):
        example(Task("t", "?"), [1, 2], [])
    batch = _batch(EXAMPLES)
    bare = Batch(**{**vars(batch), "weights": None})
    with pytest.raises(ValueError, match=r"batch\.weights is not filled in"):
        LOSS.compute_loss(bare, torch.zeros(batch.tokens.shape))
