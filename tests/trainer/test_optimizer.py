"""AdamW's settings, and the learning rate as a function of the step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import ragged_batch, settings, tiny_model
from torch import Tensor, nn

from sixfold.algorithm.kl import k3
from sixfold.batch import Batch, LossOutput, filled
from sixfold.recipe.schema import SftConfig, TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.optimizer import learning_rate, make_optimizer, reset_optimizer
from sixfold.trainer.trainer import Trainer

torch.set_num_threads(1)


def test_defaults_of_reinforcement_learning_and_of_sft() -> None:
    """No weight decay in RL: the KL cannot see the drift it causes. SFT decays."""
    (group,) = make_optimizer(nn.Linear(2, 2), TrainerConfig()).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        1e-6,
        (0.9, 0.95),
        1e-8,
        0.0,
    )
    assert TrainerConfig().grad_clip == 1.0
    assert SftConfig().weight_decay == 0.1


def test_frozen_parameters_are_not_in_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    held = {id(p) for g in make_optimizer(model, TrainerConfig()).param_groups for p in g["params"]}
    assert held == {id(p) for p in model[1].parameters()}


def test_two_steps_by_hand() -> None:
    """w -= lr * m_hat / (sqrt(v_hat) + eps), decay off: gradients 1 then 3."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = make_optimizer(weight, settings(learning_rate=0.1))
    w = m = v = 0.0
    for t, g in enumerate((1.0, 3.0), start=1):
        weight.weight.grad = torch.tensor([[g]])
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w -= 0.1 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8)
        assert float(weight.weight.detach()) == pytest.approx(w, rel=1e-5)


def test_after_a_reset_the_next_step_is_that_of_a_new_optimizer() -> None:
    """Bit for bit, three steps long; without the reset the moments tell. The same tensors
    are kept.
    """
    worn, kept, fresh = (nn.Linear(3, 2) for _ in range(3))
    config = settings(learning_rate=0.1, weight_decay=0.01)
    optimizers = [make_optimizer(model, config) for model in (worn, kept)]
    for step in range(5):
        for model, optimizer in zip((worn, kept), optimizers, strict=True):
            _step(model, optimizer, step)
    state = {id(t) for s in optimizers[0].state.values() for t in s.values()}
    reset_optimizer(optimizers[0])
    assert {id(t) for s in optimizers[0].state.values() for t in s.values()} == state
    kept.load_state_dict(worn.state_dict())
    fresh.load_state_dict(worn.state_dict())
    optimizers.append(make_optimizer(fresh, config))
    for step in range(3):
        for model, optimizer in zip((worn, kept, fresh), optimizers, strict=True):
            _step(model, optimizer, 10 + step)
        assert torch.equal(worn.weight, fresh.weight) and torch.equal(worn.bias, fresh.bias)
        assert not torch.equal(worn.weight, kept.weight)


def _step(model: nn.Module, optimizer: torch.optim.AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
        (
            "cosine",
            [
                0.25,
                0.5,
                0.75,
                1.0,
                1.0,
                (1 + math.sqrt(0.5)) / 2,
                0.5,
                (1 - math.sqrt(0.5)) / 2,
                0.0,
                0.0,
                0.0,
            ],
        ),
    ],
)
def test_learning_rate_by_hand(schedule: str, expected: list[float]) -> None:
    """Four steps of warm-up, then four of decay; past the end it stays at the end."""
    config = settings(learning_rate=2.0, schedule=schedule, warmup_steps=4)
    assert [learning_rate(config, step, 8) / 2.0 for step in range(11)] == pytest.approx(
        expected, abs=1e-12
    )


def test_warm_up_longer_than_the_run_and_none_at_all() -> None:
    assert (
        learning_rate(settings(learning_rate=1.0, warmup_steps=10, schedule="linear"), 4, 5) == 0.5
    )
    assert (
        learning_rate(settings(learning_rate=1.0, warmup_steps=5, schedule="linear"), 5, 5) == 1.0
    )
    assert learning_rate(settings(learning_rate=1.0, schedule="linear"), 0, 5) == 1.0


def idle_loss(batch: Batch, logp: Tensor) -> LossOutput:
    """Loss whose gradient is 0, as if all advantages were 0."""
    return LossOutput((filled(batch.weights, "weights") * logp * 0).sum(), {})


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weight_decay_moves_weights_that_the_kl_cannot_see(decay: float) -> None:
    """Qwen3 normalises queries and keys, so their scale does not change the function."""
    model, batch = tiny_model(), ragged_batch(0).with_(minibatch=None)
    start = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name or "k_proj" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.norm().item() for p in trained]
    trainer = Trainer(
        PolicyRoot(model), settings(learning_rate=0.1, weight_decay=decay), Scoring(), 100
    )
    for _ in range(50):
        trainer.train_step(batch, idle_loss)
    shrunk = [p.norm().item() / norm for p, norm in zip(trained, before, strict=True)]
    assert shrunk == pytest.approx([(1 - 0.1 * decay) ** 50] * len(trained), rel=1e-4)
    logp, reference = (score_batch(m, batch, Scoring(), 4096, True) for m in (model, start))
    assert k3(logp, reference).abs().max() < 1e-7
