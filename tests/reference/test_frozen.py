"""The reference: frozen, out of every optimizer, and equal to the trainer before the first step."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, LossOutput, collate
from sixfold.model.attention import NAME, register
from sixfold.recipe.schema import TrainerConfig
from sixfold.reference.frozen import FrozenReference, NoReference
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory

torch.set_num_threads(1)
SCORING = Scoring(temperature=0.8, chunk=16)


@pytest.fixture
def policy() -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    model.set_attn_implementation(NAME)
    return model.eval()


def _batch(seed: int) -> Batch:
    rng = random.Random(seed)
    groups = []
    for g in range(2):
        prompt = [rng.randrange(23) for _ in range(2 + g)]
        rows = []
        for k in range(3):
            n = rng.randint(2, 9)
            rows.append(
                Trajectory.one_turn(
                    f"t{g}",
                    k,
                    prompt,
                    [rng.randrange(23) for _ in range(n)],
                    [-3.0] * n,
                    [0] * n,
                    "stop",
                    reward=Reward(float(k == g)),
                )
            )
        groups.append(Group(Task(f"t{g}", "?"), rows))
    return collate(groups)


def _reference(policy: PreTrainedModel, share_prefix: bool = True) -> FrozenReference:
    return FrozenReference(policy, SCORING, max_tokens=20, share_prefix=share_prefix)


def _trainer(policy: PreTrainedModel) -> Trainer:
    return Trainer(
        PolicyRoot(policy),
        TrainerConfig(learning_rate=1e-2, max_tokens_per_microbatch=32),
        SCORING,
        total_steps=5,
    )


def _train(trainer: Trainer, reference: FrozenReference, steps: int) -> None:
    algorithm = make_algorithm(ZOO["grpo"], 16)
    for step in range(steps):
        trainer.train_step(algorithm.prepare(reference.score(_batch(step))), algorithm.compute_loss)


def test_it_is_frozen_in_evaluation_mode_and_shares_no_storage(policy: PreTrainedModel) -> None:
    policy.train()
    reference = _reference(policy)
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert not any(m.training for m in reference.model.modules())
    assert all(p.requires_grad for p in policy.parameters()), "the policy itself was frozen"
    mine = {p.data_ptr() for p in reference.model.parameters()}
    assert not mine & {p.data_ptr() for p in policy.parameters()}


@pytest.mark.slow
def test_it_is_bit_identical_after_training_and_in_no_optimizer(policy: PreTrainedModel) -> None:
    reference, trainer = _reference(policy), _trainer(policy)
    before = {name: t.clone() for name, t in reference.tensors().items()}
    score = reference.score(_batch(9)).ref_logp
    _train(trainer, reference, 4)
    assert trainer.version == 4
    assert all(torch.equal(t, before[name]) for name, t in reference.tensors().items())
    assert score is not None and torch.equal(reference.score(_batch(9)).ref_logp, score)  # type: ignore[arg-type]
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in reference.model.parameters()}
    assert all(p.grad is None for p in reference.model.parameters())


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("share_prefix", [True, False])
def test_it_scores_as_the_trainer_does_before_the_first_step(
    policy: PreTrainedModel, share_prefix: bool
) -> None:
    """Same weights, temperature and packing: equal log-probs, so the KL begins at zero. Masked
    positions are zero.
    """
    reference, trainer = _reference(policy, share_prefix), _trainer(policy)
    batch = reference.score(_batch(0))
    assert batch.ref_logp is not None and not batch.ref_logp.requires_grad
    assert not batch.ref_logp[~batch.mask].any() and (batch.ref_logp[batch.mask] < 0).all()
    seen: list[tuple[Batch, Tensor]] = []

    def loss(local: Batch, logp: Tensor) -> LossOutput:
        seen.append((local, logp.detach()))
        return LossOutput((logp * local.mask).sum())

    trainer.train_step(batch.with_(weights=batch.mask.float()), loss)
    assert sum(len(logp) for _, logp in seen) == len(batch.tokens)
    for local, logp in seen:
        torch.testing.assert_close(logp, local.ref_logp, atol=2e-6, rtol=1e-6)


@pytest.mark.slow
def test_reset_copies_the_policy_in_place(policy: PreTrainedModel) -> None:
    reference, trainer = _reference(policy), _trainer(policy)
    pointers = [p.data_ptr() for p in reference.model.parameters()]
    _train(trainer, reference, 2)
    moved = _reference(policy).score(_batch(9)).ref_logp
    assert moved is not None and not torch.equal(reference.score(_batch(9)).ref_logp, moved)  # type: ignore[arg-type]
    reference.reset(policy)
    assert torch.equal(reference.score(_batch(9)).ref_logp, moved)  # type: ignore[arg-type]
    assert [p.data_ptr() for p in reference.model.parameters()] == pointers
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_checkpoint_restores_the_reference(policy: PreTrainedModel) -> None:
    reference = _reference(policy)
    saved = {name: t.clone() for name, t in reference.tensors().items()}
    expected = reference.score(_batch(9)).ref_logp
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    other = _reference(policy)
    other.load(saved, {})
    assert expected is not None and torch.equal(other.score(_batch(9)).ref_logp, expected)  # type: ignore[arg-type]


def test_without_a_kl_there_is_none() -> None:
    batch = _batch(0)
    assert NoReference().score(batch) is batch
