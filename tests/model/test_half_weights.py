"""Weight matrices in bfloat16 give the numbers of float32 under autocast, in half the memory."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.trainer.tiny import grpo, make_trainer, ragged_batch, relative, tiny_model
from transformers import PreTrainedModel

from sixfold.critic.value_model import own_value_model
from sixfold.model.half_weights import store_in_bfloat16
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.packing import pack

torch.set_num_threads(1)
SCORING = Scoring(0.8, 16, torch.bfloat16)


def models(kind: str = "qwen3") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A float32 model whose matrices bfloat16 represents exactly, and the same in bfloat16."""
    model = tiny_model(kind)
    for p in model.parameters():
        if p.dim() > 1:
            p.data = p.data.bfloat16().float()
    return model, store_in_bfloat16(copy.deepcopy(model))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mistral"])
def test_log_probs_have_the_bits_of_the_float32_model(kind: str) -> None:
    exact, half = models(kind)
    row = pack(ragged_batch(0), range(12), True)
    with torch.no_grad():
        a, b = (PolicyRoot(m)(row, SCORING).values for m in (exact, half))
    assert torch.equal(a, b)


def test_matrices_take_half_and_vectors_stay() -> None:
    exact, half = models()
    dtypes = {p.dim() > 1: p.dtype for p in half.parameters()}
    assert dtypes == {True: torch.bfloat16, False: torch.float32}
    matrices = sum(p.nbytes for p in exact.parameters() if p.dim() > 1)
    saved = sum(p.nbytes for p in exact.parameters()) - sum(p.nbytes for p in half.parameters())
    assert saved == matrices // 2
    assert half.get_output_embeddings().weight is half.get_input_embeddings().weight


def test_a_copy_looks_up_its_own_table() -> None:
    _, half = models()
    twin = copy.deepcopy(half)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    ids = torch.arange(3)
    assert half.get_input_embeddings()(ids).any() and not twin.get_input_embeddings()(ids).any()
    assert half.get_input_embeddings()(ids).dtype == torch.float32


def test_a_critic_of_its_own_is_float32() -> None:
    """Differences between values may be too small for bfloat16."""
    _, half = models()
    critic = own_value_model(half)
    assert {p.dtype for p in critic.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_gradients_add_up_in_float32(kind: str) -> None:
    """With one row per micro-batch, summed gradients equal those of the float32 model.

    A sum in bfloat16 would differ much.
    """
    batch, gradients = ragged_batch(0, groups=6), []
    for model, weights in zip(models(kind), ("float32", "bfloat16"), strict=True):
        trainer = make_trainer(model, SCORING, weights=weights, max_tokens_per_microbatch=16)
        trainer.train_step(batch, grpo().compute_loss)
        state = trainer.optimizer.state
        gradients.append(torch.cat([state[p]["exp_avg"].flatten() for p in model.parameters()]))
    assert relative(gradients[1], gradients[0]) < 1e-6
