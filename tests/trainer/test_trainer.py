"""One optimizer step: what it leaves alone when something is not finite, what it skips, what it
counts, and that it comes out the same twice.
"""

from __future__ import annotations

import ast
import copy
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny import (
    VOCABULARY,
    grpo,
    make_trainer,
    plain_gradient,
    plain_logits,
    plain_logp,
    ragged_batch,
    ragged_groups,
    relative,
    step_gradient,
    tiny_model,
    trajectory,
)
from torch import Tensor
from transformers import PreTrainedModel

import sixfold
from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, LossOutput, collate
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.sync.sync import CopySync
from sixfold.trainer.logprobs import Scoring, score_batch
from sixfold.trainer.trainer import TrainingDiverged
from sixfold.types import LOG_RATIO_EDGES, Group, Reward, SamplingParams, Task

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")


def weights_of(model: PreTrainedModel) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def on_policy(model: PreTrainedModel, batch: Batch) -> Batch:
    """The batch as if the model itself had sampled it just now."""
    return batch.with_(old_logp=score_batch(model, batch, Scoring(), 10**6, True))


def at(table: Tensor | None, batch: Batch, value: float) -> Tensor:
    """The table with one scored entry replaced."""
    assert table is not None
    row, column = batch.mask.nonzero()[5].tolist()
    table = table.clone()
    table[row, column] = value
    return table


# --- the guard


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize(
    ("where", "bad"),
    [(w, b) for w in ("advantages", "weights") for b in (NAN, INF, -INF)] + [("old_logp", NAN)],
)  # an infinite log-ratio is clamped before exp, so that the loss stays finite
def test_a_bad_number_in_the_batch_leaves_the_weights_alone(where: str, bad: float) -> None:
    model, batch = tiny_model(), ragged_batch(0)
    trainer, before = make_trainer(model), weights_of(model)
    broken = batch.with_(**{where: at(getattr(batch, where), batch, bad)})
    metrics = trainer.train_step(broken, grpo().compute_loss)
    assert same(weights_of(model), before)
    assert metrics["train/skipped"] == metrics["train/skipped_total"] == 1.0
    assert trainer.skip_reason.startswith("loss not finite in rows [")
    assert trainer.version == 0 and not trainer.optimizer.state


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_loss_is_named_by_its_rows(bad: float) -> None:
    """Row 9's micro-batch alone is bad; the reason names that one and the weights stay."""
    model, batch = tiny_model(), ragged_batch(0)
    trainer, before = (
        make_trainer(model, max_tokens_per_microbatch=16, share_prefix=False),
        weights_of(model),
    )
    ninth = batch.tokens[9]

    def loss(local: Batch, logp: Tensor) -> LossOutput:
        hit = bool((local.tokens == ninth).all(-1).any())
        return LossOutput(logp.sum() * (bad if hit else 1.0))

    metrics = trainer.train_step(batch, loss)
    assert metrics["train/skipped"] == 1.0 and same(weights_of(model), before)
    assert "9" in trainer.skip_reason and "[0" not in trainer.skip_reason


@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_bad_gradient_element_is_named_by_its_tensor(bad: float) -> None:
    model, batch = tiny_model(), ragged_batch(0)
    trainer, before = make_trainer(model), weights_of(model)
    name, parameter = list(model.named_parameters())[5]

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = bad
        return gradient

    handle = parameter.register_hook(spoil)
    metrics = trainer.train_step(batch, grpo().compute_loss)
    assert metrics["train/skipped"] == 1.0 and same(weights_of(model), before)
    assert trainer.skip_reason == f"gradient not finite in 1 tensors, first ['{name}']"
    handle.remove()
    clean = make_trainer(copy.deepcopy(model))
    clean.train_step(batch, grpo().compute_loss)
    assert trainer.train_step(batch, grpo().compute_loss)["train/skipped"] == 0.0
    assert trainer.skip_reason == "" and same(weights_of(model), weights_of(clean.model)), (
        "the bad step left something behind"
    )


def test_several_bad_steps_in_a_row_end_the_run_and_a_good_one_starts_the_count_anew() -> None:
    model, batch = tiny_model(), ragged_batch(0)
    trainer = make_trainer(model, max_skipped_steps=3)
    broken = batch.with_(advantages=at(batch.advantages, batch, NAN))
    loss = grpo().compute_loss
    for good in (False, False, True, False, False):
        trainer.train_step(batch if good else broken, loss)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row skipped: loss not finite"):
        trainer.train_step(broken, loss)
    assert (trainer.skipped_total, trainer.version, trainer.steps) == (5, 1, 6)


