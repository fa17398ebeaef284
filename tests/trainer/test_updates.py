"""Several updates a step: the same as so many steps by hand, what is said of them, and an entropy
that carries its gradient.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from tiny import grpo, plain_logits, ragged_batch, relative, settings, step_gradient, tiny_model
from torch import Tensor

from sixfold.batch import Batch, Loss, LossOutput, filled
from sixfold.trainer.learned import Learned, merge_updates
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.sharing import plan_updates
from sixfold.trainer.trainer import Trainer

torch.set_num_threads(1)
EPOCHS, PARTS = 2, 3


def trainer_of(epochs: int = 1, total_steps: int = 100, **values: object) -> Trainer:
    """A trainer on a model of its own, always the same one."""
    return Trainer(
        PolicyRoot(tiny_model()),
        settings(learning_rate=1e-2, **values),
        Scoring(),
        total_steps,
        epochs=epochs,
    )


def three_parts() -> Batch:
    """Four groups in three mini-batches, the second of them the largest; their rows are not in
    order.
    """
    batch = ragged_batch(0, groups=4)
    part = torch.tensor([2, 0, 1, 1])[batch.group]
    return batch.with_(minibatch=part)


def rows_of(batch: Batch, number: int) -> Batch:
    return replace(
        batch.rows((filled(batch.minibatch, "minibatch") == number).nonzero()[:, 0]),
        minibatch=None,
    )


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def faulty(calls: set[int]) -> Loss:
    """GRPO's loss, but NaN at the calls of these numbers, from 0."""
    count = iter(range(10**6))

    def loss(batch: Batch, logp: Tensor) -> LossOutput:
        output = grpo().compute_loss(batch, logp)
        return replace(output, loss=output.loss * (math.nan if next(count) in calls else 1.0))

    return loss


@pytest.mark.slow
def test_passes_and_mini_batches_are_steps_by_hand() -> None:
    """Bit for bit the weights, and the metrics are those of the six steps, merged; the numbering of
    the mini-batches decides the order.
    """
    batch = three_parts()
    ours, hand = trainer_of(EPOCHS), trainer_of()
    merged = ours.learn(batch, grpo().compute_loss)
    steps = [
        hand.learn(rows_of(batch, number), grpo().compute_loss)
        for _ in range(EPOCHS)
        for number in range(PARTS)
    ]
    assert torch.equal(weights_of(ours), weights_of(hand)) and not torch.equal(
        weights_of(ours), weights_of(trainer_of())
    )
    assert (ours.version, ours.steps) == (hand.version, hand.steps) == (6, 6)
    assert merged == merge_updates(steps)
    other = trainer_of()
    for number in (1, 0, 2):
        other.train_step(rows_of(batch, number), grpo().compute_loss)
    one_pass = trainer_of()
    one_pass.train_step(batch, grpo().compute_loss)
    assert not torch.equal(weights_of(other), weights_of(one_pass)), (
        "the order makes no difference here: it was not tested"
    )


def test_a_mini_batch_without_a_signal_makes_no_update() -> None:
    batch = three_parts()
    mute = batch.with_(
        weights=torch.where(
            filled(batch.minibatch, "minibatch")[:, None] == 1,
            0.0,
            filled(batch.weights, "weights"),
        )
    )
    ours, hand = trainer_of(EPOCHS), trainer_of()
    metrics = ours.train_step(mute, grpo().compute_loss)
    for number in (0, 2, 0, 2):
        hand.train_step(rows_of(batch, number), grpo().compute_loss)
    assert torch.equal(weights_of(ours), weights_of(hand))
    assert (metrics["train/updates"], metrics["train/skipped"], ours.version) == (4.0, 0.0, 4)


def test_what_merging_does_with_each_kind_of_number() -> None:
    """A metric that one update lacks is averaged over the others."""
    first = Learned(
        {"train/loss": 1.0, "mismatch/kl_k3": 0.5, "train/ratio_hist": [1.0, 2.0, 0.0]},
        learning_rate=0.1,
        grad_norm=1.0,
        updates=1,
        tokens=10,
        microbatches=2,
        skipped=0,
        skipped_total=3,
    )
    second = Learned(
        {"train/loss": 2.0, "train/ratio_hist": [0.0, 5.0, 1.0]},
        learning_rate=0.2,
        grad_norm=4.0,
        updates=0,
        tokens=20,
        microbatches=4,
        skipped=1,
        skipped_total=4,
    )
    merged = merge_updates([first, second])
    assert merged == Learned(
        {"train/loss": 1.5, "mismatch/kl_k3": 0.5, "train/ratio_hist": [1.0, 7.0, 1.0]},
        learning_rate=0.2,
        grad_norm=2.5,
        updates=1,
        tokens=30,
        microbatches=6,
        skipped=1,
        skipped_total=4,
    )
    assert merged.policy_metrics() == merged.metrics | {
        "train/learning_rate": 0.2,
        "train/grad_norm": 2.5,
        "train/updates": 1.0,
        "train/tokens": 30.0,
        "train/microbatches": 6.0,
        "train/skipped": 1.0,
        "train/skipped_total": 4.0,
    }


