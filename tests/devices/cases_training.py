"""Training on a GPU: the CPU's numbers, and a number of host synchronisations that nothing makes
grow.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fused_kernels import register_gpu
from phantom import Synchronisations, count_synchronisations, is_phantom
from tests.trainer.tiny import (
    VOCABULARY,
    grpo,
    make_trainer,
    ragged_batch,
    ragged_groups,
    relative,
    step_gradient,
    tiny_model,
)
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.method import Method
from sixfold.algorithm.returns import gae, rewards_to_go, sum_by_columns, sum_by_doubling, vtrace
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, KeptSets, collate
from sixfold.critic.actor_critic import ActorCritic
from sixfold.critic.critic import Critic
from sixfold.kernels.norms import fuse_norms
from sixfold.recipe.schema import CriticConfig, TrainerConfig
from sixfold.reference.base import Scorer
from sixfold.reference.frozen import FrozenReference, FusedReference
from sixfold.trainer.logprobs import PolicyRoot, Proximal, Scoring, score_batch
from sixfold.trainer.packing import microbatches, pack
from sixfold.trainer.trainer import Trainer
from sixfold.types import Kept

DEVICE = register_gpu()
KINDS = ["qwen3", "mistral", "gemma2", "gpt2", "gpt_oss"]


def truncated_batch() -> Batch:
    """A ragged batch whose tokens were drawn from sets of different sizes."""
    rng, groups = random.Random(0), ragged_groups(1)
    for t in (t for g in groups for t in g.trajectories):
        t.kept = Kept()
        for token in (token for token, sampled in zip(t.tokens, t.mask, strict=True) if sampled):
            others = rng.sample(range(VOCABULARY), rng.choice([0, 1, 4]))
            t.kept.add(array("i", sorted({token, *others})), 0.5)
    return collate(groups)


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_cpu(kind: str, share_prefix: bool) -> None:
    model, algorithm = tiny_model(kind), grpo(beta=0.05)
    batch = ragged_batch(1, algorithm)
    settings = {"share_prefix": share_prefix, "max_tokens_per_microbatch": 60}
    expected = step_gradient(model, batch, algorithm.compute_loss, **settings)
    ours = step_gradient(model.to(DEVICE), batch.to(DEVICE), algorithm.compute_loss, **settings)
    assert is_phantom(ours) and relative(ours.cpu(), expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [("mistral", None), ("gemma2", None), ("qwen3", torch.bfloat16), ("mistral", torch.bfloat16)],
)
def test_checkpointing_changes_no_gradient(kind: str, autocast: torch.dtype | None) -> None:
    model, algorithm, scoring = (
        tiny_model(kind).to(DEVICE),
        grpo(beta=0.05),
        Scoring(autocast=autocast),
    )
    batch = ragged_batch(1, algorithm, groups=2, samples=3).to(DEVICE)
    expected = step_gradient(model, batch, algorithm.compute_loss, scoring)
    for mode in ("selective", "full"):
        assert torch.equal(
            step_gradient(
                model, batch, algorithm.compute_loss, scoring, activation_checkpointing=mode
            ),
            expected,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float32(kind: str) -> None:
    model, batch = tiny_model(kind).to(DEVICE), ragged_batch(1).to(DEVICE)
    exact, rounded = (
        score_batch(model, batch, Scoring(autocast=dtype), 60, True)
        for dtype in (None, torch.bfloat16)
    )
    assert (exact - rounded).abs().mean() < 0.03


@pytest.mark.parametrize("share_prefix", [True, False])
def test_packed_rows_are_laid_out_as_on_the_cpu(share_prefix: bool) -> None:
    batch = truncated_batch() if share_prefix else ragged_batch(2)
    for part in microbatches(batch, range(len(batch.tokens)), 40, share_prefix):
        ours, theirs = pack(batch.to(DEVICE), part, share_prefix), pack(batch, part, share_prefix)
        for name, tensor in vars(theirs).items():
            if isinstance(tensor, Tensor):
                assert torch.equal(getattr(ours, name).cpu(), tensor), name
            if isinstance(tensor, KeptSets):
                assert torch.equal(ours.kept.excluded(31).cpu(), tensor.excluded(31))  # type: ignore[union-attr]


def test_frozen_and_fused_references_agree() -> None:
    model, batch = tiny_model().to(DEVICE), ragged_batch(1).to(DEVICE)
    frozen = FrozenReference(model, Scoring(), 60, True).score(batch).ref_logp
    assert frozen is not None and is_phantom(frozen)
    fused = FusedReference(model, Scoring())
    row = pack(batch, range(12), True)
    torch.testing.assert_close(fused.scorer(row), frozen[row.row, row.column], atol=1e-5, rtol=1e-5)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_fused_norms_are_the_modules_own_up_to_rounding(
    dtype: torch.dtype, weights: torch.dtype
) -> None:
    theirs = Qwen3RMSNorm(16, eps=1e-3)
    torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(1))
    ours = copy.deepcopy(theirs).to(DEVICE, weights)
    fuse_norms(ours)  # type: ignore[arg-type]
    assert "forward" in vars(ours)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected, made = theirs.to(weights)(x), ours(x.to(DEVICE))
    exact = dtype is weights is torch.float32
    assert made.dtype is expected.dtype
    torch.testing.assert_close(
        made.cpu(), expected, rtol=1e-6 if exact else 0.02, atol=1e-6 if exact else 0.02
    )


# --- advantages


def _tables(rows: int = 5, width: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    rewards, values, log_rho = torch.randn(3, rows, width, generator=made)
    mask = torch.rand(rows, width, generator=made) < 0.7
    mask[0] = False
    return rewards, values, log_rho, mask


SCANS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "gae": lambda r, v, rho, m: gae(r, v, m, 0.99, 0.95),
    "monte carlo": lambda r, v, rho, m: gae(r, v, m, 1.0, 1.0),
    "td": lambda r, v, rho, m: gae(r, v, m, 1.0, 0.0),
    "to go": lambda r, v, rho, m: (rewards_to_go(r, m, 0.9),),
    "vtrace": lambda r, v, rho, m: vtrace(r, v, rho, m, 1.0, 0.95, 2.0, 1.5),
}


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_scans_equal_the_loop_over_columns(scan: Callable[..., tuple[Tensor, ...]]) -> None:
    """Values outside the mask are not read."""
    tables = _tables()
    spoiled = [torch.where(tables[3], t, torch.nan) for t in tables[:3]]
    for ours, theirs in zip(
        scan(*(t.to(DEVICE) for t in (*spoiled, tables[3]))), scan(*tables), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_sums_of_integers_are_exact_at_any_length() -> None:
    for width in (1, 2, 3, 64, 1000):
        terms, mask = torch.arange(2.0 * width).view(2, -1), torch.ones(2, width, dtype=torch.bool)
        ones = torch.ones_like(terms)
        assert torch.equal(sum_by_doubling(terms, ones, mask), sum_by_columns(terms, ones, mask))


def test_factors_above_one_do_not_make_nan() -> None:
    """2^2048 overflows float64, and nothing is behind it to be multiplied."""
    terms, mask = torch.zeros(1, 4096), torch.ones(1, 4096, dtype=torch.bool)
    terms[0, 1] = 1.0
    assert sum_by_doubling(terms, torch.full_like(terms, 2.0), mask)[0, :3].tolist() == [
        2.0,
        1.0,
        0.0,
    ]


# --- synchronisations


def _counted(run: Callable[[], object]) -> Synchronisations:
    with count_synchronisations() as counts:
        run()
    return counts


def _update(
    algorithm: Composed, batch: Batch, layers: int = 2, **settings: object
) -> Synchronisations:
    trainer = make_trainer(tiny_model(num_hidden_layers=layers).to(DEVICE), **settings)
    on_device = batch.to(DEVICE)
    return _counted(lambda: trainer.train_step(on_device, algorithm.compute_loss))


def test_waits_of_an_update_do_not_grow() -> None:
    """With rows, tokens, micro-batches, layers or tensors. At the commit before, 11 a sequence and
    15 a micro-batch.
    """
    algorithm = grpo(beta=0.05)
    small = _update(
        algorithm, ragged_batch(1, algorithm, groups=1, samples=2), max_tokens_per_microbatch=10**6
    )
    assert 0 < small.total <= 6, small.table()
    for groups, longest, tokens, layers in ((2, 20, 40, 2), (1, 6, 10**6, 4)):
        batch = ragged_batch(1, algorithm, groups=groups, longest=longest)
        large = _update(algorithm, batch, layers, max_tokens_per_microbatch=tokens)
        assert large.total == small.total, large.table()
        unshared = _update(
            algorithm, batch, layers, max_tokens_per_microbatch=tokens, share_prefix=False
        )
        assert unshared.total == small.total, unshared.table()


def test_waits_of_scoring_do_not_grow() -> None:
    """References, critics and the proximal pass; truncated sampling too."""
    model = tiny_model().to(DEVICE)
    for batch in (ragged_batch(1), truncated_batch()):
        on_device = batch.to(DEVICE)
        for tokens in (30, 10**6):
            counts = _counted(
                lambda b=on_device, t=tokens: score_batch(model, b, Scoring(chunk=16), t, True)
            )  # type: ignore[misc]
            assert counts.total == 0, counts.table()
        root, row = PolicyRoot(model), pack(on_device, range(12), True)
        critic = Critic(root, CriticConfig(body="policy"), TrainerConfig(), Scoring(), 10)
        fused = FusedReference(model, Scoring(chunk=16))
        assert _counted(lambda c=critic, b=on_device: c.score(b)).total == 0  # type: ignore[misc]
        assert _counted(lambda f=fused, r=row: f.scorer(r)).total == 0  # type: ignore[misc]


TWO_UPDATES = replace(ZOO["grpo"], minibatches=2)
ROWS = ("reinforce", "ppo", "grpo", "rloo", "gspo", "reinforce_pp", "maxrl", "gdpo", "remax", "opd")
METHODS = {
    **{name: ZOO[name] for name in ROWS},
    "two passes": replace(TWO_UPDATES, epochs=2),
    "critic with v-trace": replace(ZOO["ppo"], advantage="vtrace", minibatches=2),
    "KL in the reward": replace(ZOO["grpo"], beta=0.1, kl_in="reward", kl_target=0.1),
    "per-step rewards": replace(ZOO["grpo"], advantage="process"),
    "whitened per source": replace(ZOO["grpo"], whiten="source", advantage="no_baseline"),
    "entropy": replace(ZOO["grpo"], entropy_bonus=0.01, entropy_target=0.5),
    "penalties": replace(ZOO["grpo"], overlong_buffer=0.2, length_penalty="kimi"),
    **{
        rule: replace(TWO_UPDATES, entropy_rule=rule)
        for rule in ("kl-cov", "clip-cov", "top-entropy")
    },
    **{
        name: replace(TWO_UPDATES, correction=name, correction_low=1e-9, correction_high=1e9)
        for name in ("truncated-sequence", "geometric", "decoupled", "negative-sequence")
    },
}


def _whole_step(method: Method, batch: Batch, most: int) -> Synchronisations:
    """From the collated batch to the updated weights: reference, critic, proximal pass, advantages
    and every update.
    """
    config = TrainerConfig(learning_rate=1e-3, max_tokens_per_microbatch=most)
    root, scoring = PolicyRoot(tiny_model().to(DEVICE)), Scoring(chunk=16)
    algorithm = Composed(method, horizon=64)
    policy = Trainer(root, config, scoring, 10, epochs=method.epochs)
    scorers: list[Scorer] = [FrozenReference(root.model, scoring, most, True)]
    if method.needs_proximal:
        scorers.append(Proximal(root, scoring, most, True))
    trainer: Trainer | ActorCritic = policy
    if method.needs_critic:
        critic = Critic(root, CriticConfig(body="own"), config, scoring, 10, epochs=method.epochs)
        scorers.append(critic)
        trainer = ActorCritic(policy, critic, algorithm, 0)

    def step() -> None:
        moved = batch.to(DEVICE)
        for scorer in scorers:
            moved = scorer.score(moved)
        metrics = trainer.train_step(algorithm.prepare(moved), algorithm.compute_loss)
        assert metrics["train/updates"] == method.epochs * method.minibatches

    return _counted(step)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_waits_of_a_step_do_not_grow(method: Method) -> None:
    """With rows, groups, tokens or micro-batches."""
    small, large = (
        replace(collate_again(ragged_batch(1, groups=g, longest=n)), ref_logp=None)
        for g, n in ((2, 6), (3, 14))
    )
    batches = [b.with_(greedy=torch.zeros(len(b.tokens))) for b in (small, large)]
    few = _whole_step(method, batches[0], 10**6)
    many = _whole_step(method, batches[1], 40)
    assert many.total == few.total <= 30 * method.epochs * method.minibatches, many.table()


@pytest.mark.parametrize("groups", [2, 6])
def test_units_and_pairs_add_no_waits(groups: int) -> None:
    """Units are planned on the host."""
    algorithm = grpo(beta=0.05)
    batch = ragged_batch(1, algorithm, groups=groups)
    pairs = batch.with_(unit=torch.arange(len(batch.tokens)) // 2)
    for tokens in (40, 10**6):
        alone, paired = (
            _update(algorithm, b, max_tokens_per_microbatch=tokens) for b in (batch, pairs)
        )
        assert paired.total == alone.total, paired.table()


def collate_again(batch: Batch) -> Batch:
    """The batch as it comes from the rollout, but for `ref_logp`."""
    return replace(batch, advantages=None, weights=None, minibatch=None, correction=None)


def test_a_moved_batch_remembers_its_layout_until_it_changes() -> None:
    batch = ragged_batch(1)
    moved = batch.to(DEVICE)
    assert _counted(lambda: batch.to(DEVICE)).total == 0
    assert _counted(lambda: truncated_batch().to(DEVICE)).total == 0
    assert moved.at_host() is batch and moved.with_(advantages=moved.rewards).at_host() is batch
    assert moved.with_(mask=~moved.mask).at_host().mask.tolist() == (~batch.mask).tolist()
    part = moved.rows(torch.tensor([2, 0], device=DEVICE))
    assert part.at_host().tokens.tolist() == batch.tokens[[2, 0]].tolist()


def test_critic_learns_the_cpus_values() -> None:
    results = []
    for device in ("cpu", DEVICE):
        policy = tiny_model().to(device)
        critic = Critic(
            PolicyRoot(policy), CriticConfig(body="own"), TrainerConfig(), Scoring(), 10
        )
        algorithm = Composed(ZOO["ppo"], horizon=16)
        batch = critic.score(collate_again(ragged_batch(1)).to(device))
        batch = algorithm.prepare(batch)
        metrics = critic.update(algorithm.value_batch(batch), algorithm.compute_value_loss)
        results.append((metrics, critic.score(batch).values.cpu()))  # type: ignore[union-attr]
    assert results[1][0]["critic/loss"] == pytest.approx(results[0][0]["critic/loss"], rel=1e-4)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-3, atol=1e-3)


def test_a_bad_loss_is_found_without_a_wait_for_each_micro_batch() -> None:
    algorithm = grpo()
    batch = ragged_batch(1, algorithm)
    spoiled = batch.with_(
        advantages=torch.where(torch.arange(12)[:, None] == 9, torch.nan, batch.advantages)
    )  # type: ignore[arg-type]
    trainer = make_trainer(tiny_model().to(DEVICE), max_tokens_per_microbatch=20)
    metrics = trainer.train_step(spoiled.to(DEVICE), algorithm.compute_loss)
    assert metrics["train/skipped"] == 1.0 and "9" in trainer.skip_reason and trainer.version == 0