# --- rows that carry no signal


def _count_forwards(model: PreTrainedModel) -> list[int]:
    sizes: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda m, a, k: sizes.append(k["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes


def test_a_batch_of_degenerate_groups_makes_no_forward_and_no_step() -> None:
    model = tiny_model()
    trainer, before, forwards = make_trainer(model), weights_of(model), _count_forwards(model)
    groups = ragged_groups(0)
    for g in groups:
        for t in g.trajectories:
            t.reward = Reward(1.0)
    metrics = trainer.train_step(grpo().prepare(collate(groups)), grpo().compute_loss)
    assert forwards == [] and same(weights_of(model), before)
    assert (metrics["train/skipped"], metrics["train/tokens"], metrics["train/microbatches"]) == (
        1.0,
        0.0,
        0.0,
    )
    assert (trainer.version, trainer.skipped_total, trainer.skipped_in_a_row) == (0, 0, 0)
    assert "every advantage is zero" in trainer.skip_reason


def test_degenerate_groups_are_not_computed_and_the_gradient_is_as_if_they_were() -> None:
    model, groups = tiny_model(), ragged_groups(0)
    for t in groups[1].trajectories:
        t.reward = Reward(0.5)
    groups[2].trajectories[0].reward = Reward(None, error="timed out")
    batch = grpo().prepare(collate(groups))
    full = batch.with_(weights=AGGREGATIONS["sequence"](batch.mask, batch.group, 16))
    expected = plain_gradient(model, full, grpo().compute_loss)
    assert relative(step_gradient(model, batch, grpo().compute_loss), expected) < 1e-5
    trainer = make_trainer(model, share_prefix=False)
    forwards = _count_forwards(model)
    metrics = trainer.train_step(batch, grpo().compute_loss)
    computed = int(batch.lengths[:4].sum() + batch.lengths[9:].sum())
    assert sum(forwards) == computed == metrics["train/tokens"]


def test_with_a_kl_term_degenerate_groups_still_pull_towards_the_reference() -> None:
    model, algorithm, groups = tiny_model(), grpo(beta=0.5), ragged_groups(0)
    for g in groups:
        for t in g.trajectories:
            t.reward = Reward(1.0)
    batch = collate(groups)
    reference = score_batch(tiny_model(), batch, Scoring(), 10**6, True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2)
    batch = algorithm.prepare(on_policy(model, batch).with_(ref_logp=reference))
    trainer = make_trainer(model, learning_rate=3e-3)
    kl = [float(trainer.train_step(batch, algorithm.compute_loss)["train/kl"]) for _ in range(6)]  # type: ignore[arg-type]
    assert kl[-1] < 0.7 * kl[0] and trainer.version == 6


# --- the step itself


@pytest.mark.slow
def test_same_seed_same_weights_bit_for_bit_after_three_steps() -> None:
    ends = []
    for _ in range(2):
        trainer = make_trainer(tiny_model(), learning_rate=1e-2, max_tokens_per_microbatch=40)
        for step in range(3):
            trainer.train_step(ragged_batch(step), grpo().compute_loss)
        ends.append(weights_of(trainer.model))
    assert same(*ends) and not same(ends[0], weights_of(tiny_model()))


def test_version_counts_updates_and_the_learning_rate_follows_attempts() -> None:
    batch = ragged_batch(0)
    trainer = make_trainer(tiny_model(), learning_rate=1e-2, warmup_steps=4)
    broken = batch.with_(advantages=at(batch.advantages, batch, NAN))
    rates = [
        trainer.train_step(b, grpo().compute_loss)["train/learning_rate"]
        for b in (batch, broken, batch)
    ]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075])
    assert (trainer.version, trainer.steps) == (2, 3)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.0075)


def test_the_gradient_is_clipped_to_the_norm_and_the_metric_is_before_clipping() -> None:
    model, batch = tiny_model(), ragged_batch(0)
    gradient = plain_gradient(model, batch, grpo().compute_loss)
    limit = float(gradient.norm()) / 4
    clipped = step_gradient(model, batch, grpo().compute_loss, grad_clip=limit)
    assert relative(clipped, gradient / 4) < 1e-4
    metrics = make_trainer(model, grad_clip=limit).train_step(batch, grpo().compute_loss)
    assert metrics["train/grad_norm"] == pytest.approx(4 * limit, rel=1e-4)


