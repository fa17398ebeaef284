"""The objective of a preference stage against padded forward passes, for every loss and split."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sixfold.batch import Batch, collate
from sixfold.data.comparisons import Comparison
from sixfold.errors import UserError
from sixfold.model.trained_lora import NAME, add_lora
from sixfold.preference.mixture import Mixture, Term
from sixfold.preference.pairs import Pairs, Unpaired
from sixfold.preference.zoo import LOSSES
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.schema import LoraConfig
from sixfold.reference.cached import CachedReference
from sixfold.reference.frozen import FrozenReference
from sixfold.stages.preference_objective import PreferenceObjective, mismatched
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_tables
from sixfold.types import Group, Reward, Task, Trajectory
from tests.trainer.tiny import (
    VOCABULARY,
    make_trainer,
    plain_logp,
    relative,
    step_gradient,
    tiny_model,
)

torch.set_num_threads(1)
GRADES = [(1.0, 0.0), (0.0, 2.5), (-3.0, -1.0, -2.0, -1.0), (1.0, 1.0), (0.5, 0.0)]
"""Of each comparison of a step. The fourth is a tie."""


def comparisons(seed: int = 0, grades: Sequence[Sequence[float]] = GRADES) -> list[Group]:
    """Prompts of 1 to 6 tokens with completions of 1 to 9."""
    rng, found = random.Random(seed), []
    for number, own in enumerate(grades):
        name, prompt = f"task-{number}", [rng.randrange(VOCABULARY) for _ in range(1 + number)]
        rows = []
        for sample, grade in enumerate(own):
            reply = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
            zeros, version = [0.0] * len(reply), [-1] * len(reply)
            rows.append(
                Trajectory.one_turn(
                    name, sample, prompt, reply, zeros, version, "stop", reward=Reward(grade)
                )
            )
        found.append(Group(Task(name, "?"), rows))
    return found


def models() -> tuple[Any, Any]:
    """A policy, and a reference with other weights."""
    policy, reference = tiny_model(), tiny_model()
    with torch.no_grad():
        for p in reference.parameters():
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return policy, reference


def mixture(name: str, **changed: Any) -> Mixture:
    row = LOSSES[name]
    return Mixture([Term(row, replace(row.defaults, **changed))])


def make(
    losses: Mixture,
    policy: Any,
    reference: Any,
    most: int = 10**6,
    share: bool = True,
    policy_hash: Callable[[], str] | None = None,
) -> PreferenceObjective:
    def score(root: PolicyRoot, batch: Batch) -> Tensor:
        return score_tables(root, batch, Scoring(), most, share)[0]

    frozen = FrozenReference(reference, Scoring(), most, share)
    root = PolicyRoot(policy)
    return PreferenceObjective(
        losses, frozen, partial(score, root), device="cpu", limit=64, policy_hash=policy_hash
    )


def plain_rows(groups: Sequence[Group], losses: Mixture, policy: Any, reference: Any) -> Any:
    """All pairs, or all completions, of the groups from padded forward passes, with gradient."""
    batch = collate(groups)
    logp = plain_logp(policy, batch)
    with torch.no_grad():
        ref = plain_logp(copy.deepcopy(reference), batch)
    tokens, grades = batch.mask.sum(-1), batch.scores.tolist()
    if losses.unpaired:
        means = [sum(t.reward.value for t in g.trajectories) / len(g.trajectories) for g in groups]
        liked = [grades[b] > means[batch.group[b]] for b in range(len(grades))]
        with torch.no_grad():
            other = collate(mismatched(groups, 64), scored=False)
            gap = plain_logp(policy, other) - plain_logp(copy.deepcopy(reference), other)
        return Unpaired(logp.sum(-1), ref.sum(-1), torch.tensor(liked), None, gap.sum(-1))
    rows = range(len(grades))
    pairs = [
        (a, b)
        for a in rows
        for b in rows
        if batch.group[a] == batch.group[b] and grades[a] > grades[b]
    ]
    number = [sum(batch.group[w] == batch.group[a] for a, _ in pairs) for w, _ in pairs]
    better, worse = (torch.tensor(side) for side in zip(*pairs, strict=True))

    def heads(table: Tensor) -> tuple[Tensor, Tensor]:
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for pair in pairs:
            shorter = int(min(tokens[row] for row in pair))
            for side, row in zip(sides, pair, strict=True):
                side.append(table[row][batch.mask[row]][:shorter].sum())
        return torch.stack(sides[0]), torch.stack(sides[1])

    own, theirs = heads(logp), heads(ref)
    return Pairs(
        logp.sum(-1)[better],
        logp.sum(-1)[worse],
        tokens[better].float(),
        tokens[worse].float(),
        ref.sum(-1)[better],
        ref.sum(-1)[worse],
        1 / torch.tensor(number).float(),
        own[0],
        own[1],
        theirs[0],
        theirs[1],
    )


def plain_gradient(losses: Mixture, policy: Any, reference: Any) -> tuple[float, Tensor]:
    policy = copy.deepcopy(policy)
    rows = plain_rows(comparisons(), losses, policy, reference)
    statistics = losses.whole_batch(rows)
    weights = rows.weights / rows.weights.sum()
    loss = (weights * losses.per_pair(rows, statistics)).sum()
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return float(loss), torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_whole_step_for_every_split(name: str) -> None:
    policy, reference = models()
    expected, gradient = plain_gradient(mixture(name), policy, reference)
    for most, share in ((16, False), (40, True), (10**6, True)):
        objective = make(mixture(name), policy, reference, most, share)
        batch = objective.batch(comparisons())
        seen = list[float]()

        def loss(rows: Batch, logp: Tensor, objective: Any = objective, seen: Any = seen) -> Any:
            output = objective.compute_loss(rows, logp)
            seen.append(float(output.loss.detach()))
            return output

        found = step_gradient(
            policy, batch, loss, max_tokens_per_microbatch=most, share_prefix=share
        )
        assert (len(seen) > 1) == (most < 100)
        assert sum(seen) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert relative(found, gradient) < 2e-4


@pytest.mark.parametrize("name", LOSSES)
def test_an_adapter_has_the_loss_and_the_gradient_of_merged_weights(name: str) -> None:
    """Of W + s B A, the gradients are s B^T G and s G A^T, with G that of the merged W."""
    policy, reference = models()
    lora = add_lora(policy, LoraConfig(rank=3, alpha=6), Base("", ""), seed=1)
    merged, before = copy.deepcopy(policy), {}
    with torch.no_grad():
        for place, layer in lora.layers.items():
            down, up = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            up += 0.2 * torch.randn(up.shape, generator=torch.Generator().manual_seed(up.numel()))
            merged.get_parameter(f"{place}.weight").add_(2 * up @ down)
            before[place] = down.clone(), up.clone()
    merged.requires_grad_(True)
    expected, flat = plain_gradient(mixture(name), merged, reference)
    sizes = [p.numel() for p in merged.parameters()]
    full = {
        own: part.view(p.shape)
        for (own, p), part in zip(merged.named_parameters(), flat.split(sizes), strict=True)
    }
    objective = make(mixture(name), lora.model, reference, 40)
    batch, seen = objective.batch(comparisons()), list[float]()

    def loss(rows: Batch, logp: Tensor) -> Any:
        output = objective.compute_loss(rows, logp)
        seen.append(float(output.loss.detach()))
        return output

    trainer = make_trainer(lora.model, max_tokens_per_microbatch=40)
    trainer.train_step(batch, loss)
    assert sum(seen) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    found, wanted = [], []
    for place, layer in lora.layers.items():
        for p in (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight):
            moment = trainer.optimizer.state[p]["exp_avg"].flatten()
            found.append(moment / (1 - trainer.config.betas[0]))
        gradient, (down, up) = full[f"{place}.weight"], before[place]
        wanted += [(2 * up.T @ gradient).flatten(), (2 * gradient @ down.T).flatten()]
    assert len(seen) > 1
    assert relative(torch.cat(found), torch.cat(wanted)) < 2e-4


def test_a_mixture_of_losses_is_their_weighted_sum() -> None:
    policy, reference = models()
    parts = [("dpo", 0.8), ("bco_pair", 0.2), ("sft", 1.0)]
    mixed = Mixture([Term(LOSSES[n], LOSSES[n].defaults, w) for n, w in parts])
    found, gradient = plain_gradient(mixed, policy, reference)
    alone = [(w, *plain_gradient(mixture(n), policy, reference)) for n, w in parts]
    assert found == pytest.approx(sum(w * loss for w, loss, _ in alone), rel=1e-6)
    assert relative(gradient, sum(w * g for w, _, g in alone)) < 1e-5  # type: ignore[arg-type]
    objective = make(mixed, policy, reference, 30)
    batch = objective.batch(comparisons())
    step = step_gradient(policy, batch, objective.compute_loss, max_tokens_per_microbatch=30)
    assert relative(step, gradient) < 2e-4


def test_dpo_is_what_the_paper_says() -> None:
    policy, reference = models()
    batch = collate(comparisons(grades=[(1.0, 0.0), (0.0, 1.0)]))
    own, ref = plain_logp(policy, batch).sum(-1), plain_logp(reference, batch).sum(-1)
    h = (own - ref).detach()
    by_hand = -sum(torch.nn.functional.logsigmoid(0.1 * d) for d in (h[0] - h[1], h[3] - h[2])) / 2
    objective = make(mixture("dpo"), *models())
    ready = objective.batch(comparisons(grades=[(1.0, 0.0), (0.0, 1.0)]))
    output = objective.compute_loss(ready, plain_logp(policy, batch))
    assert float(output.loss) == pytest.approx(float(by_hand), rel=1e-5)
    wins = [float(h[0] > h[1]), float(h[3] > h[2])]
    metrics = objective.derived({k: float(v) for k, v in output.sums.items()})
    assert metrics["preference/accuracy"] == pytest.approx(sum(wins) / 2)
    gap = 0.1 * float((h[0] - h[1] + h[3] - h[2]) / 2)
    assert metrics["preference/margin"] == pytest.approx(gap, rel=1e-4)
    tokens = batch.mask.sum(-1)
    shift = float((h[0] / tokens[0] + h[3] / tokens[3]) / 2)
    assert metrics["preference/chosen_shift"] == pytest.approx(shift, rel=1e-4)
    assert metrics["preference/displacement"] == pytest.approx(max(0.0, -shift) * (gap > 0))


@pytest.mark.parametrize(
    "losses", [[("simpo", {}), ("dpo", {})], [("sft", {}), ("ipo", {"beta": 0.5})]]
)
def test_logged_margins_are_those_of_the_first_loss_that_has_one(losses: Any) -> None:
    terms = [Term(LOSSES[n], replace(LOSSES[n].defaults, **s), 1.0) for n, s in losses]
    shown = next(term for term in terms if term.row.name != "sft")
    groups = comparisons(grades=[(1.0, 0.0), (1.0, 0.0)])
    rows = plain_rows(groups, mixture(shown.row.name), *models())
    sides = [rows.chosen, rows.rejected]
    if shown.row.needs_reference:
        sides = [rows.chosen - rows.ref_chosen, rows.rejected - rows.ref_rejected]
    counts = (rows.chosen_tokens, rows.rejected_tokens)
    better, worse = (side / n for side, n in zip(sides, counts, strict=True))
    found = make(Mixture(terms), *models()).heldout(groups)
    expected = shown.settings.beta * float((better - worse).detach().mean())
    assert found["preference/heldout_margin"] == pytest.approx(expected, rel=1e-4)


def test_lengths_and_margins_are_correlated_over_the_whole_step() -> None:
    policy, reference = models()
    groups = comparisons(1, [(1.0, 0.0)] * 6)
    rows = plain_rows(groups, mixture("dpo"), *models())
    objective = make(mixture("dpo"), policy, reference)
    margins = (rows.chosen - rows.ref_chosen - rows.rejected + rows.ref_rejected).detach()
    expected = torch.corrcoef(torch.stack([margins, rows.chosen_tokens - rows.rejected_tokens]))
    batch = objective.batch(groups)
    found = list[Any]()
    step_gradient(
        policy,
        batch,
        lambda b, logp: found.append(objective.compute_loss(b, logp)) or found[-1],  # type: ignore[func-returns-value]
        max_tokens_per_microbatch=30,
    )
    keys = found[0].sums
    metrics = objective.derived({k: float(sum(part.sums[k] for part in found)) for k in keys})
    assert len(found) > 1
    assert metrics["preference/length_corr"] == pytest.approx(float(expected[0, 1]), abs=1e-4)
    assert not any("squared" in key or "length" in key for key in metrics if "corr" not in key)


def test_heldout_comparisons_have_the_metrics_of_one_step() -> None:
    policy, reference = models()
    objective = make(mixture("dpo"), policy, reference)
    found = objective.heldout(comparisons())
    expected, _ = plain_gradient(mixture("dpo"), policy, reference)
    assert found["preference/heldout_loss"] == pytest.approx(expected, rel=1e-5)
    rows = plain_rows(comparisons(), mixture("dpo"), *models())
    gap = rows.chosen - rows.ref_chosen - rows.rejected + rows.ref_rejected
    won = float(((gap > 0) * rows.weight).sum() / rows.weight.sum())
    assert found["preference/heldout_accuracy"] == pytest.approx(won)
    low, high = (found[f"preference/heldout_accuracy_{end}"] for end in ("low", "high"))
    assert 0 <= low < won < high <= 1  # type: ignore[operator]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("completions", [3, 4, 6])
def test_comparisons_with_all_pairs_in_one_order_have_the_accuracy_1_or_0(
    completions: int, right: bool
) -> None:
    """Thirds, sixths and fifteenths of pairs do not add up to 1 in floating point."""
    policy, reference = models()
    (group,) = comparisons(grades=[tuple(map(float, range(completions)))])
    batch = collate([group])
    with torch.no_grad():
        logp, ref = (plain_logp(copy.deepcopy(model), batch) for model in (policy, reference))
    for row, value in zip(group.trajectories, (logp - ref).sum(-1).tolist(), strict=True):
        row.reward = Reward(value if right else -value)
    found = make(mixture("dpo"), policy, reference).heldout([group])
    assert found["preference/heldout_accuracy"] == float(right)


def test_comparisons_of_the_first_policy_are_counted() -> None:
    """Also after a resume, when the policy has other weights."""
    groups = [
        replace(group, task=Comparison(group.task.id, "?", model=model))
        for group, model in zip(comparisons(), ("own", "other", "own", "", "own"), strict=True)
    ]
    policy, reference = models()
    found = []
    for model in ("own", "later"):
        found.append(make(mixture("dpo"), policy, reference, policy_hash=partial(str, model)))
        found[-1].begin(Mock(heldout=[]))
    saved, resumed = (one.components()["preference_start"] for one in found)
    resumed.load({}, saved.state())
    for one in found:
        one.batch(groups)
        assert one.derived({})["preference/on_policy_frac"] == 3 / 5
    offline = make(mixture("dpo"), policy, reference)
    offline.batch(groups)
    assert "preference/on_policy_frac" not in offline.derived({})


def test_a_step_of_ties_trains_nothing() -> None:
    policy, reference = models()
    objective = make(mixture("dpo"), policy, reference)
    batch = objective.batch(comparisons(grades=[(1.0, 1.0), (0.0, 0.0)]))
    assert batch.weights is not None and not batch.weights.any()
    assert objective.heldout(comparisons(grades=[(1.0, 1.0)])) == {}


def test_mismatched_completions_follow_another_prompt() -> None:
    groups = comparisons()
    rows = [one for group in groups for one in group.trajectories]
    for own, found in zip(rows, mismatched(groups, 8), strict=True):
        (made,) = found.trajectories
        prompt = own.tokens[: own.prompt_length]
        assert made.tokens[: made.prompt_length] == prompt and len(made.tokens) <= 8
        reply = made.tokens[made.prompt_length :]
        others = [
            one.tokens[one.prompt_length :]
            for one in rows
            if one.tokens[: one.prompt_length] != prompt
        ]
        assert any(reply == other[: len(reply)] for other in others)


class TestCached:
    def table(self, path: Path, folder: Path | None = None, **seen: Any) -> CachedReference:
        _, reference = models()
        made, groups = CachedReference(path / "r.safetensors", folder), comparisons()

        def score(batch: Batch) -> Tensor:
            seen.setdefault("rows", []).append(len(batch.tokens))
            return score_tables(PolicyRoot(reference), batch, Scoring(), 10**6, True)[0]

        made.fill("key", seen.get("groups", groups), score)
        return made

    def test_it_has_the_log_probs_of_the_frozen_model(self, tmp_path: Path) -> None:
        _, reference = models()
        batch = collate(comparisons()[::-1])
        frozen = FrozenReference(reference, Scoring(), 10**6, True).score(batch).ref_logp
        cached = self.table(tmp_path).score(batch).ref_logp
        assert torch.allclose(cached, frozen, atol=1e-5) and float(cached.abs().sum()) > 1  # type: ignore[arg-type,union-attr]

    def test_a_resumed_run_reads_the_same_bits(self, tmp_path: Path) -> None:
        first, batch = self.table(tmp_path), collate(comparisons())
        again = CachedReference(tmp_path / "r.safetensors")
        again.load({}, first.state())
        assert torch.equal(first.score(batch).ref_logp, again.score(batch).ref_logp)  # type: ignore[arg-type]

    def test_a_completion_of_two_comparisons_is_kept_once(self, tmp_path: Path) -> None:
        whole = comparisons()
        more = [*whole[:2], Group(whole[0].task, whole[0].trajectories[:1]), *whole[2:]]
        first = self.table(tmp_path, groups=more)
        again = CachedReference(tmp_path / "r.safetensors")
        again.load({}, first.state())
        batch = collate(whole)
        frozen = FrozenReference(models()[1], Scoring(), 10**6, True).score(batch).ref_logp
        assert torch.allclose(again.score(batch).ref_logp, frozen, atol=1e-5)  # type: ignore[arg-type]

    def test_runs_share_what_is_computed(self, tmp_path: Path) -> None:
        rows = list[int]()
        whole = comparisons()
        self.table(tmp_path, tmp_path / "shared", rows=rows, groups=whole[:3])
        self.table(tmp_path, tmp_path / "shared", rows=rows, groups=whole)
        self.table(tmp_path, tmp_path / "shared", rows=rows, groups=whole)
        assert rows == [8, 4]  # only what was missing

    def test_other_tokens_are_not_found(self, tmp_path: Path) -> None:
        made = self.table(tmp_path)
        with pytest.raises(ValueError, match="lack trajectory 0 of task task-0"):
            made.score(collate(comparisons(seed=1)))

    @pytest.mark.parametrize("fault", ["missing", "damaged", "other"])
    def test_a_lost_table_ends_a_resume(self, tmp_path: Path, fault: str) -> None:
        state, file = self.table(tmp_path).state(), tmp_path / "r.safetensors"
        match fault:
            case "missing":
                file.unlink()
            case "damaged":
                file.write_bytes(file.read_bytes()[:-9])
            case "other":
                state = {"key": "0"}
        with pytest.raises(UserError, match=r"r\.safetensors .*(missing|damaged|another)"):
            CachedReference(file).load({}, state)
