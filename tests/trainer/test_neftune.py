"""NEFTune: the noise that is added, to which tokens, and when."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tiny import make_trainer, relative, tiny_model
from torch import Tensor

from sixfold.batch import Batch, collate
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_tables
from sixfold.trainer.neftune import EmbeddingNoise
from sixfold.trainer.packing import pack
from sixfold.trainer.sft import SupervisedLoss, example
from sixfold.trainer.trainer import Trainer
from sixfold.types import Task

torch.set_num_threads(1)
LOSS = SupervisedLoss()
ALPHA = 5.0
EXAMPLES = [([5, 6, 7], [8, 9, 1]), ([4], [3, 1]), ([2] * 9, [1]), ([5, 6, 7], [8, 9, 1])]


untrained = cache(tiny_model)


def batch() -> Batch:
    groups = [example(Task(f"t{i}", "?"), p, s) for i, (p, s) in enumerate(EXAMPLES)]
    return LOSS.prepare(collate(groups))


def noise(
    rows: Sequence[int], *, seed: int = 0, step: int = 0, share: bool = False
) -> list[Tensor]:
    """Noise that is added to the embeddings of each of the rows, packed together."""
    packed = pack(batch(), rows, share)
    embedding = untrained().get_input_embeddings()
    with EmbeddingNoise(ALPHA, seed, lambda: step).on(embedding, packed):
        noisy = embedding(packed.tokens[None])[0]
    lengths = [sum(map(len, EXAMPLES[row])) for row in rows]
    return list((noisy - embedding(packed.tokens)).detach().split(lengths))


def noisy_trainer(**values: Any) -> Trainer:
    trainer = make_trainer(tiny_model(), **values)
    trainer.root.noise = EmbeddingNoise(ALPHA, 0, lambda: trainer.steps)  # type: ignore[attr-defined]
    return trainer


def gradient(trainer: Trainer) -> Tensor:
    """Gradient of one step, from AdamW's first moment after its first step."""
    trainer.train_step(batch(), LOSS.compute_loss)
    moments = [trainer.optimizer.state[p]["exp_avg"].flatten() for p in trainer.model.parameters()]
    return torch.cat(moments) / (1 - trainer.config.betas[0])


def test_the_noise_is_uniform_with_the_width_of_each_examples_length() -> None:
    for row in range(3):
        drawn = torch.cat([noise([row], step=step)[0].flatten() for step in range(60)])
        tokens = sum(map(len, EXAMPLES[row]))
        unit = (drawn * math.sqrt(tokens * 16) / ALPHA).sort().values.double()
        expected = torch.linspace(-1, 1, len(unit), dtype=torch.float64)
        assert unit.abs().max() <= 1 + 1e-5
        # Kolmogorov-Smirnov at the level 1e-4; the draws are fixed.
        assert (unit - expected).abs().max() / 2 < 2.23 / math.sqrt(len(unit))


def test_the_noise_of_a_row_depends_on_seed_step_and_row_alone() -> None:
    alone = [noise([row])[0] for row in range(4)]
    for share in (False, True):
        for rows in ([0, 1, 2, 3], [3, 1], [2, 0]):
            for row, found in zip(rows, noise(rows, share=share), strict=True):
                torch.testing.assert_close(found, alone[row], rtol=0, atol=1e-6)
    others = [alone[3], noise([0], step=1)[0], noise([0], seed=1)[0]]
    assert all((alone[0] - other).abs().max() > 0.01 for other in others)


def test_the_gradient_is_that_of_a_plain_forward_on_the_noisy_embeddings() -> None:
    model, rows = tiny_model(), batch()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    total, scored = torch.zeros(()), int(rows.mask.sum())
    for row, (prompt, solution) in enumerate(EXAMPLES):
        tokens = torch.tensor([prompt + solution])
        embedded = plain.get_input_embeddings()(tokens) + noise([row])[0]
        logits = plain(inputs_embeds=embedded, use_cache=False).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(
            logits, torch.tensor(solution), reduction="sum"
        )
    (total / scored).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])  # type: ignore[union-attr]
    assert relative(gradient(noisy_trainer()), expected) < 1e-5
    assert relative(gradient(make_trainer(model)), expected) > 1e-2


@pytest.mark.parametrize("values", [{"max_tokens_per_microbatch": 16}, {"share_prefix": False}])
def test_the_gradient_does_not_depend_on_packing(values: dict[str, Any]) -> None:
    assert relative(gradient(noisy_trainer(**values)), gradient(noisy_trainer())) < 1e-5


def test_activations_that_are_recomputed_see_the_same_noise() -> None:
    again = noisy_trainer(activation_checkpointing="full")
    assert relative(gradient(again), gradient(noisy_trainer())) < 1e-5


def test_evaluation_has_no_noise() -> None:
    root = PolicyRoot(tiny_model())
    before, _ = score_tables(root, batch(), Scoring(), 999, True)
    root.noise = EmbeddingNoise(ALPHA, 0, lambda: 0)
    after, _ = score_tables(root, batch(), Scoring(), 999, True)
    assert torch.equal(before, after)


def test_a_resumed_trainer_draws_the_noise_of_the_next_step() -> None:
    whole = noisy_trainer()
    for _ in range(2):
        whole.train_step(batch(), LOSS.compute_loss)
    resumed = noisy_trainer()
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.load({k: v.clone() for k, v in whole.tensors().items()}, whole.state())
    for trainer in (whole, resumed):
        trainer.train_step(batch(), LOSS.compute_loss)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
