"""Gradient spikes are reported with the rows that caused them, and clipped as always."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tiny import grpo, make_trainer, plain_logits, ragged_batch, tiny_model

from sixfold.trainer.spikes import FACTOR, WARM_UP, NormLevel, RowGradients, Z, named_rows

torch.set_num_threads(1)


def steady(count: int, seed: int = 0, deviation: float = 0.3) -> list[float]:
    """Log-normal norms around 2."""
    rng = random.Random(seed)
    return [2.0 * rng.lognormvariate(0.0, deviation) for _ in range(count)]


def test_steady_falling_and_growing_norms_are_no_spikes() -> None:
    for seed in range(20):
        level = NormLevel()
        assert not any(level.observe(norm) for norm in steady(400, seed))
    level = NormLevel()
    assert not any(level.observe(2.0 * 1.01**i) for i in range(400))
    assert not any(level.observe(norm) for norm in (1e-9, 0.0))
    quiet = NormLevel()
    assert not any(quiet.observe(norm) for norm in [1.0] * 100 + [FACTOR - 0.1])


def test_spike_of_a_thousand_is_reported_each_time_and_does_not_raise_the_level() -> None:
    level = NormLevel()
    for norm in steady(100):
        level.observe(norm)
    before = level.mean
    assert "975 times" in level.observe(2000.0)
    assert level.mean - before < 0.2
    assert level.observe(2000.0) and not level.observe(2.0)


def test_nothing_is_reported_before_the_level_is_known() -> None:
    level = NormLevel()
    assert not any(level.observe(norm) for norm in [1.0, 1e6] * (WARM_UP // 2))
    assert level.seen < WARM_UP


def test_the_first_norms_count_equally_and_a_resumed_level_goes_on_exactly() -> None:
    level, norms = NormLevel(), steady(WARM_UP)
    for norm in norms:
        level.observe(norm)
    logs = torch.tensor(norms, dtype=torch.float64).log()
    assert level.mean == pytest.approx(float(logs.mean()), rel=1e-12)
    assert level.variance == pytest.approx(float(logs.var(unbiased=False)), rel=1e-12)
    resumed = NormLevel()
    resumed.load(level.state())
    for norm in steady(50, 1):
        assert level.observe(norm) == resumed.observe(norm)
    assert level == resumed and Z > 0


def test_contributions_are_the_gradients_at_the_logits_of_the_tokens() -> None:
    """Oracle: autograd to the logit of each sampled token."""
    model, batch = tiny_model(), ragged_batch(0)
    logits = plain_logits(model, batch).detach().requires_grad_()
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[:, :, 0]
    logp = torch.where(batch.mask, torch.nn.functional.pad(logp, (1, 0)), 0.0)
    rows, columns = batch.mask.nonzero().T
    values = logp[rows, columns]
    gradients = RowGradients()
    gradients.watch(values, torch.arange(len(batch.tokens)), rows)
    table = torch.zeros(batch.tokens.shape).index_put((rows, columns), values)
    grpo().compute_loss(batch, table).loss.backward()
    assert logits.grad is not None
    own = logits.grad[:, :-1].gather(-1, batch.tokens[:, 1:, None])[:, :, 0]
    wanted = (own * batch.mask[:, 1:]).square().sum(-1)
    found = gradients.contributions(log_probs=True)
    assert torch.tensor([found[b] for b in range(len(wanted))]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_row_that_causes_a_spike_is_named_and_the_update_is_clipped(tokens: int) -> None:
    """One row weighs 1000 times as much as before, in any division into micro-batches."""
    model, batch = tiny_model(), ragged_batch(0)
    limits = {"grad_clip": 0.5, "max_tokens_per_microbatch": tokens, "learning_rate": 1e-6}
    trainer, loss = make_trainer(model, **limits), grpo().compute_loss
    for _ in range(WARM_UP + 1):
        trainer.train_step(batch, loss)
        assert trainer.spikes == []
    assert batch.weights is not None
    weighty = batch.weights.any(-1).nonzero()[:, 0].tolist()
    row = weighty[len(weighty) // 2]
    weights = batch.weights.clone()
    weights[row] *= 1000.0
    twin, version = copy.deepcopy(trainer), trainer.version
    twin.level = NormLevel()
    metrics = trainer.train_step(batch.with_(weights=weights), loss)
    (line,) = trainer.spikes
    first = line.partition("contributions: ")[2].partition(",")[0]
    assert first.startswith(batch.names[row]) and "trainer.grad_clip = 0.5" in line
    assert metrics["train/skipped"] == 0.0 and trainer.version == version + 1
    # The report changes no update: a trainer without a level makes the same update.
    twin.train_step(batch.with_(weights=weights), loss)
    assert twin.spikes == []
    pairs = zip(trainer.model.parameters(), twin.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    trainer.train_step(batch, loss)
    assert trainer.spikes == []


def test_non_finite_rows_are_named_first() -> None:
    names = ["a", "b", "c"]
    text = named_rows({0: 1.0, 1: float("nan"), 2: 3.0}, names)
    assert text == "b (not finite), c (75%), a (25%)"