def test_no_gradient_stays_behind() -> None:
    model = tiny_model()
    make_trainer(model).train_step(ragged_batch(0), grpo().compute_loss)
    assert all(p.grad is None for p in model.parameters())


def test_junk_in_the_padding_trains_nothing() -> None:
    """Bit for bit the same weights, whatever lies where mask is False."""
    algorithm, batch = grpo(beta=0.1), ragged_batch(0, grpo(beta=0.1))
    ends = []
    for junk in (0.0, NAN, 77.0):
        tables = {
            n: torch.where(batch.mask, getattr(batch, n), junk)
            for n in ("old_logp", "ref_logp", "advantages")
        }
        padding = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
        tokens = torch.where(padding, 0 if junk == 0.0 else VOCABULARY + 5, batch.tokens)
        trainer = make_trainer(tiny_model(), learning_rate=1e-2)
        metrics = trainer.train_step(batch.with_(tokens=tokens, **tables), algorithm.compute_loss)
        assert metrics["train/skipped"] == 0.0 and math.isfinite(metrics["train/kl"])  # type: ignore[arg-type]
        ends.append(weights_of(trainer.model))
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


def test_weights_first() -> None:
    with pytest.raises(ValueError, match="prepare the batch first"):
        make_trainer(tiny_model()).train_step(collate(ragged_groups(0)), grpo().compute_loss)


# --- metrics


@pytest.mark.parametrize("most", [10**6, 30])
def test_metrics_by_hand(most: int) -> None:
    """Against the plain forward's tables, for one micro-batch and for many; groups 0 and 1 sampled
    by these weights, group 2 by older ones.
    """
    model = tiny_model()
    algorithm = make_algorithm(replace(ZOO["grpo"], clip_low=0.1, clip_high=0.3, beta=0.02), 16)
    batch = on_policy(model, ragged_batch(0))
    noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(3)) * 0.4
    version = torch.where(batch.group[:, None] == 2, 0, 1)
    batch = batch.with_(
        old_logp=batch.old_logp + noise * batch.mask, version=torch.where(batch.mask, version, -1)
    )
    trainer = make_trainer(model, max_tokens_per_microbatch=most)
    trainer.version = 1
    plain = copy.deepcopy(model)
    got = trainer.train_step(batch, algorithm.compute_loss)

    m, logp = batch.mask, plain_logp(plain, batch).detach()
    assert batch.advantages is not None and batch.weights is not None and batch.ref_logp is not None
    log_ratio, a = (logp - batch.old_logp)[m], batch.advantages[m]
    ratio = log_ratio.exp()
    outside = (ratio < 0.9) | (ratio > 1.3)
    active = ((ratio > 1.3) & (a > 0)) | ((ratio < 0.9) & (a < 0))
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a)
    r = (logp - batch.ref_logp)[m]
    k3 = (-r).exp() + r - 1
    p = plain_logits(plain, batch).detach().softmax(-1)
    entropy = torch.nn.functional.pad(-(p * p.log()).sum(-1)[:, :-1], (1, 0))[m]
    pg = -(batch.weights[m] * surrogate).sum()
    edges = (-INF, *LOG_RATIO_EDGES, INF)
    expected = {
        "train/pg_loss": float(pg),
        "train/loss": float(pg + 0.02 * (batch.weights[m] * k3).sum()),
        "train/kl": float(k3.mean()),
        "train/entropy": float(entropy.mean()),
        "train/ratio_mean": float(ratio.mean()),
        "train/log_ratio_mean": float(log_ratio.mean()),
        "train/clipped_frac": float(outside.float().mean()),
        "train/clip_active_frac": float(active.float().mean()),
        "mismatch/max_abs_logp": float((logp - batch.old_logp)[m & (version == 1)].abs().max()),
        "mismatch/mean_abs_logp": float((logp - batch.old_logp)[m & (version == 1)].abs().mean()),
    }
    assert 0.0 < expected["train/clip_active_frac"] < expected["train/clipped_frac"] < 1.0
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    assert got["train/ratio_hist"] == [
        float(((log_ratio > low) & (log_ratio <= high)).sum()) for low, high in pairwise(edges)
    ]
    assert got["train/skipped"] == 0.0 and (got["train/microbatches"] == 1.0) == (most > 30)