@pytest.mark.slow
def test_one_skipped_update_counts_once_and_the_others_are_made() -> None:
    """The second of six has no finite loss. Each mini-batch is one micro-batch, so calls of the
    loss are updates.
    """
    batch = three_parts()
    ours, hand = trainer_of(EPOCHS), trainer_of()
    metrics = ours.train_step(batch, faulty({1}))
    for number in (0, 2, 0, 1, 2):
        hand.train_step(rows_of(batch, number), grpo().compute_loss)
    assert torch.equal(weights_of(ours), weights_of(hand))
    assert (metrics["train/updates"], metrics["train/skipped"], metrics["train/skipped_total"]) == (
        5.0,
        1.0,
        1.0,
    )
    assert (ours.version, ours.steps, ours.skipped_total, ours.skipped_in_a_row) == (5, 6, 1, 0)
    assert ours.skip_reason.startswith("loss not finite in rows [8, 9, 10")
    ours.train_step(batch, grpo().compute_loss)
    assert ours.skip_reason == "" and ours.version == 11


def test_the_learning_rate_counts_updates() -> None:
    """Warm-up over two updates, then down a line to 0 at the twelfth: two steps of six updates
    each, the skipped one among them.
    """
    trainer, rates = trainer_of(EPOCHS, total_steps=12, warmup_steps=2, schedule="linear"), []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    logged = [
        trainer.train_step(three_parts(), loss)["train/learning_rate"]
        for loss in (faulty({3}), grpo().compute_loss)
    ]
    expected = [0.005, 0.01] + [0.01 * (1 - k / 10) for k in range(10)]
    assert logged == pytest.approx([expected[5], expected[11]])
    assert rates == pytest.approx(expected[:3] + expected[4:])


# --- the entropy's gradient


def entropy_loss(batch: Batch, logp: Tensor) -> LossOutput:
    """The mean entropy over the step's sampled tokens, and nothing else."""
    return LossOutput(
        (filled(batch.weights, "weights") * filled(batch.entropy, "entropy")).sum()
        + 0.0 * logp.sum()
    )


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("chunk", [1024, 7])
@pytest.mark.parametrize(("most", "temperature"), [(10**6, 1.0), (40, 0.7)])
def test_the_gradient_of_the_entropy_is_that_of_the_full_softmax(
    chunk: int, most: int, temperature: float
) -> None:
    """Packed, in chunks that are checkpointed, in micro-batches: against an ordinary padded
    forward.
    """
    model, batch = tiny_model(), ragged_batch(0)
    batch = batch.with_(weights=batch.mask / batch.mask.sum())
    plain = copy.deepcopy(model)
    logp = (plain_logits(plain, batch) / temperature).log_softmax(-1)
    entropy = torch.nn.functional.pad(-(logp.exp() * logp).sum(-1)[:, :-1], (1, 0))
    torch.where(batch.mask, entropy, 0.0).sum().div(batch.mask.sum()).backward()
    expected = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in plain.parameters()]
    )
    scoring = Scoring(temperature, chunk, entropy_gradient=True)
    assert (
        relative(
            step_gradient(model, batch, entropy_loss, scoring, max_tokens_per_microbatch=most),
            expected,
        )
        < 1e-5
    )


def test_without_the_flag_the_entropy_is_a_constant() -> None:
    batch = ragged_batch(0)
    gradient = step_gradient(
        tiny_model(),
        batch.with_(weights=batch.mask / batch.mask.sum()),
        entropy_loss,
        Scoring(chunk=7),
    )
    assert not gradient.any()


# --- backward passes


@pytest.mark.parametrize("bad", [None, "advantages", "weights", "old_logp", "gradient"])
def test_every_planned_micro_batch_has_one_backward_pass(
    bad: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the first values of each update are not finite."""
    batch, trainer = (
        three_parts(),
        trainer_of(EPOCHS, max_tokens_per_microbatch=30, max_skipped_steps=9),
    )
    number = filled(batch.minibatch, "minibatch").tolist()
    plan = plan_updates(batch, [True] * len(number), number, 30, True)
    if bad == "gradient":
        next(trainer.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    elif bad:
        broken = filled(getattr(batch, bad), bad).clone()
        for parts in plan:
            broken[parts[0][0]] = math.nan
        batch = batch.with_(**{bad: broken})
    calls = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda t: (calls.append(1), backward(t)))
    metrics = trainer.train_step(batch, grpo().compute_loss)
    planned = EPOCHS * sum(len(parts) for parts in plan)
    assert len(calls) == planned == metrics["train/microbatches"] and planned > EPOCHS * PARTS
    assert metrics["train/skipped"] == (EPOCHS * PARTS if bad else 0)
