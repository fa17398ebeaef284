"""The tiled head of the CPU: equal to the definition in float64, without a table of logits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import Allocations, grpo, ragged_batch, relative, tiny_model
from torch import Tensor, nn

from sixfold.kernels.cpu.head_kernels import head_kernels
from sixfold.model.head import LogitFinish
from sixfold.recipe.schema import TrainerConfig
from sixfold.trainer import logprobs, tiled_head
from sixfold.trainer.fused_head import fused_scores
from sixfold.trainer.head_settings import HeadSettings
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(head_kernels() is None, reason="needs a C compiler")
PLAIN = HeadSettings(LogitFinish(), 1.0, 64)
CASES = {
    "plain": PLAIN,
    "temperature": replace(PLAIN, temperature=0.6),
    "scaled": replace(PLAIN, finish=LogitFinish(divisor=3.0, factor=0.5), temperature=0.6),
}
VOCABULARY, WIDTH, POSITIONS = 83, 16, 21


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which several are needed in both directions, and the last ones are not full."""
    monkeypatch.setattr(tiled_head, "ROWS", 8)
    monkeypatch.setattr(tiled_head, "COLUMNS", 32)


def case(bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states of very different size, and targets."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    hidden = torch.randn(POSITIONS, WIDTH) * torch.linspace(0.1, 30, POSITIONS)[:, None]
    return head, hidden.requires_grad_(), torch.randint(VOCABULARY, (POSITIONS,))


def expected(head: nn.Linear, hidden: Tensor, target: Tensor, s: HeadSettings) -> list[Tensor]:
    """Log-probs, entropies and gradients by the definition, in float64."""
    head, hidden = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    logp = (s.finish.apply(head(hidden)) / s.temperature).log_softmax(-1)
    chosen = logp[range(len(target)), target]
    (chosen * weights()).sum().backward()
    gradients = [p.grad for p in (hidden, *head.parameters())]
    return [chosen.detach(), -(logp.exp() * logp).sum(-1).detach(), *gradients]


def weights() -> Tensor:
    return torch.linspace(-1, 2, POSITIONS)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients_are_those_of_the_definition(name: str, bias: bool) -> None:
    head, hidden, target = case(bias)
    logp, entropy = fused_scores(head, hidden, target, CASES[name])
    assert type(logp.grad_fn).__name__ == "TiledHeadBackward" and not entropy.requires_grad
    (logp * weights()).sum().backward()
    found = [logp, entropy, hidden.grad, *(p.grad for p in head.parameters())]
    for mine, true in zip(found, expected(head, hidden, target, CASES[name]), strict=True):
        assert relative(mine.detach().double(), true) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_frozen_head_has_its_gradient_after_the_forward_pass(name: str, bias: bool) -> None:
    head, hidden, target = case(bias)
    head.requires_grad_(False)
    logp, entropy = fused_scores(head, hidden, target, CASES[name])
    with Allocations(width=VOCABULARY) as seen:
        (logp * weights()).sum().backward()
    assert not seen.wide, "the backward pass computes no logits"
    for mine, true in zip(
        (logp, entropy, hidden.grad), expected(head, hidden, target, CASES[name]), strict=False
    ):
        assert relative(mine.detach().double(), true) < 1e-5
    assert all(p.grad is None for p in head.parameters())


def test_direct_gradients_are_added_to_those_that_exist() -> None:
    head, hidden, target = case(bias=True)
    plain = copy.deepcopy(head)
    for direct, model in ((True, head), (False, plain)):
        for _ in range(2):
            settings = replace(PLAIN, direct=direct)
            fused_scores(model, hidden, target, settings)[0].sum().backward()
    for mine, theirs in zip(head.parameters(), plain.parameters(), strict=True):
        assert relative(mine.grad, theirs.grad) < 1e-6


def test_values_that_are_not_finite_stay_so() -> None:
    head, hidden, target = case(bias=False)
    with torch.no_grad():
        hidden[3] = torch.nan
        hidden[5] = torch.inf
    logp, entropy = fused_scores(head, hidden, target, PLAIN)
    wrong = [not bool(x) for x in logp.isfinite()]
    assert [i for i, bad in enumerate(wrong) if bad] == [3, 5]
    assert not entropy[[3, 5]].isfinite().any()


@pytest.mark.parametrize("share", [False, True])
def test_an_update_of_a_tied_model_is_that_of_autograd(
    share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights after an update of several micro-batches, with a direct and sparse gradient of the
    embedding, against the head by autograd.
    """
    batch, made = grpo().prepare(ragged_batch(0)), []
    config = TrainerConfig(
        max_tokens_per_microbatch=64, share_prefix=share, learning_rate=1e-2, epsilon=1e-3
    )
    for small in (0, 1 << 22):
        monkeypatch.setattr(logprobs, "SMALL", small)
        model = tiny_model()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        trainer = Trainer(PolicyRoot(model), config, Scoring(0.8), 10)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        learned = trainer.learn(batch, grpo().compute_loss)
        assert learned.microbatches > 1 and not model.get_input_embeddings().sparse
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        made.append((learned.grad_norm, after - before))
    assert made[0][0] == pytest.approx(made[1][0], rel=1e-5)
    assert relative(made[0][1], made[1][1]) < 1e-4