def test_first_step_on_policy_has_ratio_one() -> None:
    model = tiny_model()
    algorithm = make_algorithm(ZOO["grpo"], 16)
    got = make_trainer(model).train_step(on_policy(model, ragged_batch(0)), algorithm.compute_loss)
    assert got["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert got["train/clipped_frac"] == 0.0 and got["mismatch/max_abs_logp"] == pytest.approx(
        0.0, abs=1e-5
    )


def _second_step(recompute: bool) -> dict[str, object]:
    """Two steps on one batch; with `recompute`, old_logp is taken anew from the updated weights in
    between, which is the bug.
    """
    model = tiny_model()
    algorithm = make_algorithm(ZOO["grpo"], 16)
    batch = on_policy(model, ragged_batch(0))
    trainer = make_trainer(model, learning_rate=2e-2)
    trainer.train_step(batch, algorithm.compute_loss)
    return dict(
        trainer.train_step(on_policy(model, batch) if recompute else batch, algorithm.compute_loss)
    )


def test_old_logp_recomputed_after_the_update_is_seen_in_the_metrics() -> None:
    """With the sampled log-probs the second step shows that the policy moved; with recomputed ones
    the ratio is one and the clip never acts.
    """
    right, wrong = _second_step(recompute=False), _second_step(recompute=True)
    assert (
        float(right["train/clipped_frac"]) > 0.05
        and abs(float(right["train/log_ratio_mean"])) > 1e-3
    )  # type: ignore[arg-type]
    assert wrong["train/clipped_frac"] == 0.0
    assert wrong["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def _rollout(engine: Engine, step: int) -> list[Group]:
    """Two prompts, four samples each; the reward likes small token ids."""
    groups = []
    for g, prompt in enumerate(([3, 4], [5, 6, 7])):
        task = Task(f"{step}/{g}", "?")
        engine.add(task.id, prompt, SamplingParams(8, seed=step), list(range(4)))
        done = sorted(engine.run(), key=lambda s: s.sample)
        rows = [
            trajectory(
                g,
                s.sample,
                prompt,
                s.tokens[len(prompt) :],
                reward=-float(sum(s.tokens[len(prompt) :])),
            )
            for s in done
        ]
        for row, s in zip(rows, done, strict=True):
            row.logp, row.version = [0.0] * len(prompt) + s.logp, [-1] * len(prompt) + s.version
        groups.append(Group(task, rows))
    return groups


@pytest.mark.slow
@pytest.mark.parametrize(("every", "low", "high"), [(1, 0.0, 0.0), (4, 0.02, 1.0)])
def test_clipping_rises_with_the_staleness_of_the_sampler(
    every: int, low: float, high: float
) -> None:
    """Engine with weights of its own, brought over every step or every fourth: fresh rollouts are
    never clipped, stale ones are.
    """
    policy = tiny_model()
    engine = Engine(CausalLM(copy.deepcopy(policy).requires_grad_(False)), kv_tokens=1024)
    trainer, sync = make_trainer(policy, learning_rate=1e-2), CopySync(policy, engine, every)
    algorithm = make_algorithm(ZOO["grpo"], 8)
    clipped = []
    for step in range(8):
        batch = algorithm.prepare(collate(_rollout(engine, step)))
        clipped.append(
            float(trainer.train_step(batch, algorithm.compute_loss)["train/clipped_frac"])
        )  # type: ignore[arg-type]
        sync.sync(trainer.version)
    assert low <= sum(clipped) / 8 <= high
    assert clipped[0] == clipped[every % 8 if every > 1 else 1] == 0.0


# --- shape


@pytest.mark.slow
def test_backward_runs_in_one_place() -> None:
    root = Path(sixfold.__file__).parent
    calls = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    ]
    # The small task of `sixfold algorithms LOSS --try` trains a table, no model.
    assert calls == ["preference/small_task.py", "trainer/trainer.py"]


def test_one_long_trajectory_alone_over_the_budget_still_trains() -> None:
    long = Group(
        Task("t", "?"), [trajectory(0, k, [1, 2], [3 + k] * 40, reward=float(k)) for k in range(2)]
    )
    metrics = make_trainer(tiny_model(), max_tokens_per_microbatch=16).train_step(
        grpo().prepare(collate([long])), grpo().compute_loss
    )
    assert (metrics["train/microbatches"], metrics["train/skipped"]) == (2.0, 0.0)
