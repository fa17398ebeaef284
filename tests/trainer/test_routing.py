"""The balance loss equals that of transformers for any split; statistics of the routers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.models.experts import FAMILIES, expert_model
from tiny import grpo, ragged_batch, relative, settings
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from sixfold.batch import Batch, LossOutput
from sixfold.errors import UserError
from sixfold.recipe.schema import MoeConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.routing import (
    Routed,
    balance_loss,
    expert_counts,
    make_routing,
    router_metrics,
    router_probabilities,
)
from sixfold.trainer.trainer import Trainer

COEFFICIENT = 0.3


def no_loss(batch: Batch, logp: Tensor) -> LossOutput:
    return LossOutput(0.0 * logp.sum())


def trainer_of(model: PreTrainedModel, coefficient: float = COEFFICIENT, **values: Any) -> Trainer:
    root = PolicyRoot(model, make_routing(model, MoeConfig(balance_loss=coefficient)))
    return Trainer(root, settings(**values), Scoring(), total_steps=10)


def gradient(
    model: PreTrainedModel, batch: Batch, loss: Any = no_loss, **values: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Gradient of one step on a copy of the model, as a flat tensor, and metrics of the step."""
    trainer = trainer_of(copy.deepcopy(model), **values)
    metrics = trainer.train_step(batch, loss)
    assert metrics["train/skipped"] == 0.0, trainer.skip_reason
    state = trainer.optimizer.state
    moments = [state[p]["exp_avg"].flatten() for p in trainer.model.parameters() if p in state]
    return torch.cat(moments) / (1 - trainer.config.betas[0]), metrics


def of_transformers(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Balance loss of a padded forward pass, averaged over layers, and its gradient."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    real = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    layers = model(
        batch.tokens, attention_mask=real, output_router_logits=True, use_cache=False
    ).router_logits
    each = [load_balancing_loss_func((layer,), 8, 2, real) for layer in layers]
    loss = torch.stack(each).mean()  # type: ignore[arg-type]
    (COEFFICIENT * loss).backward()
    trained = {id(p) for p in model.parameters() if p.grad is not None}
    assert trained
    return loss, torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("most", [4096, 40])
def test_gradient_is_that_of_transformers_loss(share_prefix: bool, most: int) -> None:
    """Rows are in one micro-batch or in several, with shared prompts or without."""
    model, batch = expert_model("mixtral"), ragged_batch(0)
    loss, expected = of_transformers(model, batch)
    found, metrics = gradient(
        model, batch, max_tokens_per_microbatch=most, share_prefix=share_prefix
    )
    assert (metrics["train/microbatches"] > 1) == (most == 40)
    assert metrics["moe/balance_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative(found, expected) < 1e-5


def test_a_model_with_one_layer_has_the_loss_of_its_own_code() -> None:
    model, batch = expert_model("mixtral"), ragged_batch(0)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    real = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    with torch.no_grad():
        own = model(batch.tokens, attention_mask=real, output_router_logits=True, use_cache=False)
    _, metrics = gradient(model, batch)
    assert metrics["moe/balance_loss"] == pytest.approx(float(own.aux_loss), rel=1e-5)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_layers_give_the_same_gradient(mode: str) -> None:
    model, batch = expert_model("qwen3_moe"), ragged_batch(0)
    plain, _ = gradient(model, batch, grpo().compute_loss)
    found, _ = gradient(model, batch, grpo().compute_loss, activation_checkpointing=mode)
    assert relative(found, plain) < 1e-6


@pytest.mark.mostly_nightly(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_with_a_balance_loss(name: str) -> None:
    """The balance loss falls, and the split into micro-batches does not matter."""
    model, batch = expert_model(name), ragged_batch(0)
    whole, first = gradient(model, batch)
    parts, _ = gradient(model, batch, max_tokens_per_microbatch=60)
    assert relative(parts, whole) < 1e-4
    trainer = trainer_of(model, learning_rate=3e-3)
    for _ in range(8):
        last = trainer.train_step(batch, no_loss)
    assert 0 < last["moe/balance_loss"] < first["moe/balance_loss"]  # type: ignore[operator]


def test_without_a_coefficient_nothing_changes_by_a_bit() -> None:
    model, batch = expert_model("qwen3_moe"), ragged_batch(0)
    loss = grpo().compute_loss
    watched, metrics = gradient(model, batch, loss, coefficient=0.0, max_tokens_per_microbatch=60)
    trainer = Trainer(
        PolicyRoot(model), settings(max_tokens_per_microbatch=60), Scoring(), total_steps=10
    )
    plain = trainer.train_step(batch, loss)
    state = trainer.optimizer.state
    moments = [state[p]["exp_avg"].flatten() for p in trainer.model.parameters()]
    assert torch.equal(torch.cat(moments) / (1 - trainer.config.betas[0]), watched)
    assert set(metrics) - set(plain) == {"moe/max_load", "moe/load_entropy_frac", "moe/dead_frac"}
    assert {k: metrics[k] for k in plain} == plain


def test_balance_loss_by_hand() -> None:
    """Two tokens, three experts, one layer: 3 · (1 · 0.35 + 0 · 0.35 + 0 · 0.3)."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4]])
    weight = torch.tensor([0.5, 0.5])
    assert float(balance_loss([p], weight, torch.tensor([[1.0, 0.0, 0.0]]))) == pytest.approx(1.05)
    even = balance_loss([p, p], weight, torch.full((2, 3), 2 / 3))
    assert float(even) == pytest.approx(2)  # k of k experts per token, whatever the probabilities


def test_sigmoid_scores_are_normalised() -> None:
    p = router_probabilities(torch.tensor([[0.0, math.log(3.0)]]), sigmoid=True)
    torch.testing.assert_close(p, torch.tensor([[0.4, 0.6]]))


def test_statistics_by_hand() -> None:
    """Two layers with four experts: one uses two experts equally, the other all four."""
    choices = torch.tensor([[[0, 1], [0, 1]], [[0, 1], [2, 3]]])
    counts = expert_counts(choices, torch.tensor([1.0, 1.0]), 4)
    assert counts.tolist() == [[2, 2, 0, 0], [1, 1, 1, 1]]
    assert expert_counts(choices, torch.tensor([3.0, 1.0]), 4)[1].tolist() == [3, 3, 1, 1]
    metrics = router_metrics([Routed(counts, torch.tensor(2.0))])
    assert {key: float(x) for key, x in metrics.items()} == {
        "moe/max_load": pytest.approx(1.5),
        "moe/load_entropy_frac": pytest.approx(0.75),
        "moe/dead_frac": pytest.approx(0.25),
    }


def test_a_dense_model_refuses_a_balance_loss(tiny: Any) -> None:
    assert make_routing(tiny("qwen3"), MoeConfig()) is None
    with pytest.raises(UserError, match=r"moe\.balance_loss.*Remove"):
        make_routing(tiny("qwen3"), MoeConfig(balance_loss=0.01))
